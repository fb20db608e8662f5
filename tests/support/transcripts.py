"""The examples of the documentation, run in the order in which they stand.

A ``console`` block holds commands after ``$ `` and what they print. All blocks of a document run in one
shell, in one folder, whose path is left out. Times and rates may differ, a line ``…`` stands for any
lines.

    python -m tests.support.transcripts docs/guides/serve.md

runs a document and writes what the commands print into it. The pages of a folder, such as
docs/reference/commands, run as one document, in the order of the navigation in mkdocs.yml. For
README.md, give the folder that holds the package of its model in PYTHONPATH.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = "\x1e"
_VARIES = (
    (re.compile(r"\d+(?:\.\d+)? (?:ms|s)\b"), "TIME"),
    (re.compile(r"\d+(?:\.\d+)? [kMGT]?B/s"), "RATE"),
    (re.compile(r"just now|\d+ (?:second|minute)s? ago"), "AGE"),
    (re.compile(r"in \d+ (?:second|minute)s?"), "WAIT"),
    (re.compile(r"key [0-9a-f]{16}"), "KEY"),
    (re.compile(r"at \d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"), "MOMENT"),
    # Blobs that are older than some seconds are noted as verified.
    (re.compile(r"\d+(?:\.\d+)? k?B in \d+ files: caches"), "CACHES"),
    (re.compile(r" {2,}"), "  "),
    (
        re.compile(r"^progress: .*\n?", re.MULTILINE),
        "",
    ),  # of a command that takes longer than usual
)


@dataclass(frozen=True, slots=True)
class Example:
    """A command, and what the document says that it prints."""

    command: str
    expected: str
    line: int


def pages(document: str) -> list[Path]:
    """Return the files of a document: its own, or those of its folder in the order of the navigation."""
    if (ROOT / document).is_file():
        return [ROOT / document]
    folder = Path(document).relative_to("docs")
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return [ROOT / "docs" / name for name in re.findall(rf"{folder}/[\w-]+\.md", navigation)]


def examples(text: str) -> list[Example]:
    """Return the commands of a document in order."""
    found: list[Example] = []
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(1)) + 1
        command, output, line = "", "", 0
        for number, row in enumerate(block[1].splitlines(keepends=True), first):
            if row.startswith("$ "):
                if command:
                    found.append(Example(command, output, line))
                command, output, line = row[2:], "", number
            elif command.endswith("\\\n") and not output:
                command += row
            else:
                output += row
        found.append(Example(command, output, line))
    return found


def outputs(
    commands: list[str], folder: Path, programs: Path | None = None, **environment: str
) -> list[str]:
    """Run commands in one shell, in a folder with ``docs``; return what each prints on both streams.

    ``programs`` is a folder with programs that come before others of their names.
    """
    (folder / "docs").symlink_to(ROOT / "docs")
    script = "".join(f"printf '{_MARK}'\n{command}\n" for command in commands)
    folders = (programs, Path(sys.executable).parent, os.environ["PATH"])
    tools = os.pathsep.join(str(name) for name in folders if name is not None)
    home = {"HOME": str(folder), "PATH": tools, "COLUMNS": "100", "NO_COLOR": "1"}
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    done = subprocess.run(
        ["bash", "-c", f"exec 2>&1\n{script}"],
        capture_output=True,
        check=False,
        cwd=folder,
        env={**kept, **home, **environment},
        text=True,
    )
    shown = done.stdout.replace(f"file://{folder}/", "file:///srv/")
    return shown.replace(f"{folder}/", "").split(_MARK)[1:]


def is_as_expected(expected: str, found: str) -> bool:
    """Return whether a command printed what the document says."""
    for pattern, name in _VARIES:
        expected, found = pattern.sub(name, expected), pattern.sub(name, found)
    any_lines = re.escape(expected.strip()).replace(re.escape("…\n"), r"(?:.*\n)*?")
    any_lines = re.sub(r"…$", r"[\\s\\S]*", any_lines)
    return re.fullmatch(any_lines, found.strip()) is not None


def updated(text: str, found: list[str]) -> str:
    """Return a document with what its commands print, where it differs."""
    rows = text.splitlines(keepends=True)
    for example, output in reversed(list(zip(examples(text), found, strict=True))):
        if not is_as_expected(example.expected, output):
            begin = example.line - 1 + example.command.count("\n")
            end = begin + example.expected.count("\n")
            blank = "\n" if example.expected.endswith("\n\n") else ""
            rows[begin:end] = [output.strip("\n") + "\n" + blank]
    return "".join(rows)


if __name__ == "__main__":
    for document in sys.argv[1:]:
        files = pages(document)
        texts = [path.read_text(encoding="utf-8") for path in files]
        commands = [example.command for text in texts for example in examples(text)]
        with tempfile.TemporaryDirectory() as scratch:
            printed = outputs(commands, Path(scratch), PYTHONPATH=os.environ.get("PYTHONPATH", ""))
        for path, text in zip(files, texts, strict=True):
            count = len(examples(text))
            path.write_text(updated(text, printed[:count]), encoding="utf-8")
            del printed[:count]
