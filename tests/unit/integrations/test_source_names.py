"""The source names of stacked tensors, components, gpt-oss experts and NVFP4 weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DTYPES, DType, TensorSpec
from blobstore.errors import BlobDamaged, UsageError
from blobstore.integrations.source_names import (
    PublishedTensors,
    component_prefixes,
    gpt_oss_experts,
    is_dequantized,
    is_published,
    quant_settings,
    stacked_names,
    why_decoded,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.models.source_layers import read_source_record
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import Arrays, moe_tensors, quantizable_tensors, with_layers, write_folder
from tests.support.pack_quantized import packed_weight, write_packed
from tests.support.published import write_published

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
    store.names.publish(replace_any(model.reference), manifest)
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
        ({"other": ["a"]}, r"'other' is listed as a stack of length 1, but does not exist"),
        ({UP: ["a"]}, r"up_proj.weight' is listed as a stack of length 1, but has shape \[12, 6"),
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
    blobstore.create(source, "m", store=store, quantize=QuantizeOptions("mxfp4"))
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    with blobstore.open("m", store=store) as model:
        assert list(gpt_oss_experts(model, config)) == []


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"input_activations": {"dynamic": "local"}}},
}
PLAIN_ACTIVATIONS = {"quant_method": "compressed-tensors"}
BYTES = np.arange(64, dtype=np.uint8).reshape(2, 32)
SCALES = np.ones((2, 4), ml_dtypes.float8_e4m3fn)
PUBLISHED: dict[str, tuple[Any, Arrays]] = {
    "modelopt": (
        MODELOPT,
        {
            "w.weight": BYTES,
            "w.weight_scale": SCALES,
            "w.weight_scale_2": np.array(0.3, np.float32),
            "w.input_scale": np.array(0.7, np.float32),
        },
    ),
    "compressed-tensors": (
        COMPRESSED,
        {
            "w.weight_packed": BYTES,
            "w.weight_scale": SCALES,
            "w.weight_global_scale": np.array([41.0], np.float32),
            "w.input_global_scale": np.array([3.3], np.float32),
        },
    ),
}


def nvfp4_model(
    store: LocalStore, folder: Path, section: Any, tensors: Arrays, file: Any = None, **options: Any
) -> blobstore.Model:
    """Return a model of NVFP4 weights whose config has the given section."""
    config = {"quantization_config": section} if section else {}
    files = {"config.json": json.dumps(config).encode()}
    if file is not None:
        files["hf_quant_config.json"] = json.dumps(file).encode()
    blobstore.create(write_folder(folder, tensors, files=files), "m", store=store, **options)
    return blobstore.open("m", store=store)


@pytest.mark.parametrize("maker", PUBLISHED)
def test_returns_nvfp4_weights_as_they_were_published(
    maker: str, store: LocalStore, tmp_path: Path
) -> None:
    section, tensors = PUBLISHED[maker]
    with nvfp4_model(store, tmp_path / "source", section, tensors) as model:
        assert why_decoded(model, model.config) == ""
        specs, left_out = PublishedTensors.of(model, model.config)
        found = {spec.name: (spec, bytes(model.view(name).data)) for name, spec in specs.items()}
    found |= left_out
    types = {"uint8": DType.U8, "float8_e4m3fn": DType.F8_E4M3, "float32": DType.F32}
    assert found == {
        name: (TensorSpec(name, types[array.dtype.name], array.shape), array.tobytes())
        for name, array in tensors.items()
    }
    # The blob has the reciprocal of a global scale, whose own reciprocal may differ from it.
    assert set(left_out) == {name for name in tensors if name.endswith(("input_scale", "l_scale"))}


def test_static_scales_are_not_read_from_the_record_if_no_server_needs_them(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors = dict(PUBLISHED["modelopt"][1])
    section = MODELOPT | {"quant_algo": "W4A16_NVFP4"}
    del tensors["w.input_scale"]
    with nvfp4_model(store, tmp_path / "source", section, tensors) as model:
        assert why_decoded(model, model.config) == ""
        assert PublishedTensors.of(model, model.config).left_out == {}


def test_settings_may_be_in_a_file_of_modelopt(store: LocalStore, tmp_path: Path) -> None:
    file = {"quantization": {"quant_algo": "NVFP4"}}
    tensors = PUBLISHED["modelopt"][1]
    with nvfp4_model(store, tmp_path / "source", None, tensors, file) as model:
        assert quant_settings(model, model.config) == {"quantization_config": MODELOPT}
        assert quant_settings(model, {"quantization_config": COMPRESSED}) == {
            "quantization_config": COMPRESSED
        }
        assert why_decoded(model, quant_settings(model, model.config)) == ""
        assert "does not say how" in why_decoded(model, model.config)


@pytest.mark.parametrize(
    ("maker", "section", "absent", "reason"),
    [
        ("modelopt", MODELOPT, "w.input_scale", "the scales of its activations"),
        ("modelopt", None, "", "its config does not say how"),
        ("compressed-tensors", None, "", "its config does not say how"),
    ],
)
def test_weights_are_decoded_if_a_server_would_lack_something(
    maker: str, section: Any, absent: str, reason: str, store: LocalStore, tmp_path: Path
) -> None:
    tensors = {name: array for name, array in PUBLISHED[maker][1].items() if name != absent}
    with nvfp4_model(store, tmp_path / "source", section, tensors) as model:
        assert reason in why_decoded(model, model.config)


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        (COMPRESSED, "the scales of its activations"),
        (PLAIN_ACTIVATIONS, "its global scales as reciprocals only"),
    ],
)
def test_weights_of_models_without_a_record_are_decoded(
    section: Any, reason: str, store: LocalStore, tmp_path: Path
) -> None:
    tensors = PUBLISHED["compressed-tensors"][1]
    with nvfp4_model(store, tmp_path / "source", section, tensors) as model:
        layers = [item for item in model.manifest.layers if item.media_type != media_types.SOURCE]
        store.names.publish(
            replace_any(model.reference), with_layers(store, model.manifest, layers)
        )
    with blobstore.open("m", store=store) as model:
        assert reason in why_decoded(model, model.config)


def test_weights_that_mlx_or_the_import_quantized_are_decoded(
    store: LocalStore, tmp_path: Path
) -> None:
    source = write_folder(tmp_path / "source", quantizable_tensors())
    blobstore.create(source, "m", store=store, quantize=QuantizeOptions("nvfp4"))
    with blobstore.open("m", store=store) as model:
        reason = why_decoded(model, {"quantization_config": MODELOPT})
    assert (
        reason
        == "not all of its quantized weights are fp8, int4-sym, int8-sym, or nvfp4 with global scales"
    )


def test_models_that_are_kept_as_published_are_never_decoded(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_published(tmp_path / "awq", "awq"), "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert why_decoded(model, model.config) == ""
        for wanted in (None, False):
            assert is_published(model, wanted)
            assert not is_dequantized(model, model.config, wanted, default=True, unsupported="x")
        with pytest.raises(
            UsageError, match=r"m:latest cannot be dequantized: .* \(awq\) are kept"
        ):
            is_dequantized(model, model.config, True, default=True)
    blobstore.create(write_folder(tmp_path / "plain", moe_tensors()), "m", store=store)
    with blobstore.open("m", store=store) as model:
        assert not is_published(model, True)


SYMMETRIC = {
    **packed_weight("q").tensors,
    **packed_weight("model.layers.0.mlp.experts.0.up_proj", shape_type="I32").tensors,
}


@pytest.mark.parametrize("has_record", [True, False])
def test_returns_symmetric_integers_as_they_were_published(
    store: LocalStore, tmp_path: Path, *, has_record: bool
) -> None:
    blobstore.create(write_packed(tmp_path / "source", SYMMETRIC), "m", store=store)
    if not has_record:
        manifest = store.resolve(Reference.parse("m"))
        layers = [item for item in manifest.layers if item.media_type != media_types.SOURCE]
        store.names.publish(replace_any("m"), with_layers(store, manifest, layers))
    with blobstore.open("m", store=store) as model:
        assert why_decoded(model, model.config) == ""
        specs, left_out = PublishedTensors.of(model, model.config)
        found = {spec.name: (spec, bytes(model.view(name).data)) for name, spec in specs.items()}
    found |= left_out
    expected = {
        name: (TensorSpec(name, DTYPES[code], tuple(shape)), data)
        for name, (code, shape, data) in SYMMETRIC.items()
    }
    if not has_record:  # nothing else says that a shape had a smaller type
        for name in filter(lambda name: name.endswith("_shape"), expected):
            data = np.array([6, 64], "<i8").tobytes()
            expected[name] = TensorSpec(name, DType.I64, (2,)), data
    assert found == expected


def test_a_record_cannot_hold_another_shape_of_symmetric_integers(
    store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(write_packed(tmp_path / "source", SYMMETRIC), "m", store=store)
    manifest = store.resolve(Reference.parse("m"))
    record = read_source_record(store, manifest)
    assert record is not None
    forged = dict.fromkeys(record.left_out, bytes(16))
    data = replace(record, left_out=forged).to_bytes()
    with store.ingest() as ingest:
        item = ingest.add(len(data), lambda: [data])
        ingest.publish()
    layers = [
        layer._replace(digest=item.digest, size=item.size)
        if layer.media_type == media_types.SOURCE
        else layer
        for layer in manifest.layers
    ]
    store.names.publish(replace_any("m"), with_layers(store, manifest, layers))
    with blobstore.open("m", store=store) as model:
        _, left_out = PublishedTensors.of(model, model.config)
    assert left_out["q.weight_shape"][1] == SYMMETRIC["q.weight_shape"][2]
