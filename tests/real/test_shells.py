"""Completion as a user has it: bash and zsh with a terminal, and the key Tab; fish is asked."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.commands import quick_commands
from tests.support.models import dense_tensors, write_folder
from tests.unit.cli.running import environment, run

SECONDS = 120
ROOT = Path(__file__).parents[2]
STARTS = {"bash": ("--noprofile", "--norc", "-i"), "zsh": ("-f", "-i")}
SETUP = {"bash": "set +o history", "zsh": "autoload -Uz compinit; compinit -u -D"}
# It completes as the program does. Otherwise it prints its arguments.
PROGRAM = """#!/bin/sh
if [ -n "$_BLOBSTORE_COMPLETE" ] || [ "$1" = completion ]; then
    exec {program} "$@"
fi
echo "got<$*>"
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The program that completes."""
    with quick_commands(tmp_path_factory.mktemp("commands")) as programs:
        yield programs / "blobstore"


def shell_environment(folder: Path, completing: Path) -> Mapping[str, str]:
    """Return the environment of a shell that finds the program."""
    program = folder / "bin" / "blobstore"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM.format(program=completing))
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    return environment(PATH=path, TERM="dumb", PS1="> ", LC_ALL="C.UTF-8", HOME=str(folder))


def typed(shell: str, line: str, folder: Path, setup: str, program: Path) -> str:
    """Return the arguments of the line that a shell runs after a user has typed it and pressed Tab."""
    variables = shell_environment(folder, program)
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(shell, [shell, *STARTS[shell]], variables)
    try:
        os.write(terminal, f"{setup}; echo re''ady\n".encode())
        _read_until(terminal, r"ready()")
        os.write(terminal, f"blobstore {line}\t\n".encode())
        return _read_until(terminal, r"got<(.*)>")
    finally:
        os.write(terminal, b"\x03\nexit\n")
        os.close(terminal)
        os.waitpid(child, 0)


def _read_until(terminal: int, pattern: str) -> str:
    text, end = "", time.monotonic() + SECONDS
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
        if found := re.search(pattern, text):
            return found[1]
    raise AssertionError(text)


@pytest.mark.parametrize("shell", [shell for shell in STARTS if shutil.which(shell)])
def test_the_key_tab_completes_names_remotes_ids_and_paths(
    shell: str, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"auths": {"registry.example": {}}}')
    tensors = dense_tensors()
    for name, some in (("first", dict(list(tensors.items())[:2])), ("second", tensors)):
        run("create", write_folder(tmp_path / name, some), "dense")
    run("push", "dense", f"file://{tmp_path}/r/team:v1")
    former = Digest.of(next(LocalStore().names.former(Reference.parse("dense"))).data).short

    words = {
        "sho": "show",
        "rm den": "rm dense",
        "rm dense:la": "rm dense:latest",
        "pull file:": f"pull file://{tmp_path}/r",
        f"pull file://{tmp_path}/r/te": f"pull file://{tmp_path}/r/team:v1",
        "restore dense ": f"restore dense {former}",
        "login reg": "login registry.example",
        "show dense path": "show dense path/to/\u00e9<&>",
        "find model.emb": "find model.embed_tokens.weight",
        "create ./sec": "create ./second",
    }
    setup = f'{SETUP[shell]}; eval "$(blobstore completion {shell})"'
    found = {line: typed(shell, line, tmp_path, setup, program).rstrip(" /") for line in words}

    assert found == words


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a package that has the completion files."""
    folder = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ".ci/release/share.py", folder], check=True, cwd=ROOT)
    return folder


# What the start-up files of a system do for /usr/share.
INSTALLED = {
    "bash": ". {share}/bash-completion/completions/blobstore",
    "zsh": "fpath=({share}/zsh/site-functions $fpath); autoload -Uz compinit; compinit -u -D",
}


@pytest.mark.parametrize("shell", [shell for shell in STARTS if shutil.which(shell)])
def test_the_key_tab_completes_with_the_installed_file(
    shell: str, share: Path, program: Path, tmp_path: Path
) -> None:
    setup = INSTALLED[shell].format(share=share)

    assert typed(shell, "sho", tmp_path, setup, program).strip() == "show"
    assert typed(shell, "list --sort sh", tmp_path, setup, program).strip() == "list --sort shared"


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_finds_the_installed_file(share: Path, program: Path, tmp_path: Path) -> None:
    def offered(line: str) -> list[str]:
        done = subprocess.run(
            ["fish", "-c", f"complete -C {line!r}"],
            capture_output=True,
            check=True,
            env={**shell_environment(tmp_path, program), "XDG_DATA_DIRS": str(share)},
            text=True,
        )
        assert done.stderr == ""
        return [word.partition("\t")[0] for word in done.stdout.splitlines()]

    assert offered("blobstore sho") == ["show"]
    assert offered("blobstore list --sort s") == ["shared", "size"]
