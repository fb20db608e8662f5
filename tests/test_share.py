"""The man pages: man and mandoc read them without a warning, and they say what ``--help`` says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from blobstore.cli.main import program
from tests.support.folders import contents

ROOT = Path(__file__).parents[1]
NAMES = (
    "blobstore",
    *(f"blobstore-{name}" for name in program.list_commands(click.Context(program))),
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def write_share(folder: Path, **variables: str) -> Path:
    command = [sys.executable, ".ci/release/share.py", str(folder)]
    subprocess.run(command, check=True, cwd=ROOT, env={"PATH": "", **variables})
    return folder


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_share(tmp_path_factory.mktemp("share")) / "man" / "man1"


def shown(page: Path) -> str:
    """Return a page as ``man`` shows it, on lines of any length."""
    environment = {"PATH": "/usr/bin:/bin", "MANWIDTH": "2000", "LC_ALL": "C.UTF-8"}
    command = ["man", "--no-hyphenation", "--warnings=all", "-l", str(page)]
    done = subprocess.run(command, capture_output=True, check=True, env=environment, text=True)
    assert done.stderr == ""
    return re.sub(r"\s+", " ", re.sub(".\b", "", done.stdout))


def test_each_command_has_a_page(manual: Path) -> None:
    assert {path.name for path in manual.iterdir()} == {f"{name}.1" for name in NAMES}


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_mandoc_has_no_warning(manual: Path) -> None:
    pages = sorted(manual.iterdir())
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", *pages],
        capture_output=True,
        check=False,
        text=True,
    )

    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
@pytest.mark.parametrize("name", ["blobstore", "blobstore-create", "blobstore-serve"])
def test_a_page_says_what_the_help_says(manual: Path, name: str) -> None:
    context = click.Context(program, info_name="blobstore", terminal_width=2000)
    command: click.Command | None = program
    if name != "blobstore":
        command = program.get_command(context, name.removeprefix("blobstore-"))
        context = click.Context(program, context, name.removeprefix("blobstore-"))
    assert command is not None
    text = shown(manual / f"{name}.1")

    paragraphs = re.sub(r"\s*\n\s*", " ", (command.help or "").replace("\n\n", "\f"))
    for paragraph in paragraphs.split("\f"):
        assert paragraph.removeprefix("\b").strip() in text
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            for spelled in option.opts:
                assert spelled in text
            assert re.sub(r"\s+", " ", (option.help or "").strip()) in text
    if command.epilog:
        assert 'eval "$(blobstore completion bash)"' in text


def test_the_pages_are_equal_if_their_date_is_given(tmp_path: Path) -> None:
    folders = [
        write_share(tmp_path / name, SOURCE_DATE_EPOCH="86400", TZ=zone)
        for name, zone in (("a", "UTC"), ("b", "Asia/Tokyo"))
    ]

    first, second = map(contents, folders)
    assert first == second
    assert b'"1970-01-02"' in first["man/man1/blobstore.1"]
    assert f'"blobstore {VERSION}"'.encode() in first["man/man1/blobstore.1"]


def test_the_script_needs_no_library_but_click(tmp_path: Path) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['', {str(tmp_path)!r}]; before = set(sys.modules); "
        "runpy.run_path('.ci/release/share.py', run_name='__main__'); print(*(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT, text=True
    )

    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert loaded - sys.stdlib_module_names == {"blobstore", "click"}
