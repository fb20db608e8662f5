"""vLLM gets symmetric integers of compressed-tensors as they were published, and their values are exact."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM does not run on this machine")

import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from vllm.distributed import cleanup_dist_env_and_memory

import blobstore
from blobstore.integrations.vllm import engine_options
from blobstore.integrations.vllm.loader import _weights
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.store.local import LocalStore
from tests.real.tiny import changed as with_config
from tests.support.pack_quantized import packed_config
from tests.vllm.models import answer, changed, saved


@pytest.fixture(autouse=True)
def _one_engine_after_another() -> Iterator[None]:
    yield
    cleanup_dist_env_and_memory()
    gc.collect()


def quantized(folder: Path, bits: int, group: int | None) -> dict[str, torch.Tensor]:
    """Pack the matrices of a saved model's layers to random integers, and return its tensors."""
    kept: list[str] = []
    found: dict[str, torch.Tensor] = {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(0)
        for name, weight in list(tensors.items()):
            module = name.removesuffix(".weight")
            if weight.ndim != 2 or ".layers." not in name or name.endswith(".gate.weight"):
                kept.append(module)
                continue
            rows, columns = tensors.pop(name).shape
            top = 1 << bits - 1
            codes = torch.randint(-top, top, (rows, columns), dtype=torch.int8)
            scale = torch.rand(rows, columns // (group or columns)) / (8 * top)
            tensors[f"{name}_packed"] = pack_to_int32(codes, bits)
            tensors[f"{name}_scale"] = scale.to(weight.dtype)
            tensors[f"{name}_shape"] = torch.tensor([rows, columns])
        found.update(tensors)

    changed(folder, pack)
    strategy = {"strategy": "group", "group_size": group}
    if group is None:
        strategy = {"strategy": "channel", "group_size": None}
    section = packed_config({"num_bits": bits, **strategy}, ignore=kept)
    section["quantization_config"]["quantization_status"] = "compressed"
    with_config(folder, **section)
    return found


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, None), (8, 32)])
def test_values_are_those_of_compressed_tensors(
    bits: int, group: int | None, store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    tensors = quantized(source, bits, group)
    created = blobstore.create(source, "m", store=store)
    assert created.notices == ()
    weights = QuantizationArgs(
        num_bits=bits,
        symmetric=True,
        strategy="channel" if group is None else "group",
        group_size=group,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    checked = 0
    with blobstore.open("m", store=store, framework="torch", dequantize=True) as model:
        for name in model:
            if f"{name}_packed" not in tensors:
                continue
            ends = ("packed", "scale", "shape")
            state: Any = {f"weight_{end}": tensors[f"{name}_{end}"] for end in ends}
            expected = PackedQuantizationCompressor.decompress(state, scheme)["weight"]
            assert model[name].dtype is expected.dtype
            assert torch.equal(model[name].view(torch.int16), expected.view(torch.int16))
            checked += 1
    assert checked == 14


@pytest.mark.parametrize("group", [32, None])
def test_answers_the_same_from_the_store_as_from_the_folder(
    group: int | None, store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    quantized(source, 4, group)
    blobstore.create(source, "m", store=store)
    theirs = answer(model=str(source))
    with engine_options("m", store=store) as engine:
        assert answer(**engine) == theirs
    link_model("m", tmp_path / "links", store=store)
    assert answer(model=str(tmp_path / "links")) == theirs


@pytest.mark.parametrize(("kind", "bits"), [("llama", 8), ("qwen3-moe", 4)])
def test_weights_are_decoded_where_vllm_has_no_kernel(
    kind: str, bits: int, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    quantized(source, bits, 32)
    blobstore.create(source, "m", store=store)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    with engine_options("m", store=store) as engine:
        assert answer(**engine) == answer(model=str(tmp_path / "plain"))


@pytest.mark.parametrize(("kind", "bits"), [("llama", 8), ("qwen3-moe", 4)])
def test_the_loader_gives_vllm_the_tensors_of_the_source(
    kind: str, bits: int, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source")
    tensors = quantized(source, bits, 32)
    blobstore.create(source, "m", store=store)
    with blobstore.open("m", store=store, framework="torch") as model:
        given = dict(_weights(model, model.iter_tensors(), is_published=True))
        assert set(given) == set(tensors)
        for name, tensor in tensors.items():
            assert (given[name].dtype, given[name].shape) == (tensor.dtype, tensor.shape)
            parts = [own.contiguous().view(torch.uint8) for own in (given[name], tensor)]
            assert torch.equal(*parts), name
