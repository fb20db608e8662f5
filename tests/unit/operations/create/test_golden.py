"""Tensor blobs compared with those that Ollama's own importer created from the same folders."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from blobstore.manifests import media_types
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import ModelConfig
from blobstore.manifests.reference import Reference
from blobstore.models.tensors import read_tensors
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.planning.grouping import ExpertForm
from blobstore.store.local import LocalStore
from tests.support.options import grouped

DATA = Path(__file__).parents[3] / "data" / "ollama"
FORMS = {"packed": "seed", "stacked": "ollama-0.33"}
NAME = Reference.parse("m")

Layers = set[tuple[str, str, int]]


def golden_layers(model: str, form: str) -> Layers:
    value = json.loads((DATA / "golden" / FORMS[form] / f"{model}.json").read_bytes())
    return {
        (layer["name"], layer["digest"], layer["size"])
        for layer in value["layers"]
        if layer["mediaType"] == media_types.TENSOR
    }


def tensor_layers(store: LocalStore) -> Layers:
    layers = store.resolve(NAME).layers_of(media_types.TENSOR)
    return {(layer.name, str(layer.digest), layer.size) for layer in layers}


@pytest.mark.parametrize(
    ("model", "form"),
    [
        *product(["dense", "moe", "odd"], ["packed", "stacked"]),
        ("mlx-mode", "stacked"),
        ("ct-nvfp4", "stacked"),
    ],
)
def test_creates_the_tensor_layers_that_ollama_creates(
    model: str, form: ExpertForm, store: LocalStore
) -> None:
    create(DATA / "hf" / model, NAME, store=store, experts=form)
    assert tensor_layers(store) == golden_layers(model, form)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["packed", "stacked"])
def test_an_exported_folder_gives_the_same_layers(
    form: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    create(DATA / "hf" / "moe", NAME, store=store, experts=form)
    export_model(NAME, tmp_path / "out", store=store, shard_size=300_000)
    again = LocalStore(tmp_path / "again")
    create(tmp_path / "out", NAME, store=again, experts=form)
    assert tensor_layers(again) == golden_layers("moe", form)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "quant_type", "group_size"),
    [("dense", "int4", 64), ("dense", "nvfp4", None), ("moe", "int4", 64)],
)
def test_quantizes_the_same_tensors_to_the_same_types_as_ollama(
    model: str, quant_type: str, group_size: int | None, store: LocalStore
) -> None:
    options: dict[str, Any] = {"quantize": quant_type, "group_size": group_size}
    create(DATA / "hf" / model, NAME, store=store, experts="stacked", **grouped(options))
    file = DATA / "golden" / "ollama-0.33" / f"{model}-{quant_type}.json"
    golden = json.loads(file.read_bytes())
    manifest = store.resolve(NAME)
    found = read_tensors(store, manifest).tensors
    assert {layer.name for layer in manifest.layers_of(media_types.TENSOR)} == {
        layer["name"] for layer in golden["layers"] if layer["mediaType"] == media_types.TENSOR
    }
    assert {
        name: (tensor.item.name, tensor.group_size) for name, tensor in found.items() if tensor.item
    } == {
        row["name"]: (row["quant_type"].lower(), row["group_size"])
        for row in golden["quant"]
        if "name" in row
    }
    for row in golden["show"]:
        assert list(found[row["name"]].shape) == row["shape"]
    digest = layers_digest(manifest.layers)
    config = ModelConfig(file_type=quant_type, layers_digest=digest).to_bytes()
    assert store.read_blob(manifest.config.digest, manifest.config.size) == config
