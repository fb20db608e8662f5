"""Models with merged adapters: what of them is stored beside the model that they were made from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import blobstore
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store.local import LocalStore
from tests.support.adapted import COLUMNS, ROWS, matrix, merged
from tests.support.frozen import forms_of, layers
from tests.support.models import add_blobs, blob

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.compression.level import Level

NAMES = ("q", "v")


def put_family(store: LocalStore, code: str) -> dict[str, bytes]:
    """Give a store a model, and what a merged adapter made of it; return the blobs of that."""
    shape = ROWS, COLUMNS
    base = {name: matrix(seed, code) for seed, name in enumerate(NAMES)}
    tuned = {name: merged(data, 7, rank=8, code=code) for name, data in base.items()}
    add_blobs(store, "base", {name: blob((name, code, shape, base[name])) for name in NAMES})
    made = {name: blob((name, code, shape, tuned[name])) for name in NAMES}
    add_blobs(store, "merged", made)
    return made


@pytest.mark.parametrize(
    ("code", "level", "most"),
    [("BF16", "fast", 0.25), ("BF16", "small", 0.25), ("F32", "fast", 0.6), ("F32", "small", 0.6)],
)
@pytest.mark.parametrize("is_base_cold", [False, True])
def test_a_merged_adapter_takes_little_beside_its_base(
    tmp_path: Path, code: str, level: Level, most: float, *, is_base_cold: bool
) -> None:
    store = LocalStore(tmp_path)
    made = put_family(store, code)
    size = sum(map(len, made.values()))
    if is_base_cold:
        freeze_models(["base"], store=store, find_base=False)
    foretold = freeze_models(["merged"], store=store, level=level, dry_run=True)
    frozen = freeze_models(["merged"], store=store, level=level)
    assert frozen.stored < most * size
    assert foretold.stored < most * size
    with blobstore.open("merged", store=store, copy=True) as model:
        for name, data in made.items():
            assert model[name].tobytes() == data[-model[name].nbytes :]
    thaw_models(["merged"], store=store)
    assert set(forms_of(store, "merged").values()) == {"hot"}
    for name, item in layers(store, "merged").items():
        assert store.read_blob(item.digest, item.size) == made[name]
