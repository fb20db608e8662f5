"""Models that are pickled, as for the processes of a pool: equal tensors, and no lease left behind."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore import Model
from blobstore.safetensors import safe_open
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

WAYS: list[dict[str, Any]] = [
    {},
    {"copy": True},
    {"read": "pread"},
    {"verify": "none"},
    {"verify": "none", "read": "pread"},
    {"framework": "torch"},
]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    blobstore.create(write_folder(tmp_path / "source", dense_tensors()), "m", store=store)
    return store


def content(model: Model) -> dict[str, bytes]:
    return {name: np.asarray(model[name]).tobytes() for name in model}


def leases(store: LocalStore) -> list[str]:
    return [path.name for path in store.folder("leases").iterdir()]


@pytest.mark.parametrize("how", WAYS, ids=str)
def test_a_copy_and_its_original_are_closed_apart(store: LocalStore, how: dict[str, Any]) -> None:
    with blobstore.open("m", store=store, **how) as model:
        expected = content(model)
        for other in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert content(other) == expected
            other.close()
            assert content(model) == expected
        sent = pickle.loads(pickle.dumps(model[next(iter(model))]))
        assert np.asarray(sent).tobytes() == expected[next(iter(model))]
    assert leases(store) == []


def test_what_cannot_be_sent_says_so(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "remote").mkdir()
    blobstore.push("m", f"file://{tmp_path}/remote", store=store)
    other = LocalStore(tmp_path / "other")
    with (
        blobstore.open(f"file://{tmp_path}/remote/m", store=other) as model,
        pytest.raises(TypeError, match="open it in each process, or pull it first"),
    ):
        pickle.dumps(model)
    with (
        safe_open(next((tmp_path / "source").glob("*.safetensors")), "np") as handle,
        pytest.raises(TypeError),
    ):
        pickle.dumps(handle)
