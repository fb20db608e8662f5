"""Random models saved by transformers survive import and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

import blobstore
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make

NAME = Reference.parse("m")


def saved(model: Any, folder: Path, *, shard_size: str = "1GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize(
    ("kind", "dtype", "experts"),
    [
        ("llama", torch.float32, "packed"),
        ("llama", torch.bfloat16, "packed"),
        ("qwen3-moe", torch.float32, "packed"),
        ("qwen3-moe", torch.float32, "stacked"),
        ("qwen3-moe", torch.bfloat16, "stacked"),
        ("vit", torch.float32, "packed"),
    ],
)
def test_an_exported_model_computes_the_same_as_the_original(
    kind: str,
    dtype: torch.dtype,
    experts: ExpertForm,
    shard_size: str,
    store: LocalStore,
    tmp_path: Path,
) -> None:
    model = make(kind, dtype)
    source = saved(model, tmp_path / "source", shard_size=shard_size)
    assert len(list(source.glob("*.safetensors"))) > 1 or shard_size == "1GB"
    create(source, NAME, store=store, experts=experts)
    assert verify_models(store=store).faults == ()
    out = tmp_path / "out"
    shards = export_model(NAME, out, store=store, shard_size=30_000).shards
    assert shards > 1
    again = type(model).from_pretrained(out, dtype=dtype).eval()
    assert torch.equal(logits(again), logits(model))
    assert_equal(all_tensors(out), all_tensors(source))
    for file in source.glob("*.json"):
        if not file.name.endswith(".index.json"):
            assert (out / file.name).read_bytes() == file.read_bytes()


def test_transformers_finds_the_class_of_an_exported_model_by_itself(
    store: LocalStore, tmp_path: Path
) -> None:
    model = make("llama")
    create(saved(model, tmp_path / "source"), NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    again: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(model)
    assert torch.equal(logits(again.eval()), logits(model))


def test_a_model_computes_the_same_with_mapped_tensors(store: LocalStore, tmp_path: Path) -> None:
    model = make("llama")
    create(saved(model, tmp_path / "source"), NAME, store=store)
    again = type(model)(model.config).eval()
    with blobstore.open(NAME, store=store, framework="torch") as stored:
        again.load_state_dict(stored.state_dict(), assign=True)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_the_safetensors_library_opens_every_blob(
    experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(make("qwen3-moe", torch.bfloat16), tmp_path / "source")
    create(source, NAME, store=store, experts=experts)
    found: dict[str, torch.Tensor] = {}
    for layer in store.resolve(NAME).layers_of(media_types.TENSOR):
        with safe_open(store.blob_path(layer.digest), framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    expected = all_tensors(source)
    if experts == "stacked":
        for name in [name for name in found if name not in expected]:
            prefix, _, rest = name.partition(".experts.")
            parts = [expected.pop(f"{prefix}.experts.{number}.{rest}") for number in range(12)]
            expected[name] = torch.stack(parts)
    assert_equal(found, expected)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_neither_sharding_nor_threads_change_the_layers(
    experts: ExpertForm, tmp_path: Path
) -> None:
    model = make("qwen3-moe")
    found = set()
    for number, (shard_size, jobs) in enumerate([("1GB", 1), ("50KB", 1), ("9KB", 7)]):
        source = saved(model, tmp_path / f"source-{number}", shard_size=shard_size)
        store = LocalStore(tmp_path / f"store-{number}")
        create(source, NAME, store=store, experts=experts, jobs=jobs)
        *layers, source_layer = store.resolve(NAME).layers
        assert source_layer.media_type == media_types.SOURCE  # which records the files
        found.add(tuple(map(str, layers)))
    assert len(list((tmp_path / "source-2").glob("*.safetensors"))) > 4
    assert len(found) == 1


@pytest.mark.parametrize(
    ("kind", "quant_type", "experts"),
    [
        ("llama", "int8", "packed"),
        ("qwen3-moe", "int4", "packed"),
        ("qwen3-moe", "mxfp8", "stacked"),
    ],
)
def test_a_dequantized_export_computes_with_the_dequantized_values(
    kind: str, quant_type: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    model = make(kind, torch.bfloat16)
    source = saved(model, tmp_path / "source")
    # Every matrix of these tiny models that can be quantized is.
    create(
        source,
        NAME,
        store=store,
        quantize=QuantizeOptions(
            quant_type,
            policy="uniform",
            overrides=("*self_attn.[qo]_proj.weight=mxfp4", "lm_head.weight=mxfp8"),
        ),
        experts=experts,
    )
    out = tmp_path / "out"
    export_model(NAME, out, store=store, dequantize=True)
    again = type(model).from_pretrained(out, dtype=torch.bfloat16).eval()
    assert not torch.equal(logits(again), logits(model))
    close = torch.nn.functional.cosine_similarity(logits(again), logits(model), dim=-1)
    assert close.min() > 0.9
    exported = all_tensors(out)
    with blobstore.open(NAME, store=store, framework="torch", dequantize=True) as opened:
        state = opened.state_dict()
    joined = [name for name in state if name not in exported]
    assert bool(joined) == (experts == "stacked")
    for name in joined:
        place, _, projection = name.rpartition(".experts.")
        members = [f"{place}.experts.{number}.{projection}" for number in range(12)]
        state |= dict(zip(members, state.pop(name), strict=True))
    assert_equal(exported, state)
