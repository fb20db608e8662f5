"""Llama models in Meta's layout give the same results as transformers' own models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.meta_models import split, to_meta

PARAMS = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 8,
    "vocab_size": 48,
    "multiple_of": 8,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
}


def llama() -> Any:
    torch.manual_seed(0)
    options: dict[str, Any] = {"rope_theta": PARAMS["rope_theta"]}  # its types know a newer form
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=8,
            vocab_size=48,
            rms_norm_eps=1e-05,
            **options,
        )
    ).eval()


def save_as_meta(model: Any, folder: Path, shards: int, *, embedding: int, legacy: bool) -> Path:
    folder.mkdir()
    meta = to_meta(model.state_dict(), PARAMS)
    for number, tensors in enumerate(split(meta, shards, embedding=embedding)):
        torch.save(
            tensors,
            folder / f"consolidated.{number:02}.pth",
            _use_new_zipfile_serialization=not legacy,
        )
    (folder / "params.json").write_text(json.dumps(PARAMS))
    (folder / "tokenizer.model").write_bytes(b"a tokenizer")
    return folder


def tensor_layers(store: LocalStore, name: str) -> Any:
    return store.resolve(Reference.parse(name)).layers_of(media_types.TENSOR)


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize(("embedding", "legacy"), [(0, False), (1, True)])
def test_shares_every_blob_with_the_hugging_face_form(
    store: LocalStore, tmp_path: Path, shards: int, embedding: int, legacy: bool
) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    create(tmp_path / "hf", "hf", store=store)
    folder = save_as_meta(model, tmp_path / "meta", shards, embedding=embedding, legacy=legacy)
    created = create(folder, "meta", store=store)
    assert tensor_layers(store, "meta") == tensor_layers(store, "hf")
    assert created.tensors == len(model.state_dict())


def test_an_exported_llama_of_meta_computes_the_same_as_the_original(
    store: LocalStore, tmp_path: Path
) -> None:
    model = llama()
    folder = save_as_meta(model, tmp_path / "meta", 2, embedding=0, legacy=False)
    create(folder, "meta", store=store)
    export_model("meta", tmp_path / "out", store=store)
    again: Any = LlamaForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model(tokens).logits)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == b"a tokenizer"
    assert json.loads((tmp_path / "out" / "params.json").read_text()) == PARAMS


def test_keeps_the_names_of_meta_on_request(store: LocalStore, tmp_path: Path) -> None:
    model = llama()
    folder = save_as_meta(model, tmp_path / "meta", 2, embedding=0, legacy=False)
    create(folder, "meta", store=store, source_options=SourceOptions(keep_names=True))
    names = {layer.name for layer in tensor_layers(store, "meta")}
    assert names == set(to_meta(model.state_dict(), PARAMS))
