"""The experts of gpt-oss, as decoded by this library and by transformers, are equal."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import blobstore
from blobstore.operations.export.export import export_model
from blobstore.store.local import LocalStore

NAME = "model.layers.0.mlp.experts.down_proj"


def test_dequantized_experts_equal_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 64, 2, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 64, 2), dtype=torch.uint8)
    source = tmp_path / "source"
    source.mkdir()
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, source / "model.safetensors")
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    (source / "config.json").write_text(json.dumps(config))
    store = LocalStore(tmp_path / "store")
    blobstore.create(source, "m", store=store)
    export_model("m", tmp_path / "out", store=store, dequantize=True)
    ours = load_file(tmp_path / "out" / "model.safetensors")[NAME]
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(ours, theirs)
