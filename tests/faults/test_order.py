"""Names change under the locks that docs/durability.md states, and are durable when a command ends."""

from __future__ import annotations

import fcntl
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.known import command
from tests.faults.operations import Scene, operations
from tests.faults.power import Disk
from tests.faults.processes import ROOT, workspace
from tests.faults.recorder import Call, Recorder

_LASTING = {"manifests", "blobs", "cold", "bases", "quarantine"}
_CACHES = ("headers", "verified-", "tmp", "leases")


class _Run:
    """The calls of a command, and the parts of the store that they change."""

    def __init__(self, name: str, folder: Path, seed: int) -> None:
        (operation,) = (item for item in operations() if item.name == name)
        scene = Scene(folder / "scene", seed)
        arguments = operation.prepare(scene)
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


def _changes(run: _Run) -> Iterator[tuple[str, Call, bool]]:
    """Yield the row of the table that each change of a name belongs to, the call, and whether a lease exists."""
    leases = set()
    for call in run.calls:
        place, source = run.place(call.path), run.place(call.source) if call.source else ""
        if call.kind == "create" and place == "leases":
            leases.add(call.path)
            yield "a lease is created", call, True
        elif call.kind == "unlink":
            leases.discard(call.path)
            if place in _LASTING:
                yield (
                    "a name is removed from `manifests/`, `blobs/`, `cold/` or `bases/`",
                    call,
                    False,
                )
        elif call.kind in {"rename", "link"}:
            if place == "manifests":
                yield "a manifest gets its name", call, False
            elif place == "blobs":
                yield "a blob gets its name in `blobs/`", call, bool(leases)
            elif place in _LASTING:
                yield "a file gets its name in `cold/`, `bases/` or `quarantine/`", call, False
            if source in _LASTING and call.kind == "rename":
                yield (
                    "a name is removed from `manifests/`, `blobs/`, `cold/` or `bases/`",
                    call,
                    False,
                )


_RULES: dict[str, Callable[[Call, bool], bool]] = {
    "shared": lambda call, _: call.lock in {fcntl.LOCK_SH, fcntl.LOCK_EX},
    "exclusive": lambda call, _: call.lock == fcntl.LOCK_EX,
    "exclusive, or none if a lease lists the blob": (
        lambda call, is_leased: is_leased or call.lock == fcntl.LOCK_EX
    ),
}


def _table() -> dict[str, str]:
    """Return the locks in docs/durability.md by the change of a name."""
    text = (ROOT / "docs" / "durability.md").read_text("utf-8")
    (table,) = re.findall(r"\| change of a name \| lock \|\n\| --- \| --- \|\n((?:\|.*\n)+)", text)
    rows = (line.strip("| \n").split(" | ") for line in table.splitlines())
    return dict(rows)


every_command = pytest.mark.parametrize("name", [operation.name for operation in operations()])


@every_command
@pytest.mark.parametrize("seed", range(2))
def test_names_change_under_the_locks_that_the_documentation_states(name: str, seed: int) -> None:
    table = _table()
    assert set(table.values()) == _RULES.keys()
    with workspace() as folder:
        run = _Run(name, folder, seed)
        for change, call, is_leased in _changes(run):
            assert _RULES[table[change]](call, is_leased), (change, call)


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
        unsynced = {
            str(run.root / path)
            for change in run.disk.changes
            for folder_node, entry, _ in change.steps
            for path in run.disk.paths(folder_node, entry)
            if not any(part.startswith(_CACHES) or part.endswith(".tmp") for part in path.parts)
        }
        assert unsynced <= tidied
