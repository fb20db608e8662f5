"""The store's protocol against a plain dictionary: a state machine that hypothesis drives.

Names are keys, and what a name stands for is its value; nothing that is done to other names, and no
crash, damage or collection, changes what is in the dictionary.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from blobstore.core.digest import Digest
from blobstore.store.leases import Lease
from blobstore.store.local import LocalStore
from tests.faults.invariants import Expected, bases_of, check_model, check_store, layers
from tests.faults.known import Known, command, write_models
from tests.faults.outcomes import Effort, Outcome
from tests.faults.processes import place_in_memory

_MODELS = 3
_NAMES = ("a", "b", "c")
_STEPS = 30
_DAY = 86400

models = st.integers(0, _MODELS - 1)
names = st.sampled_from(_NAMES)
_steps = 0


class StoreProtocol(RuleBasedStateMachine):
    """A store, and the dictionary that it must be."""

    sources: list[Known]

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="blobstore-faults-", dir=place_in_memory()))
        self.root = self.folder / "store"
        self.root.mkdir()  # commands refuse a store that is not there
        self.names: dict[str, Known] = {}
        self.damaged: set[Path] = set()
        """Blobs that are not whole, all of models that are in the dictionary."""
        self.held: list[tuple[Lease, set[str]]] = []
        """Leases of others that live, and the blobs that they hold."""

    def teardown(self) -> None:
        """Check the store as after any fault, and remove it."""
        try:
            self._repair()
            for lease, _ in self.held:
                lease.close()
            self.held.clear()
            expected = Expected([self._called(name) for name in self.names])
            found = check_store(self.root, expected, self.sources[0])
            assert not found, found
        finally:
            shutil.rmtree(self.folder)

    @rule(model=models, name=names)
    def create(self, model: int, name: str) -> None:
        known = self.sources[model]
        # A damaged blob is never trusted: to reuse one of another size is refused.
        if self._is_done("create", known.folder, name):
            self._take({name: known})

    @rule(name=names)
    def remove(self, name: str) -> None:
        code, _, errors = self._run("rm", name)
        assert bool(code) == (name not in self.names), errors
        self._take({name: None})

    @rule(source=names, to=names)
    def copy(self, source: str, to: str) -> None:
        if source not in self.names or source == to:
            assert self._run("cp", "--force", source, to)[0]
        elif self._is_done("cp", "--force", source, to):
            self._take({to: self.names[source]})

    @rule(source=names, to=names)
    def move(self, source: str, to: str) -> None:
        if source not in self.names or source == to:
            assert self._run("mv", "--force", source, to)[0]
        elif self._is_done("mv", "--force", source, to):
            self._take({to: self.names[source], source: None})

    @precondition(lambda self: self.names)
    @rule(chosen=st.sets(names, min_size=1), keep_hot=st.booleans())
    def freeze(self, chosen: set[str], keep_hot: bool) -> None:
        keeping = ["--keep-hot"] if keep_hot else []
        known = sorted(chosen & self.names.keys())
        if known:
            self._is_done("freeze", *known, *keeping)

    @precondition(lambda self: self.names)
    @rule(name=names, keep_cold=st.booleans())
    def thaw(self, name: str, keep_cold: bool) -> None:
        keeping = ["--keep-cold"] if keep_cold else []
        if name in self.names and self._is_done("thaw", name, *keeping) and not self.damaged:
            assert {
                layer["digest"].replace(":", "-") for layer in self._layers(name)
            } <= self._hot()

    @precondition(lambda self: not self.held)
    @rule()
    def prune(self) -> None:
        """Remove what no manifest reaches, as a program does that knows nothing of cold blobs."""
        for name in self._hot() - self._reached():
            (self.root / "blobs" / name).unlink()

    @rule(older_than=st.sampled_from(["0s", "1h"]), is_dry=st.booleans())
    def collect(self, older_than: str, is_dry: bool) -> None:
        before = self._blobs()
        needed = self._reached().union(*(blobs for _, blobs in self.held))
        needed |= bases_of(self.root, needed)
        dry = ["--dry-run"] if is_dry else []
        # What a damaged cold blob needs, nobody knows.
        if not self._is_done("gc", "--force", "--older-than", older_than, *dry):
            return
        left = self._blobs()
        assert left >= before & needed
        if is_dry:
            assert left == before
        elif older_than == "0s":
            assert left <= needed

    @rule(blobs=st.sets(st.integers(0, 20), max_size=5), is_dead=st.booleans())
    def lease(self, blobs: set[int], is_dead: bool) -> None:
        """Hold blobs as another process does that lives, or that has been killed."""
        LocalStore(self.root).folder("leases").mkdir(parents=True, exist_ok=True)
        lease = Lease(LocalStore(self.root)._layout, LocalStore(self.root)._locks)
        found = sorted(self._blobs())
        held = {found[number] for number in blobs if number < len(found)}
        lease.hold([Digest(name.removeprefix("sha256-")) for name in held])
        self._layout_file("tmp", f"{lease.name}-0").write_bytes(b"half a bl")
        if is_dead:
            os.close(lease._descriptor)
        else:
            self.held.append((lease, held))

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        """End a lease in order."""
        lease, _ = self.held.pop()
        self._layout_file("tmp", f"{lease.name}-0").unlink()
        lease.close()

    @rule(days=st.integers(-400, 400), which=st.integers(0, 50))
    def age(self, days: int, which: int) -> None:
        """Make a blob older, or younger than now."""
        for path in sorted(self._files())[which : which + 5]:
            then = time.time() + days * _DAY
            os.utime(path, (then, then))

    @precondition(lambda self: self.names)
    @rule(which=st.integers(0, 50), way=st.sampled_from(["flip", "cut", "gone"]))
    def damage(self, which: int, way: str) -> None:
        """Let a blob rot; ``verify`` sees it."""
        reached = sorted(self._reached())
        name = reached[which % len(reached)]
        paths = [path for path in self._files() if path.name == name]
        if len(paths) != 1 or paths[0] in self.damaged:  # a bit that flips twice is whole again
            return
        (path,) = paths
        data = path.read_bytes()
        path.unlink()
        if way == "flip":
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif way == "cut":
            path.write_bytes(data[:-1])
        self.damaged.add(path)
        code, _, errors = self._run("verify")
        assert code == 4, errors

    @precondition(lambda self: self.damaged)
    @rule()
    def repair(self) -> None:
        """Repair all damaged files, which go to quarantine."""
        self._repair()

    @invariant()
    def every_name_is_whole(self) -> None:
        """Check that the store holds the models of the dictionary."""
        global _steps  # noqa: PLW0603 - hypothesis makes and drops machines as it likes
        _steps += 1
        store = LocalStore(self.root)
        assert {str(reference) for reference in store.references()} == {
            f"{name}:latest" for name in self.names
        }
        if not self.damaged:
            for name, known in self.names.items():
                assert check_model(store, known, name) == []

    def _repair(self) -> None:
        if not self.damaged:
            return
        for name, known in self.names.items():
            code, output, errors = self._run("repair", name, "--from", known.folder)
            assert code == 0, (output, errors)
        self.damaged.clear()

    def _take(self, changes: Mapping[str, Known | None]) -> None:
        """Note what names stand for now, and forget damage that no name needs any more."""
        names = {**self.names, **changes}
        self.names = {name: known for name, known in names.items() if known is not None}
        reached = self._reached()
        for path in {path for path in self.damaged if path.name not in reached}:
            self.damaged.discard(path)
            path.unlink(
                missing_ok=True
            )  # garbage like any other, but it would be trusted by its size

    def _is_done(self, *arguments: object) -> bool:
        """Run a command that may only fail where it finds damage, which is never trusted."""
        code, _, errors = self._run(*arguments)
        if code and self.damaged:
            assert "damaged" in errors or "missing" in errors, errors
            return False
        assert code == 0, errors
        return True

    def _run(self, *arguments: object) -> tuple[int, str, str]:
        return command(*arguments, "--store", self.root)

    def _hot(self) -> set[str]:
        folder = self.root / "blobs"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    def _blobs(self) -> set[str]:
        return {path.name for path in self._files()}

    def _files(self) -> list[Path]:
        """Return the files of blobs, hot and cold."""
        folders = (self.root / "blobs", self.root / ".blobstore" / "cold")
        return [path for folder in folders if folder.exists() for path in folder.iterdir()]

    def _reached(self) -> set[str]:
        return {
            layer["digest"].replace(":", "-") for name in self.names for layer in self._layers(name)
        }

    def _layers(self, name: str) -> list[dict[str, Any]]:
        return layers(self.root, self._called(name))

    def _called(self, name: str) -> Known:
        return self.names[name].called(name)

    def _layout_file(self, folder: str, name: str) -> Path:
        path = self.root / ".blobstore" / folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def run(effort: Effort) -> list[Outcome]:
    """Run so many machines of up to 30 steps."""
    global _steps  # noqa: PLW0603 - as above
    outcome = Outcome("random protocol against a dictionary (steps)")
    chance = random.Random(effort.seed)
    _steps = 0
    with _sources():
        for _ in _batches(effort):
            seed = chance.randrange(2**32)
            try:
                check_protocol(min(effort.count, _BATCH), seed)
            except Exception as error:  # noqa: BLE001 - every error is reported
                notes = "\n".join(getattr(error, "__notes__", ()))
                outcome.violate(f"seed {seed}: {error!r}\n{notes}")
    outcome.injected = _steps
    return [outcome]


_BATCH = 10


def _batches(effort: Effort) -> Iterator[int]:
    for number in effort:
        if number % _BATCH == 0:
            yield number


@contextlib.contextmanager
def _sources() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="blobstore-faults-") as folder:
        StoreProtocol.sources = write_models(Path(folder), _MODELS, size=12_000)
        yield


def check_protocol(examples: int, seed: int) -> None:
    """Run so many machines. Raises what the first wrong one does, with its steps made few."""
    machine = seeded(seed)(StoreProtocol)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=_STEPS,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
