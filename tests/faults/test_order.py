"""Names change under the locks that docs/concepts/durability.md states, and are durable when a command ends."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.known import command
from tests.faults.operations import OPERATIONS, Scene
from tests.faults.power import Disk
from tests.faults.processes import ROOT, workspace
from tests.faults.recorder import Call, Recorder

_CACHES = (
    "headers",
    "verified-",
    "references-",
    "tmp",
    "leases",
    "partial",
    "remotes",
    "published",
)
"""What need not be durable."""


class _Run:
    """The calls of a command, and the parts of the store that they change."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        (operation,) = (item for item in OPERATIONS if item.name == name)
        scene = Scene(folder / "scene", seed)
        arguments = operation.prepare(scene)
        self.name = name
        self.root = scene.folder
        self.disk = Disk.read(scene.folder)
        recorder = Recorder(scene.folder)
        with recorder.recording():
            code, _, errors = command(*arguments)
        assert code == 0, errors
        self.calls = recorder.calls
        self._store = scene.store

    def place(self, path: str) -> str:
        """Return the folder of the store that a path is in, such as ``blobs``; empty if in none."""
        if not Path(path).is_relative_to(self._store):
            return ""
        *parts, _ = (*Path(path).relative_to(self._store).parts, "")
        return parts[1 if parts[0] == ".blobstore" and len(parts) > 1 else 0] if parts else ""


_NAMED = {
    "manifests": "a manifest gets its name",
    "blobs": "a blob gets its name in `blobs/`",
    "cold": "a blob gets its name in `cold/` or `bases/`",
    "bases": "a blob gets its name in `cold/` or `bases/`",
    "quarantine": "a file gets its name in `quarantine/`",
}
_REMOVED = "a name is removed from `manifests/`, `blobs/`, `cold/` or `bases/`"


def _changes(run: _Run) -> Iterator[tuple[str, Call]]:
    """Yield the row of the table that each change belongs to, and the call."""
    for call in run.calls:
        place = run.place(call.path)
        if call.kind == "create" and place == "leases":
            yield "a lease is created", call
        elif call.kind == "lease":
            yield "a blob is added to a lease", call
        elif call.kind in {"rename", "link"} and place in _NAMED:
            is_repair = run.name == "repair" and place == "blobs"
            yield "a repaired blob gets its name" if is_repair else _NAMED[place], call
        loses = call.path if call.kind == "unlink" else call.source if call.kind == "rename" else ""
        if loses and run.place(loses) in _NAMED:
            yield _REMOVED, call


def _is_leased(call: Call) -> bool:
    return Path(call.path).name.removeprefix("sha256-") in call.leased


_RULES: dict[str, Callable[[Call], bool]] = {
    "any or none, but a lease lists the blob": _is_leased,
    "shared": lambda call: call.lock in {fcntl.LOCK_SH, fcntl.LOCK_EX},
    "exclusive": lambda call: call.lock == fcntl.LOCK_EX,
    "exclusive, and a lease lists the blob": (
        lambda call: call.lock == fcntl.LOCK_EX and _is_leased(call)
    ),
}


def _table() -> dict[str, str]:
    """Return the locks in docs/concepts/durability.md by the change of a name."""
    text = (ROOT / "docs" / "concepts" / "durability.md").read_text("utf-8")
    (table,) = re.findall(r"\| change of a name \| lock \|\n\| --- \| --- \|\n((?:\|.*\n)+)", text)
    rows = (line.strip("| \n").split(" | ") for line in table.splitlines())
    return dict(rows)


every_command = pytest.mark.parametrize("name", [operation.name for operation in OPERATIONS])


@every_command
@pytest.mark.parametrize("seed", range(2))
def test_names_change_under_the_locks_that_the_documentation_states(name: str, seed: int) -> None:
    table = _table()
    assert set(table.values()) == _RULES.keys()
    with workspace() as folder:
        run = _Run(name, folder, seed)
        for change, call in _changes(run):
            assert _RULES[table[change]](call), (change, call)


@every_command
def test_files_are_synced_before_they_get_their_names_and_folders_before_the_command_ends(
    name: str,
) -> None:
    with workspace() as folder:
        run = _Run(name, folder, 0)
        for call in run.calls:
            run.disk.apply(call, run.root)
            if call.kind in {"rename", "link"} and call.content is not None:
                assert run.place(call.path).startswith(_CACHES), call
        tidied = {call.path for call in run.calls if call.kind == "rmdir"}  # empty folders may stay
        files = {path for path, node in run.disk.tree() if node.unsynced is not None}
        names = {
            path / entry
            for change in run.disk.changes
            for changed, entry, _ in change.steps
            for path, node in run.disk.tree()
            if node is changed
        }
        unsynced = {
            str(run.root / path)
            for path in files | names
            if not any(part.startswith(_CACHES) or part.endswith(".tmp") for part in path.parts)
        }
        assert unsynced <= tidied
