"""Files that a real llama.cpp quantizes, as a store keeps them next to their parent."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import blobstore
from tests.benchmarks.k_ladder import matrices, write_gguf

MOST = {
    "Q2_K": 0.21,
    "Q3_K": 0.13,
    "Q4_K": 0.12,
    "Q5_K": 0.12,
    "Q6_K": 0.12,
    "IQ4_NL": 0.12,
    "IQ4_XS": 0.12,
    "Q4_0": 0.15,
    "Q4_1": 0.17,
    "Q5_0": 0.15,
    "Q5_1": 0.15,
}


@pytest.mark.parametrize("importance", [False, True], ids=["plain", "imatrix"])
def test_files_of_llama_cpp_take_a_tenth_next_to_their_parent(
    tmp_path: Path, *, importance: bool
) -> None:
    chosen = list(matrices().items())[0:3:2]  # queries, and others
    weights = {name: matrix[:128] for name, matrix in chosen}
    store = blobstore.LocalStore(tmp_path / "store")
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    blobstore.create(tmp_path / "model", "model", store=store)
    files = {}
    for name in MOST:
        # The parent of some went through float16.
        source = weights
        if name in {"Q6_K", "IQ4_NL"}:
            source = {key: item.astype(np.float16) for key, item in weights.items()}
        path = write_gguf(tmp_path / f"{name}.gguf", name, source, importance=importance)
        blobstore.create(path, name.lower(), store=store)
        files[name.lower()] = path.read_bytes()
    frozen = blobstore.freeze(["model", *files], store=store)
    assert (frozen.faults, frozen.fallbacks) == ((), 0)
    for model in frozen.models[1:]:
        assert str(model.base) == "model:latest"
        assert model.stored <= MOST[str(model.name).removesuffix(":latest").upper()] * model.size
    assert blobstore.verify(store=store).faults == ()

    blobstore.pack(["model", *files], tmp_path / "all.bsar", store=store)
    other = blobstore.LocalStore(tmp_path / "other")
    blobstore.unpack(tmp_path / "all.bsar", store=other)
    for place in (store, other):
        for name, data in files.items():
            folder = tmp_path / place.root.name / name
            blobstore.export(name, folder, store=place)
            (file,) = folder.rglob("*.gguf")
            assert file.read_bytes() == data
