"""Weights that are damaged, while quantizations of them are frozen as rules of these weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.frozen import flip, flip_in_place, forms_of, layers
from tests.support.ladders import block_blob, coded_blob, source, weight_blob
from tests.support.models import add_blobs
from tests.support.scaled import float8_blob, mlx_blob

NAME = "blk.0.ffn_up.weight"
TYPES = ("Q8_0", "Q4_0", "MXFP4")
MATRIX = source(1)
LADDER = {name.lower(): block_blob(NAME, name, MATRIX) for name in TYPES}
LADDER["q4_k"] = coded_blob(NAME, "Q4_K", MATRIX)  # of which scales are kept
LADDER["mlx"] = mlx_blob(NAME, MATRIX, 4, 64, DType.BF16)
LADDER["fp8"] = float8_blob(NAME, MATRIX, (32, 128))


def put(store: LocalStore) -> None:
    add_blobs(store, "weights", {NAME: weight_blob(NAME, MATRIX)})
    for name, data in LADDER.items():
        add_blobs(store, name, {NAME: data})


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store)
    return store


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """Another store with the same models."""
    put(LocalStore(tmp_path / "origin"))
    return tmp_path / "origin"


def parent_of(store: LocalStore) -> Digest:
    (parent,) = {store.open_cold(*layers(store, name)[NAME].id).base for name in LADDER}
    assert parent is not None
    return parent


def assert_whole(store: LocalStore) -> None:
    assert verify_models(store=store).faults == ()
    for name, data in LADDER.items():
        item = layers(store, name)[NAME]
        assert store.read_blob(item.digest, item.size) == data
    thaw_models(list(LADDER), store=store)
    assert all(set(forms_of(store, name).values()) == {"hot"} for name in LADDER)
    assert verify_models(store=store).faults == ()


@pytest.mark.parametrize("frozen", [("weights", *LADDER), tuple(LADDER)], ids=["cold", "hot"])
def test_a_ladder_is_whole_again_with_its_weights(
    store: LocalStore, origin: Path, frozen: tuple[str, ...]
) -> None:
    freeze_models(frozen, store=store)
    parent = parent_of(store)
    if "weights" in frozen:
        flip(store.cold_path(parent))
    else:
        flip_in_place(str(store.blob_path(parent)), -99)  # an exponent, which no rule rounds
    assert {fault.reference.split("/")[-1] for fault in verify_models(store=store).faults} == {
        f"{name}:latest" for name in ("weights", *LADDER)
    }
    repaired = repair_models(source=origin, store=store)
    assert repaired.faults == ()
    assert parent in {blob.digest for blob in repaired.repaired}
    assert_whole(store)


def test_a_ladder_is_repaired_without_the_model_of_its_weights(
    store: LocalStore, origin: Path
) -> None:
    freeze_models(list(LADDER), store=store)
    parent = parent_of(store)
    remove_models(["weights"], store=store)
    collect_garbage(store=store)
    flip_in_place(str(store.base_path(parent)))
    faults = verify_models(store=store).faults
    assert {fault.reference.split("/")[-1] for fault in faults} == {
        f"{name}:latest" for name in LADDER
    }
    repaired = repair_models(source=origin, store=store)
    assert repaired.faults == ()
    assert_whole(store)


def test_damaged_weights_are_not_made_the_base_of_a_ladder(store: LocalStore) -> None:
    flip(str(store.blob_path(layers(store, "weights")[NAME].digest)))
    frozen = freeze_models(list(LADDER), store=store)
    assert {blob.base for blob in frozen.blobs} == {None}
    faults = verify_models(store=store).faults
    assert {fault.reference.split("/")[-1] for fault in faults} == {"weights:latest"}
