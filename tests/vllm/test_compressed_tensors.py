"""transformers gets NVFP4 weights as they were published, where the package compressed-tensors is installed.

vLLM installs that package, and the other tests have none.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("compressed_tensors")

import torch
import transformers

import blobstore
from blobstore.integrations.transformers import from_store
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make, with_nvfp4


def mapped(tensor: torch.Tensor, store: LocalStore) -> bool:
    """Return whether a tensor is in a mapped blob, according to the kernel's list of maps."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return str(store.root) in line
    return False


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*parts)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel in Linux's way")
@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_transformers_gets_nvfp4_weights_as_published(kind: str, tmp_path: Path) -> None:
    source, store = tmp_path / "source", LocalStore(tmp_path / "store")
    make(kind, torch.bfloat16).save_pretrained(source)
    tensors = with_nvfp4(source, "compressed-tensors")
    blobstore.create(source, "m", store=store)
    model = from_store("m", store=store, dequantize=False)
    assert model.config.quantization_config.quant_method == "compressed-tensors"
    found = model.state_dict()
    same = {name for name in tensors if name in found}
    assert same == {name for name in tensors if ".experts." not in name}  # which it decodes
    for name in same:
        assert same_bits(found[name], tensors[name]), name
        assert name.endswith("_global_scale") or mapped(found[name], store), name
    folder: Any = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(logits(model), logits(folder))


def test_transformers_gets_decoded_weights_on_a_cpu_by_default(tmp_path: Path) -> None:
    source, store = tmp_path / "source", LocalStore(tmp_path / "store")
    make("llama", torch.bfloat16).save_pretrained(source)
    with_nvfp4(source, "compressed-tensors")
    blobstore.create(source, "m", store=store)
    assert not hasattr(from_store("m", store=store).config, "quantization_config")
    assert hasattr(from_store("m", store=store, device="meta").config, "quantization_config")
