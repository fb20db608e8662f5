from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.errors import ModelNotFound, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.compare.steps import steps_of
from blobstore.store.local import LocalStore
from tests.support import frozen


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Three steps of a run, the last of which has an alias."""
    store = LocalStore(tmp_path / "store")
    for name, value in (("run:s-2", 2), ("run:s-10", 10), ("run:s-9", 9), ("run:best", 9)):
        frozen.put(store, name, {"w": value})
        os.utime(store.manifest_path(name), (int(name == "run:best"), int(name == "run:best")))
    return store


def steps(store: LocalStore, names: list[str]) -> list[str]:
    return list(map(str, steps_of(store, map(Reference.parse, names))))


def test_steps_are_in_the_order_of_their_numbers_without_aliases(store: LocalStore) -> None:
    assert list(map(str, steps_of(store, store.references()))) == ["run:s-2", "run:s-9", "run:s-10"]
    assert steps(store, ["run:best", "run:s-2"]) == ["run:best", "run:s-2"]
    frozen.put(store, "run:s-11", {"w": 10})  # which changed nothing
    assert steps(store, ["run:s-10", "run:s-9", "run:s-11"]) == ["run:s-9", "run:s-10", "run:s-11"]


def test_models_are_compared_with_models_and_states_with_states(store: LocalStore) -> None:
    for number in (2, 9):
        frozen.put(store, f"run:s-{number}.state", {"w": number, "m": number})
    assert list(map(str, steps_of(store, store.references()))) == ["run:s-2", "run:s-9", "run:s-10"]
    states = ["run:s-9.state", "run:s-2.state"]
    assert steps(store, states) == states[::-1]


def test_a_manifest_that_cannot_be_read_is_a_step_of_its_own(store: LocalStore) -> None:
    for name in ("run:s-9", "run:s-10"):
        store.manifest_path(name).write_bytes(b"{")
    assert steps(store, ["run:s-10", "run:s-9"]) == ["run:s-9", "run:s-10"]


def test_a_run_has_two_models(store: LocalStore) -> None:
    with pytest.raises(UsageError, match="fewer than two different models to compare; name two"):
        steps(store, ["run:best", "run:s-9"])
    with pytest.raises(ModelNotFound):
        steps(store, ["run:best", "none"])
