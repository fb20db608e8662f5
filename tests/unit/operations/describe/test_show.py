from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobMissing
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.describe.show import CONFIG_NAME, describe_model
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, dense_tensors, write_folder
from tests.support.ollama_store import add_gguf_model

CONFIG = b'{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}'


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    files = {"config.json": CONFIG, "merges.txt": b"a b\n"}
    source = write_folder(tmp_path / "dense", dense_tensors(), files=files)
    store = LocalStore(tmp_path / "store")
    create(source, "dense", store=store)
    return store


def test_describes_tensors_and_blobs(store: LocalStore) -> None:
    model = describe_model("dense", store=store)
    manifest = store.resolve(Reference.parse("dense"))

    assert (model.format, model.architecture, model.model_type) == (
        "tensors",
        "TinyForCausalLM",
        "tiny",
    )
    assert {tensor.name: tensor.shape for tensor in model.tensors} == {
        name: array.shape for name, array in dense_tensors().items()
    }
    assert model.parameters == sum(array.size for array in dense_tensors().values())
    assert [blob.digest for blob in model.blobs] == [
        blob.digest for blob in (manifest.config, *manifest.layers)
    ]
    assert model.blobs[0].name == CONFIG_NAME
    assert [file.name for file in model.files] == ["config.json", "merges.txt"]
    assert model.size == sum(blob.size for blob in manifest.blobs)
    assert (model.frozen_size, model.faults) == (0, ())


def test_a_description_cannot_be_changed(store: LocalStore) -> None:
    model = describe_model("dense", store=store)
    for item in (model, model.blobs[0]):
        with pytest.raises(FrozenInstanceError):
            item.size = 1  # type: ignore[misc]


def test_accepts_a_path_and_a_reference(store: LocalStore) -> None:
    by_name = describe_model("dense", store=store)
    assert describe_model(Reference.parse("dense"), store=str(store.root)) == by_name
    assert describe_model("dense", store=store.root) == by_name


def test_a_missing_blob_is_described_and_not_raised(store: LocalStore) -> None:
    (layer,) = (
        layer for layer in store.resolve(Reference.parse("dense")).layers if layer.name == "scalar"
    )
    Path(store.blob_path(layer.digest)).unlink()
    model = describe_model("dense", store=store)
    assert "scalar" not in {tensor.name for tensor in model.tensors}
    (blob,) = model.faults
    assert (blob.name, blob.state) == ("scalar", "missing")
    assert isinstance(blob.fault, BlobMissing)
    assert str(blob.fault).startswith("layer 'scalar': ")


def test_describes_quantized_tensors_by_their_logical_shape(store: LocalStore) -> None:
    specs = [
        TensorSpec("w.weight", DType.U32, (6, 8)),
        TensorSpec("w.weight.scale", DType.BF16, (6, 2)),
        TensorSpec("w.weight.bias", DType.BF16, (6, 2)),
    ]
    header = encode_header(specs, {"quant_type": "int4", "group_size": "32"})
    add_blobs(store, "q", {"w.weight": header + bytes(sum(spec.nbytes for spec in specs))})
    (tensor,) = describe_model("q", store=store).tensors
    assert (tensor.type, tensor.dtype, tensor.shape) == ("int4", "U32", (6, 64))
    assert (tensor.quant_type, tensor.group_size, tensor.is_quantized) == ("int4", 32, True)
    assert (tensor.parameters, tensor.bits_per_weight) == (384, 5.0)


def test_describes_a_gguf_model_by_tensors_and_blobs(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "llama3:8b")
    model = describe_model("llama3:8b", store=store)
    assert (model.format, model.architecture, model.parameters) == ("gguf", "llama", 576)
    assert [(tensor.name, tensor.type, tensor.shape) for tensor in model.tensors] == [
        ("token_embd.weight", "q8_0", (5, 64)),
        ("output_norm.weight", "F32", (64,)),
        ("blk.0.ffn_gate_exps.weight", "q8_0", (2, 3, 32)),
    ]
    assert {tensor.digest for tensor in model.tensors} == {manifest.layers[0].digest}
    assert len(model.blobs) == 1 + len(manifest.layers)
