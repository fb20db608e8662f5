"""Models that are sent to the processes of a pool: equal tensors, and no lease or descriptor left behind."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore import Model
from blobstore.safetensors import safe_open
from blobstore.store.local import LocalStore
from tests.support.descriptors import open_files
from tests.support.models import dense_tensors, write_folder

WAYS: list[dict[str, Any]] = [
    {},
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


def read_in_worker(model: Model) -> tuple[dict[str, bytes], list[str], list[str]]:
    """Read a model and a copy of it, and release both; return the bytes, and what was open before and after."""
    before = open_files(model.store.root)
    other = copy.copy(model)
    with model, other:
        found = content(model)
        assert content(other) == found
    # These get the numbers that have just become free. Who closes one a second time closes one of these.
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]
    del other
    gc.collect()
    for descriptor in taken:
        os.close(descriptor)
    return found, before, open_files(model.store.root)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="it counts descriptors in /proc")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_pool_reads_the_same_tensors_and_leaves_nothing_behind(
    store: LocalStore, method: str
) -> None:
    # Processes that are not forked import torch again, which takes many seconds where it has no bytecode.
    ways = [how for how in WAYS if method == "fork" or "framework" not in how]
    models = [blobstore.open("m", store=store, **how) for how in ways]
    expected = content(models[0])
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)) as pool:
        for found, before, after in pool.map(read_in_worker, models * 2):
            assert found == expected
            assert after == before
    for model in models:
        assert content(model) == expected
        model.close()
    assert leases(store) == []


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
        pytest.raises(TypeError, match="pickle"),
    ):
        pickle.dumps(handle)
