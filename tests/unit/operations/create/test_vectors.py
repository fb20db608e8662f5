"""The golden vectors of docs/reference/format.md. None was written by the code under test.

MLX 0.32.4 computed those of quantized weights on a CPU. Those of fp8 and of symmetric integers were
computed in exact arithmetic, those with tiled scales by comfy-kitchen 0.2.40; the others were written by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import InvalidManifest, InvalidReference
from blobstore.manifests.layers_digest import check_layers
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.metadata import parse_quant_metadata
from blobstore.safetensors.header import PREFIX_SIZE, encode_header, parse_header
from blobstore.safetensors.numpy import as_array

_FOLDER = Path(__file__).parents[3] / "vectors"
_BLOBS = json.loads((_FOLDER / "blobs.json").read_text())
_MANIFESTS = json.loads((_FOLDER / "manifests.json").read_text())
_QUANTIZED = json.loads((_FOLDER / "quantized.json").read_text())
_FP8 = json.loads((_FOLDER / "fp8.json").read_text())
_SYMMETRIC = json.loads((_FOLDER / "symmetric.json").read_text())
_TILED = json.loads((_FOLDER / "tiled.json").read_text())
_REFERENCES = json.loads((_FOLDER / "references.json").read_text())


def _why(vector: dict[str, Any]) -> str:
    return str(vector["why"])


def _specs(vector: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, DTYPES[code], tuple(shape)) for name, code, shape in vector["tensors"]]


@pytest.mark.parametrize("vector", _BLOBS, ids=_why)
def test_writes_the_canonical_bytes_of_a_blob(vector: dict[str, Any]) -> None:
    written = encode_header(_specs(vector), vector["metadata"])
    text = vector["header"].encode()
    assert written == len(text).to_bytes(8, "little") + text
    blob = written + bytes.fromhex(vector["data"])
    assert len(blob) == vector["size"]
    assert str(Digest.of(blob)) == vector["digest"]


@pytest.mark.parametrize("vector", _BLOBS, ids=_why)
def test_reads_the_header_of_a_blob(vector: dict[str, Any]) -> None:
    header = parse_header(vector["header"].encode(), vector["size"])
    assert [entry.spec for entry in header.tensors.values()] == _specs(vector)
    assert header.metadata == vector["metadata"]
    assert header.data_start == PREFIX_SIZE + len(vector["header"].encode())


def _array(digits: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytes.fromhex(digits), np.dtype(dtype)).reshape(1, -1)


@pytest.mark.parametrize("vector", _QUANTIZED, ids=_why)
def test_quantizes_to_the_words_and_scales(vector: dict[str, Any]) -> None:
    item = FORMATS[vector["quant_type"]]
    numbers = _array(vector["input"], vector["dtype"])
    weight, scale, bias = reference.quantize(numbers, item, vector["group_size"])
    assert weight.tobytes().hex() == vector["weight"]
    assert scale.tobytes().hex() == vector["scale"]
    assert (bias.tobytes().hex() if bias is not None else "") == vector["bias"]


@pytest.mark.parametrize("vector", _QUANTIZED, ids=_why)
def test_dequantizes_the_words_and_scales(vector: dict[str, Any]) -> None:
    item = FORMATS[vector["quant_type"]]
    kind = vector["dtype"] if item.has_bias else "uint8"
    weight, scale = _array(vector["weight"], "uint32"), _array(vector["scale"], kind)
    bias = _array(vector["bias"], kind) if item.has_bias else None
    for dtype, digits in vector["plain"].items():
        found = reference.dequantize(weight, scale, bias, item, vector["group_size"], dtype)
        assert found.tobytes().hex() == digits


@pytest.mark.parametrize("vector", _FP8, ids=_why)
def test_dequantizes_8_bit_floats(vector: dict[str, Any]) -> None:
    specs, arrays = [], []
    for name in ("weight", "scale"):
        code, shape, digits = vector[name]
        full_name = "w" if name == "weight" else "w_scale"
        specs.append(TensorSpec(full_name, DTYPES[code], tuple(shape)))
        arrays.append(as_array(memoryview(bytes.fromhex(digits)), 0, specs[-1]))
    metadata = {"quant_type": "fp8", "block_size": vector["block_size"]}
    known = parse_quant_metadata(specs[0], {".scale": specs[1]}, metadata)
    assert known is not None
    for dtype, digits in vector["plain"].items():
        found = reference.dequantize(arrays[0], arrays[1], None, *known, dtype)
        assert found.tobytes().hex() == digits


@pytest.mark.parametrize("vector", [*_SYMMETRIC, *_TILED], ids=_why)
def test_dequantizes_types_that_only_sources_have(vector: dict[str, Any]) -> None:
    specs, arrays = [], []
    for key, name in (("weight", "w"), ("scale", "w.scale")):
        code, shape, digits = vector[key]
        specs.append(TensorSpec(name, DTYPES[code], tuple(shape)))
        arrays.append(as_array(memoryview(bytes.fromhex(digits)), 0, specs[-1]))
    metadata = {key: str(vector[key]) for key in ("quant_type", "group_size")}
    known = parse_quant_metadata(specs[0], {".scale": specs[1]}, metadata)
    assert known is not None
    factor = vector.get("global_scale")
    for dtype, digits in vector["plain"].items():
        found = reference.dequantize(arrays[0], arrays[1], None, *known, dtype, factor)
        assert found.tobytes().hex() == digits


@pytest.mark.parametrize("vector", _MANIFESTS["accepted"], ids=_why)
def test_a_canonical_manifest_survives_reading_and_writing(vector: dict[str, Any]) -> None:
    data = vector["text"].encode()
    assert Manifest.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("vector", _MANIFESTS["refused"], ids=_why)
def test_rejects_a_manifest_and_reports_the_json_path(vector: dict[str, Any]) -> None:
    with pytest.raises(InvalidManifest) as caught:
        Manifest.from_bytes(vector["text"].encode())
    assert str(caught.value).startswith(f"{vector['path']}: " if vector["path"] else "manifest is")


@pytest.mark.parametrize("vector", _MANIFESTS["with_config"], ids=_why)
def test_a_config_proves_that_a_manifest_is_unchanged(vector: dict[str, Any]) -> None:
    manifest, config = vector["text"].encode(), vector["config"].encode()
    assert Manifest.from_bytes(manifest).config.digest == Digest.of(config)
    if vector["proven"] is None:
        with pytest.raises(InvalidManifest, match="was changed since it was written"):
            check_layers(manifest, config)
    else:
        assert check_layers(manifest, config) is vector["proven"]


@pytest.mark.parametrize("vector", _REFERENCES["accepted"], ids=lambda vector: vector["text"][:40])
def test_reads_a_reference_and_fills_in_the_defaults(vector: dict[str, Any]) -> None:
    reference = Reference.parse(vector["text"])
    assert list(reference.parts) == vector["parts"]
    assert str(reference) == vector["shortest"]
    assert Reference.parse(str(reference)) == Reference.parse(reference.full) == reference


@pytest.mark.parametrize("text", _REFERENCES["refused"], ids=lambda text: repr(text[:20]))
def test_rejects_a_reference(text: str) -> None:
    with pytest.raises(InvalidReference):
        Reference.parse(text)
