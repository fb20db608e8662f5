"""Programs of child processes: they work on a store until they are killed, and report each step.

Each line is written before the next step begins, so the reader knows which steps were acknowledged.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import blobstore
from blobstore import Model
from blobstore.errors import BlobMissing, BlobstoreError, ModelNotFound
from blobstore.models.checks import Verify
from blobstore.safetensors import edit_file
from blobstore.safetensors.numpy import load_file
from blobstore.store.local import LocalStore
from tests.faults.invariants import layers
from tests.faults.known import Known, command, read_models, write_models

SWAPPED = "swapped"
"""The name that is there throughout, but not always of one model."""
LEVELS: tuple[Verify, ...] = ("none", "size", "header", "digest", "rehash")
ALIGNMENT = 4096
"""Of the data in files whose headers have space for more tensors."""
_ADDED = 100_000
"""Bytes of a tensor that an edit adds."""
_NOT_FOUND = ModelNotFound.exit_code


def try_all(folder: Path) -> None:
    """Run every command that writes, and what goes wrong with most of them."""
    (model,) = write_models(folder / "sources", 1)
    store = folder / "store"
    for arguments in (
        ("create", model.folder, "a"),
        ("cp", "a", "b"),
        ("mv", "b", "c"),
        ("rm", "c", "d"),
        ("rm", "c"),
        ("repair", "a", "--from", model.folder),
        ("verify",),
        ("list",),
        ("du",),
        ("show", "a"),
        ("show", "b"),
        ("export", "a", folder / "exported"),
        ("freeze", "a"),
        ("verify",),
        ("export", "a", folder / "decoded"),
        ("thaw", "a"),
        ("pack", "a", folder / "a.bsar"),
        ("unpack", folder / "a.bsar", "--verify-only"),
        ("unpack", folder / "a.bsar"),
    ):
        command(*arguments, "--store", store)
    for layer in layers(store, model.called("a"))[1:]:
        (store / "blobs" / layer["digest"].replace(":", "-")).unlink()
    for arguments in (("verify",), ("repair", "a", "--from", model.folder), ("rm", "a"), ("gc",)):
        command(*arguments, "--json", "--store", store)


def load(store: str, *names: str) -> None:
    """Open models in every mode, and read all of their tensors."""
    for name in names:
        for level in LEVELS:
            with blobstore.open(name, store=store, verify=level) as opened:
                opened.state_dict()


def open_elsewhere(address: str, store: str) -> None:
    """Load a model from object storage, and keep its blobs."""
    with blobstore.open(address, store=store, framework="numpy") as model:
        dict(model.iter_tensors())


def edit(path: str, seed: str) -> None:
    """Edit a safetensors file in place, if that is possible."""
    edit_file(path, changes_of(path, seed), in_place=True)


def changes_of(path: str, seed: str) -> dict[str, np.ndarray]:
    """Return new tensors for a file, every byte of which differs from the old one.

    Sometimes there is one more, if the header has space for it.
    """
    chance = random.Random(seed)
    old = load_file(path)
    chosen = chance.sample(sorted(old), chance.randint(1, len(old)))
    new = {name: np.invert(old[name].view(np.uint8)).view(old[name].dtype) for name in chosen}
    with Path(path).open("rb") as file:
        is_aligned = (8 + int.from_bytes(file.read(8), "little")) % ALIGNMENT == 0
    if is_aligned and chance.random() < 0.5:
        new["added"] = np.full(_ADDED, 7, np.uint8)
    return new


def _report(what: str) -> None:
    sys.stdout.write(" ".join(what.splitlines()) + "\n")
    sys.stdout.flush()


def mingle(sources: str, store: str, seed: str, seconds: str) -> None:
    """Run random commands next to other processes that do the same; report every violation.

    The models of even numbers are there throughout. Those of odd numbers come and go. ``swapped`` is
    there throughout too, and is one model or another.
    """
    chance = random.Random(int(seed))
    models = read_models(Path(sources))
    crowd = _Crowd(models, Path(store), chance)
    ways = crowd.ways()
    deadline = time.monotonic() + float(seconds)
    done = 0
    while time.monotonic() < deadline:
        chance.choices(ways, [way.weight for way in ways])[0].do()
        done += 1
    _report(f"done {done}")


class _Way(NamedTuple):
    weight: int
    do: Callable[[], None]


class _Crowd:
    """What one process of many does."""

    def __init__(self, models: list[Known], store: Path, chance: random.Random) -> None:
        self._models = models
        self._staying, self._passing = models[::2], models[1::2]
        self._root = store
        self._chance = chance

    def ways(self) -> list[_Way]:
        """Return what can be done, and how often it is to be."""
        return [
            _Way(3, self._create),
            _Way(4, self._swap),
            _Way(4, self._collect),
            _Way(2, self._look_for_garbage),
            _Way(2, self._verify),
            _Way(3, self._freeze),
            _Way(2, self._thaw),
            _Way(5, self._load_staying),
            _Way(6, self._load_swapped),
            _Way(2, self._load_passing),
            _Way(3, self._fork),
            _Way(3, self._remove),
        ]

    def _create(self) -> None:
        model = self._chance.choice(self._models)
        self._command("create", model.folder, model.name)

    def _swap(self) -> None:
        code, _, errors = self._run("create", self._chance.choice(self._models).folder, SWAPPED)
        # If two give the name at once, the slower one fails.
        if code and "in the meantime" not in errors:
            _report(f"create exits with {code}: {errors[-500:]}")

    def _collect(self) -> None:
        self._command("gc", "--force", "--older-than", "0s")

    def _look_for_garbage(self) -> None:
        self._command("gc", "--dry-run", "--older-than", "0s")

    def _verify(self) -> None:
        self._command("verify", *[model.name for model in self._staying])

    def _freeze(self) -> None:
        names = [model.name for model in self._staying]
        option = self._chance.choice(((), (), ("--no-base",), ("--keep-hot",)))
        chosen = self._chance.sample(names, self._chance.choice((1, len(names))))
        self._command("freeze", *chosen, *option)

    def _thaw(self) -> None:
        option = self._chance.choice(((), ("--keep-cold",)))
        self._command("thaw", self._chance.choice(self._staying).name, *option)

    def _remove(self) -> None:
        code, _, errors = self._run("rm", self._chance.choice(self._passing).name)
        if code not in {0, _NOT_FOUND}:
            _report(f"rm exits with {code}: {errors[-500:]}")

    def _load_staying(self) -> None:
        self._load(self._chance.choice(self._staying))

    def _load_swapped(self) -> None:
        try:
            with blobstore.open(SWAPPED, store=LocalStore(self._root)) as opened:
                found = [model.differences(opened) for model in self._models]
        except BlobstoreError as error:
            _report(f"open of {SWAPPED}: {type(error).__name__}: {error}")
            return
        if all(found):
            _report(f"open of {SWAPPED}: it matches no model: {found[0]}")

    def _load_passing(self) -> None:
        # Who removes a name lets it be collected, also while another opens it.
        with contextlib.suppress(ModelNotFound, BlobMissing):
            self._load(self._chance.choice(self._passing), tell=False)

    def _fork(self) -> None:
        """Fork while a model is open, lose its name, and end the children before and after reading."""
        model = self._chance.choice(self._passing)
        with contextlib.suppress(ModelNotFound, BlobMissing):  # when it is opened
            with blobstore.open(model.name, store=self._root, verify="none") as opened:
                children = [self._child(opened, model), self._child(None, model)]
                os.waitpid(children[0], 0)
                self._run("rm", model.name)
                self._collect()
                try:
                    problems = model.differences(opened)
                except BlobstoreError as error:
                    problems = [f"{type(error).__name__}: {error}"]
            os.waitpid(children[1], 0)
            for problem in problems:
                _report(f"open of {model.name}, after a fork: {problem}")

    def _child(self, opened: Model | None, model: Known) -> int:
        """Start a child that reads the model, or waits a moment with all that it has inherited."""
        pid = os.fork()
        if pid:
            return pid
        try:
            if opened is None:
                time.sleep(self._chance.uniform(0, 0.2))
            else:
                with opened:
                    for problem in model.differences(opened):
                        _report(f"open of {model.name}, in a child: {problem}")
        except BaseException as error:  # noqa: BLE001 - the parent goes on
            _report(f"open of {model.name}, in a child: {type(error).__name__}: {error}")
        finally:
            os._exit(0)

    def _load(self, model: Known, *, tell: bool = True) -> None:
        level = self._chance.choice(LEVELS)
        try:
            store = LocalStore(self._root)
            with blobstore.open(model.name, store=store, verify=level) as opened:
                problems = model.differences(opened)
        except BlobstoreError as error:
            if not tell and isinstance(error, ModelNotFound | BlobMissing):
                raise
            problems = [f"{type(error).__name__}: {error}"]
        for problem in problems:
            _report(f"open of {model.name} with verify={level}: {problem}")

    def _command(self, *arguments: object) -> None:
        code, output, errors = self._run(*arguments)
        if code:
            told = f"{output[-300:]} {errors[-300:]}"
            _report(f"{' '.join(map(str, arguments))} exits with {code}: {told}")

    def _run(self, *arguments: object) -> tuple[int, str, str]:
        return command(*arguments, "--store", self._root)
