"""Completion in bash and zsh as a user has it: a shell with a terminal, and the key Tab."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import sys
import time
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.unit.cli.running import environment, run

SECONDS = 120
STARTS = {"bash": ("--noprofile", "--norc", "-i"), "zsh": ("-f", "-i")}
SETUP = {"bash": "set +o history", "zsh": "autoload -Uz compinit; compinit -u -D"}
# It completes as the program does. Otherwise it prints its arguments.
PROGRAM = """#!/bin/sh
if [ -n "$_BLOBSTORE_COMPLETE" ] || [ "$1" = completion ]; then
    exec {python} -c 'from blobstore.cli.main import main; main()' "$@"
fi
echo "got<$*>"
"""


def typed(shell: str, line: str, folder: Path) -> str:
    """Return the arguments of the line that a shell runs after a user has typed it and pressed Tab."""
    program = folder / "bin" / "blobstore"
    program.parent.mkdir(exist_ok=True)
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
    variables["LC_ALL"] = "C.UTF-8"
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(shell, [shell, *STARTS[shell]], environment(**variables))
    try:
        script = f'eval "$(blobstore completion {shell})"'
        os.write(terminal, f"{SETUP[shell]}; {script}; echo re''ady\n".encode())
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
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"auths": {"registry.example": {}}}')
    tensors = dense_tensors()
    for name, some in (("first", dict(list(tensors.items())[:2])), ("second", tensors)):
        run("create", write_folder(tmp_path / name, some), "dense")
    run("push", "dense", f"file://{tmp_path}/r/team:v1")
    former = Digest.of(next(LocalStore().former(Reference.parse("dense"))).data).short

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
    found = {line: typed(shell, line, tmp_path).rstrip(" /") for line in words}

    assert found == words
