"""The source names of stacked tensors, components and gpt-oss experts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged
from blobstore.integrations.source_names import component_prefixes, gpt_oss_experts, stacked_names
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.store.local import LocalStore
from tests.support.models import Arrays, moe_tensors, quantizable_tensors, with_layers, write_folder

UP = "model.layers.0.mlp.experts.up_proj.weight"


def with_stacks(store: LocalStore, name: str, stacks: Mapping[str, list[str]]) -> blobstore.Model:
    """Return a model with the given list of stacked tensors."""
    data = json.dumps(stacks).encode()
    with store.ingest() as ingest:
        ingest.add(len(data), lambda: [data])
        ingest.publish()
    layer = Descriptor(
        media_type=media_types.STACKS, digest=Digest.of(data), size=len(data), name=""
    )
    with blobstore.open(name, store=store) as model:
        layers = [
            layer if item.media_type == media_types.STACKS else item
            for item in model.manifest.layers
        ]
        manifest = with_layers(store, model.manifest, layers)
    store.publish(model.reference, manifest)
    return blobstore.open(name, store=store)


def test_returns_the_source_names_of_stacked_tensors(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source", moe_tensors())
    blobstore.create(source, "m", store=store, experts="stacked")
    with blobstore.open("m", store=store) as model:
        names = stacked_names(model)
    place = "model.layers.0.mlp.experts"
    assert names == {
        f"{place}.{projection}.weight": [
            f"{place}.{number}.{projection}.weight" for number in range(12)
        ]
        for projection in ("gate_proj", "up_proj", "down_proj")
    }


def test_a_packed_model_has_no_stacks(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(write_folder(tmp_path / "source", moe_tensors()), "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert stacked_names(model) == {}


@pytest.mark.parametrize(
    ("stacks", "message"),
    [
        ({"other": ["a"]}, r"'other' is listed as a stack of 1 tensors, but does not exist"),
        ({UP: ["a"]}, r"up_proj.weight' is listed as a stack of 1 tensors, but has shape \[12, 6"),
        ({UP: ["a"] * 12}, "two tensors were both called 'a'"),
        (
            {UP: ["model.layers.0.mlp.gate.weight", *map(str, range(11))]},
            "two tensors were both called 'model.layers.0.mlp.gate.weight'",
        ),
    ],
)
def test_rejects_a_list_that_contradicts_the_tensors(
    stacks: dict[str, list[str]], message: str, store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", moe_tensors())
    blobstore.create(source, "m", store=store, experts="stacked")
    with with_stacks(store, "m", stacks) as model, pytest.raises(BlobDamaged, match=message):
        stacked_names(model)


def test_finds_components_by_their_files(store: LocalStore, tmp_path: Path) -> None:
    files = {
        "modules.json": b'[{"path": "1_Pooling"}, {"path": "2_Dense"}]',
        "1_Pooling/config.json": b"{}",
        "2_Dense/config.json": b"{}",
    }
    source = write_folder(tmp_path / "source", moe_tensors(), files=files)
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert component_prefixes(model) == ("1_Pooling/", "2_Dense/")


def test_finds_the_experts_of_gpt_oss(store: LocalStore, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    tensors: Arrays = {
        "model.layers.0.mlp.experts.down_proj_blocks": np.zeros((3, 64, 2, 16), np.uint8),
        "model.layers.0.mlp.experts.down_proj_scales": np.zeros((3, 64, 2), np.uint8),
        "model.norm.weight": np.zeros(4, np.float32),
    }
    source = write_folder(
        tmp_path / "source", tensors, files={"config.json": json.dumps(config).encode()}
    )
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert gpt_oss_experts(model, config) == ["model.layers.0.mlp.experts.down_proj"]
        assert list(gpt_oss_experts(model, {})) == []


def test_does_not_mistake_other_quantized_models_for_gpt_oss(
    store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", quantizable_tensors())
    blobstore.create(source, "m", store=store, quantize="mxfp4")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    with blobstore.open("m", store=store) as model:
        assert list(gpt_oss_experts(model, config)) == []
