"""Power cuts: every state that a disk may be in when the power goes during a command.

A disk holds what was synced. Of the names that changed since, it may hold any: file systems write the
changes of different folders in any order. Of the bytes that were not synced it may hold none or a part.
The calls of a command are recorded once; then each state after each call is made in a folder and looked
at. What was acknowledged must be there; what was being done may be there or not, but not in part.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.faults.known import command
from tests.faults.operations import OPERATIONS, Operation, Scene
from tests.faults.outcomes import EVERY, Effort, Outcome
from tests.faults.processes import Ended, workspace
from tests.faults.recorder import Call, Recorder

_MAX_CHANGES = 5
"""Unsynced changes of which every subset is tried. Of more, each is tried alone and left out alone."""
_RANDOM_SUBSETS = 8
_SCRATCH = ("tmp", "leases")
"""Folders of files without a lasting name."""


@dataclass(eq=False, slots=True)
class Node:
    """A file, a folder or a symbolic link, with what the disk holds of it for certain."""

    names: dict[str, Node] | None = None
    """The entries of a folder."""
    content: bytes = b""
    """The bytes of a file."""
    unsynced: bytes | None = None
    """Its bytes in memory, if they were never synced."""
    target: str = ""
    """Where a symbolic link leads."""


class Change(NamedTuple):
    """A change of names that is in memory: all of it reaches the disk, or nothing."""

    steps: tuple[tuple[Node, str, Node | None], ...]
    """Folders, names and what these become: None if the name is removed."""


@dataclass(slots=True)
class Disk:
    """What a disk holds, and what the page cache holds besides."""

    root: Node
    """The folder as it is in memory."""
    durable: dict[Node, dict[str, Node]] = field(default_factory=dict)
    """What the disk holds of each folder."""
    changes: list[Change] = field(default_factory=list)
    """Unsynced changes, in their order."""

    @classmethod
    def read(cls, folder: Path) -> Disk:
        """Return the disk with a folder that is synced."""
        disk = cls(_read_tree(folder, {}))
        disk._settle(disk.root)
        return disk

    def _settle(self, folder: Node) -> None:
        self.durable[folder] = dict(_entries(folder))
        for node in _entries(folder).values():
            if node.names is not None:
                self._settle(node)

    def apply(self, call: Call, root: Path) -> None:
        """Apply a call to the page cache, and a sync to the disk too."""
        if call.kind in {"lock", "lease"}:
            return
        parts = Path(call.path).relative_to(root).parts
        if call.kind == "sync":
            self._sync(self._find(parts), call)
            return
        folder, name = self._find(parts[:-1]), parts[-1]
        assert folder is not None
        if call.kind in {"rename", "link"}:
            *above, old = Path(call.source).relative_to(root).parts
            source = self._find(above)
            assert source is not None
            node = _entries(source)[old]
            if call.content is not None:
                node.unsynced = call.content
            removal = [(source, old, None)] if call.kind == "rename" else []
            self._change((folder, name, node), *removal)
        else:
            made = {
                "create": lambda: Node(unsynced=b""),
                "mkdir": lambda: Node({}),
                "symlink": lambda: Node(target=call.source),
                "unlink": lambda: None,
                "rmdir": lambda: None,
            }[call.kind]()
            self._change((folder, name, made))

    def _change(self, *steps: tuple[Node, str, Node | None]) -> None:
        self.changes.append(Change(steps))
        _do(steps, {folder: _entries(folder) for folder, _, _ in steps})

    def _sync(self, node: Node | None, call: Call) -> None:
        if node is None:  # the file has no name any more
            return
        if node.names is None:
            assert call.content is not None
            node.content, node.unsynced = call.content, None
            return
        rest = []
        for change in self.changes:
            if change.steps[0][0] is node:  # a rename is written with the folder of the new name
                _do(change.steps, self.durable)
            else:
                rest.append(change)
        self.changes = rest

    def _find(self, parts: Sequence[str]) -> Node | None:
        node: Node | None = self.root
        for part in parts:
            node = _entries(node).get(part) if node is not None else None
        return node

    def tree(self) -> Iterator[tuple[Path, Node]]:
        """Yield every file and folder, with its path."""
        found = [(Path(), self.root)]
        while found:
            path, node = found.pop()
            yield path, node
            found += [(path / part, other) for part, other in (node.names or {}).items()]

    def states(self, chance: random.Random) -> Iterator[dict[str, bytes | str | None]]:
        """Yield what may be found after a power cut: files with bytes, links with targets, folders with None.

        Subsets of what matters only to temporary files are left out.
        """
        scratch = {
            self._find((*above, ".blobstore", name))
            for name in _SCRATCH
            for above in ((), ("store",))
        }
        lasting: list[Change] = []
        passing: list[Change] = []
        for change in self.changes:
            is_passing = all(folder in scratch for folder, _, _ in change.steps)
            (passing if is_passing else lasting).append(change)
        for subset in _subsets(lasting, chance):
            chosen = {id(change) for change in (*subset, *passing)}
            names = {folder: dict(entries) for folder, entries in self.durable.items()}
            for change in self.changes:
                if id(change) in chosen:
                    _do(change.steps, names)
            for kept in (0.0, 0.5):
                yield dict(_walk(self.root, names, kept))


def _do(steps: Sequence[tuple[Node, str, Node | None]], names: dict[Node, dict[str, Node]]) -> None:
    for folder, name, node in steps:
        entries = names.setdefault(folder, {})
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


def _subsets(changes: Sequence[Change], chance: random.Random) -> Iterator[Sequence[Change]]:
    if len(changes) <= _MAX_CHANGES:
        for count in range(len(changes) + 1):
            yield from itertools.combinations(changes, count)
        return
    yield from ((), changes)
    for number, change in enumerate(changes):
        yield [change]
        yield [*changes[:number], *changes[number + 1 :]]
    for _ in range(_RANDOM_SUBSETS):
        yield [change for change in changes if chance.random() < 0.5]


def _walk(
    folder: Node, names: dict[Node, dict[str, Node]], kept: float, path: str = ""
) -> Iterator[tuple[str, bytes | str | None]]:
    """Yield files and folders; ``kept`` is the part of unsynced bytes that reached the disk."""
    for name, node in names.get(folder, {}).items():
        inner = f"{path}/{name}" if path else name
        if node.names is not None:
            yield inner, None
            yield from _walk(node, names, kept, inner)
        elif node.target:
            yield inner, node.target
        else:
            unsynced = node.unsynced
            yield inner, node.content if unsynced is None else unsynced[: int(len(unsynced) * kept)]


def _entries(node: Node) -> dict[str, Node]:
    assert node.names is not None
    return node.names


def _read_tree(folder: Path, known: dict[tuple[int, int], Node]) -> Node:
    """Return a folder with the bytes of its files; names of one file have the same node."""
    names = {}
    for entry in os.scandir(folder):
        status = entry.stat(follow_symlinks=False)
        path = Path(entry.path)
        if entry.is_dir(follow_symlinks=False):
            names[entry.name] = _read_tree(path, known)
        elif entry.is_symlink():
            names[entry.name] = Node(target=str(path.readlink()))
        else:
            key = (status.st_dev, status.st_ino)
            if key not in known:
                known[key] = Node(content=path.read_bytes())
            names[entry.name] = known[key]
    return Node(names)


def run(
    effort: Effort, only: Container[str] = EVERY, *, most: int = sys.maxsize, unsynced: str = ""
) -> list[Outcome]:
    """Record each command ``effort.count`` times, each time after other ones, and try all states.

    Args:
        effort: how often, and for how long.
        only: names of the commands.
        most: number of states after a recording to try at most, chosen at random.
        unsynced: files or folders, to test the test: their syncs do nothing, until this is noticed.
    """
    chosen = [item for item in OPERATIONS if item.name in only]
    return [
        _run(operation, effort.share(len(chosen) - number), most, unsynced)
        for number, operation in enumerate(chosen)
    ]


def _run(operation: Operation, effort: Effort, most: int, unsynced: str) -> Outcome:
    outcome = Outcome(f"power cut during {operation.name}")
    for number in effort:
        with workspace() as folder:
            cuts = _Cuts(operation, Scene(folder / "scene", effort.seed + number), outcome)
            states = cuts.states(effort.seed, unsynced)
            if len(states) > most:
                states = random.Random(effort.seed).sample(states, most)
            # Syncs that are lost show in the states of the end.
            for cut in reversed(states) if unsynced else states:
                if (outcome.injected and effort.is_spent) or (unsynced and outcome.violations):
                    break
                cuts.look(cut)
    return outcome


class _Cut(NamedTuple):
    """A state of the disk, and when it may be found."""

    state: dict[str, bytes | str | None]
    after: str
    """The last call before the power went."""
    is_over: bool
    """Whether the command had succeeded."""


class _Cuts:
    """The power cuts during one command in one scene."""

    def __init__(self, operation: Operation, scene: Scene, outcome: Outcome) -> None:
        self._operation = operation
        self._scene = scene
        self._outcome = outcome
        self._arguments = operation.prepare(scene)

    def states(self, seed: int, unsynced: str) -> list[_Cut]:
        """Run the command; return the different states, each with the first call that allows it."""
        folder = self._scene.folder
        disk, recorder, chance = Disk.read(folder), Recorder(folder), random.Random(seed)
        with recorder.recording():
            code, _, errors = command(*self._arguments)
        if code:
            self._outcome.violate(f"exit code {code} without any fault: {errors[-500:]}")
        found: dict[object, _Cut] = {}
        last = len(recorder.calls)
        for number, call in enumerate([None, *recorder.calls]):
            after = (
                "nothing" if call is None else f"{number} of {last} calls, {call.kind} {call.path}"
            )
            if call is not None and not _is_dropped(call, unsynced):
                disk.apply(call, folder)
            for state in disk.states(chance):
                lasting = frozenset(item for item in state.items() if not _is_passing(item[0]))
                key = (lasting, number == last)
                found.setdefault(key, _Cut(state, after, number == last))
        return list(found.values())

    def look(self, cut: _Cut) -> None:
        """Make a state in the scene's folder, and judge it."""
        for path in self._scene.folder.iterdir():
            if path.name != "sources":
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for name, content in cut.state.items():
            if not name.startswith("sources"):
                _write(self._scene.folder / name, content)
        self._outcome.injected += 1
        code = 0 if cut.is_over else -signal.SIGKILL
        ended = Ended(code=code, stdout="", stderr="", seconds=0)
        how = f"blobstore {' '.join(map(str, self._arguments))}, cut after {cut.after}"
        self._outcome.add(self._operation.judge(self._scene, ended), how)


def _is_dropped(call: Call, unsynced: str) -> bool:
    return call.kind == "sync" and unsynced == ("folders" if call.content is None else "files")


def _is_passing(name: str) -> bool:
    parts = name.split("/")
    return ".blobstore" in parts[:-1] and parts[parts.index(".blobstore") + 1] in _SCRATCH


def _write(path: Path, content: bytes | str | None) -> None:
    if content is None:
        path.mkdir()
    elif isinstance(content, str):
        path.symlink_to(content)
    else:
        path.write_bytes(content)
