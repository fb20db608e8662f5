"""Write the man pages, and the completion files that packages install.

    python .ci/release/share.py build/share

fills the folder as ``/usr/share`` has it: ``man/man1`` has a page for the program and one for each command, and
each shell has its file. It needs only click and the standard library. The pages have the date of SOURCE_DATE_EPOCH,
if it is set, or else that of the release.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

sys.path.insert(0, str(Path(__file__).parents[2]))  # a package is built before it is installed

from blobstore.cli.completion import SHELLS, completion_script
from blobstore.cli.main import program

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
COMPLETIONS = {
    "bash": "bash-completion/completions/blobstore",
    "zsh": "zsh/site-functions/_blobstore",
    "fish": "fish/vendor_completions.d/blobstore.fish",
}
"""Where each shell looks for the file of a command, below the folder ``share`` of its prefix."""
_GLYPHS = {
    "\\": r"\e",
    "-": r"\-",
    "'": r"\(aq",
    '"': r"\(dq",
    "`": r"\(ga",
    "^": r"\(ha",
    "~": r"\(ti",
}
"""What roff would take for a request, or print as another character."""


def escaped(text: str) -> str:
    """Return text for roff, which prints it as it is, in ASCII."""
    return "".join(
        _GLYPHS.get(letter, letter if letter.isascii() else rf"\[u{ord(letter):04X}]")
        for letter in text
    )


def line(text: str) -> str:
    """Return a line of text, also if it begins with a dot, as requests do."""
    return rf"\&{escaped(text)}" if text.startswith(".") else escaped(text)


def paragraphs(text: str | None) -> Iterator[str]:
    r"""Yield the lines of click's help: paragraphs are filled, except those that begin with ``\b``."""
    for number, paragraph in enumerate(inspect.cleandoc(text or "").split("\n\n")):
        lines = paragraph.splitlines()
        if number:
            yield ".PP"
        if lines[:1] == ["\b"]:
            yield from (".nf", *map(line, lines[1:]), ".fi")
        elif lines:
            yield line(" ".join(map(str.strip, lines)))


def term(text: str) -> str:
    """Return what an option is called: its names are bold, and what stands for values is italic."""
    return re.sub(
        r"[^\s,]+",
        lambda word: rf"\f{'B' if word[0].startswith('-') else 'I'}{escaped(word[0])}\fR",
        text,
    )


@functools.cache
def version_and_date() -> tuple[str, str]:
    """Return the version of these sources, and its date; today's before it is released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    notes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.search(rf"^## {re.escape(version)} - (\S+)", notes, re.MULTILINE)
    if epoch := os.environ.get("SOURCE_DATE_EPOCH"):
        return version, f"{datetime.fromtimestamp(int(epoch), UTC):%Y-%m-%d}"
    return version, released[1] if released else f"{datetime.now(UTC):%Y-%m-%d}"


def page(command: click.Command, context: click.Context) -> str:
    """Return the man page of a command, or of the program with a list of its commands."""
    path = context.command_path
    name = path.replace(" ", "-")
    version, date = version_and_date()
    what = command.get_short_help_str(limit=1000).removesuffix(".")
    lines = [
        f'.TH "{escaped(name.upper())}" 1 "{date}" "blobstore {version}" "Commands of blobstore"',
        *(".SH NAME", rf"{escaped(name)} \- {escaped(what[0].lower() + what[1:])}"),
        *(".SH SYNOPSIS", rf"\fB{escaped(path)}\fR"),
        line(" ".join(command.collect_usage_pieces(context))),
        *(".SH DESCRIPTION", *paragraphs(command.help)),
        ".SH OPTIONS",
    ]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record and isinstance(parameter, click.Option):
            lines += [".TP", term(record[0]), line(" ".join(record[1].split()))]
    if isinstance(command, click.Group):
        lines.append(".SH COMMANDS")
        for other, inner in commands(command, context):
            short = inner.get_short_help_str(limit=1000)
            lines += [".TP", rf"\fB{escaped(f'{name}-{other}')}\fR(1)", line(short)]
    if command.epilog:
        lines += [".SH NOTES", *paragraphs(command.epilog)]
    if context.parent:
        lines += [".SH SEE ALSO", r"\fBblobstore\fR(1)"]
    return "\n".join(lines) + "\n"


def commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group by their names, in the order of its help."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is not None and not command.hidden:
            yield name, command


def files() -> Iterator[tuple[str, str]]:
    """Yield paths below the folder ``share``, and what the files hold."""
    top = click.Context(program, info_name="blobstore", **program.context_settings)
    yield "man/man1/blobstore.1", page(program, top)
    for name, command in commands(program, top):
        context = click.Context(command, top, name, **command.context_settings)
        yield f"man/man1/blobstore-{name}.1", page(command, context)
    for shell in SHELLS:
        yield COMPLETIONS[shell], completion_script(shell)


def main(out: Path) -> None:
    """Write the files below a folder; those of the same names are replaced."""
    for name, text in files():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name the folder, such as build/share")
    main(Path(sys.argv[1]))
