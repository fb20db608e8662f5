"""vLLM gives the same results from the store as from a folder, and rejects damaged models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions

pytest.importorskip("vllm", reason="vLLM does not run on this machine")

import torch
from vllm import LLM
from vllm.config.load import LoadConfig
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.plugins import load_general_plugins

import blobstore
from blobstore.errors import BlobDamaged, BlobMissing, BlobstoreError, ModelNotFound, UsageError
from blobstore.integrations.vllm import engine_options
from blobstore.objects.store import ObjectStore
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.real.tiny import with_float8
from tests.support.damage import blob_path, flip
from tests.vllm.models import FAST, answer, changed, expected, saved

LAYER = "model.layers.1"


@pytest.fixture(autouse=True)
def _one_engine_after_another() -> Iterator[None]:
    yield
    cleanup_dist_env_and_memory()


def options(store: LocalStore, folder: Path, **settings: Any) -> dict[str, Any]:
    """Return vLLM options that take config and tokenizer from a folder, and weights from the store."""
    extra = {"name": "m", "store": str(store.root), **settings}
    return {"model": str(folder), "load_format": "blobstore", "model_loader_extra_config": extra}


def refused(store: LocalStore, folder: Path, **settings: Any) -> str:
    """Return the error that vLLM raises for a model."""
    with pytest.raises(BlobstoreError) as caught:
        LLM(**FAST, **options(store, folder, **settings))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("kind", "dtype", "experts"),
    [
        ("llama", "bfloat16", "packed"),
        ("llama", "float32", "packed"),
        ("qwen3-moe", "bfloat16", "packed"),
        ("qwen3-moe", "bfloat16", "stacked"),
        ("qwen3-moe", "float32", "stacked"),
    ],
)
def test_answers_the_same_from_the_store_as_from_the_folder(
    kind: str, dtype: str, experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    source = saved(kind, tmp_path / "source", getattr(torch, dtype))
    blobstore.create(source, "m", store=store, experts=experts)
    with engine_options("m", store=store) as engine:
        ours = answer(dtype=dtype, **engine)
    assert ours == expected(kind, dtype)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_answers_the_same_from_object_storage(
    kind: str, store: LocalStore, objects: ObjectStore, tmp_path: Path
) -> None:
    blobstore.create(saved(kind, tmp_path / "source"), "m", store=store)
    push_model("m", objects.address, store=store)
    other = LocalStore(tmp_path / "other")
    with engine_options(f"{objects.address}/m", store=other) as engine:
        assert answer(**engine) == expected(kind)


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_two_ranks_read_their_parts_from_object_storage(
    kind: str,
    store: LocalStore,
    objects: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to send them a function
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    source = saved(kind, tmp_path / "source")
    blobstore.create(source, "m", store=store)
    push_model("m", objects.address, store=store)
    other = LocalStore(tmp_path / "other")
    with engine_options(f"{objects.address}/m", store=other) as engine:
        ours = answer(**engine, **ranks)
    assert ours == answer(model=str(source), **ranks)
    assert ours.parameters[0] != ours.parameters[1]


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
def test_quantized_models_are_served_dequantized(
    kind: str, store: LocalStore, tmp_path: Path
) -> None:
    blobstore.create(
        saved(kind, tmp_path / "source"), "m", store=store, quantize=QuantizeOptions("int4")
    )
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    with engine_options("m", store=store, verify="digest", read="pread") as engine:
        ours = answer(**engine)
    assert ours == answer(model=str(tmp_path / "plain"))
    assert ours != expected(kind)


def test_8_bit_floats_are_served_as_they_are_or_decoded(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    with_float8(source, has_blocks=False)
    blobstore.create(source, "m", store=store)
    link_model("m", tmp_path / "links", store=store)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    theirs = answer(model=str(source))
    with engine_options("m", store=store, dequantize=False) as engine:
        assert answer(**engine) == theirs
    assert answer(model=str(tmp_path / "links")) == theirs
    assert answer(**options(store, tmp_path / "links")) == theirs
    with engine_options("m", store=store, dequantize=True) as engine:
        assert answer(**engine) == answer(model=str(tmp_path / "plain")) != theirs


def test_experts_of_gpt_oss_are_served_dequantized(store: LocalStore, tmp_path: Path) -> None:
    source = saved("gpt-oss", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    export_model("m", tmp_path / "plain", store=store, dequantize=True)
    with engine_options("m", store=store) as engine:
        ours = answer(**engine)
    assert ours == answer(model=str(tmp_path / "plain"))


def test_a_folder_of_links_is_served_like_any_other_folder(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    link_model("m", tmp_path / "links", store=store)
    assert answer(model=str(tmp_path / "links")) == expected("llama")
    assert answer(**options(store, tmp_path / "links")) == expected("llama")


def test_the_type_of_the_weights_is_added_to_a_config_without_one(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source", torch.float16)
    config = json.loads((source / "config.json").read_bytes())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config))
    blobstore.create(source, "m", store=store)
    with engine_options("m", store=store) as engine:
        ours = answer(**engine)
    assert ours == answer(model=str(source))


def test_a_tied_head_may_be_stored_too(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source", tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plain = answer(model=str(source))
    blobstore.create(changed(source, add_head), "m", store=store)
    with engine_options("m", store=store) as engine:
        assert answer(**engine) == plain


def test_a_head_that_differs_from_the_tied_one_is_rejected(
    store: LocalStore, tmp_path: Path
) -> None:
    source = saved("llama", tmp_path / "source", tie_word_embeddings=True)

    def add_head(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    blobstore.create(changed(source, add_head), "m", store=store)
    with (
        engine_options("m", store=store) as engine,
        pytest.raises(BlobstoreError, match="1 tensor unexpected: 'lm_head.weight'$"),
    ):
        answer(**engine)


def test_missing_tensors_are_all_listed(store: LocalStore, tmp_path: Path) -> None:
    absent = [
        "lm_head.weight",
        "model.norm.weight",
        f"{LAYER}.mlp.down_proj.weight",
        f"{LAYER}.self_attn.k_proj.weight",  # vLLM fuses it with two others
        f"{LAYER}.mlp.up_proj.weight",
    ]
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "whole", store=store)
    changed(source, lambda tensors: [tensors.pop(name) for name in absent])
    blobstore.create(source, "m", store=store)
    assert refused(store, source) == (
        "LlamaForCausalLM of vLLM cannot take the tensors of m:latest: 5 tensors missing: "
        + ", ".join(f"'{name}'" for name in sorted(absent))
    )


def test_missing_experts_are_all_listed(store: LocalStore, tmp_path: Path) -> None:
    absent = [
        f"{LAYER}.mlp.experts.10.gate_proj.weight",
        f"{LAYER}.mlp.experts.3.down_proj.weight",
        f"{LAYER}.mlp.experts.3.up_proj.weight",
    ]
    source = saved("qwen3-moe", tmp_path / "source")
    changed(source, lambda tensors: [tensors.pop(name) for name in absent])
    blobstore.create(source, "m", store=store)
    message = refused(store, source)
    assert message.endswith(": 3 tensors missing: " + ", ".join(f"'{name}'" for name in absent))


def test_unexpected_tensors_are_all_listed(store: LocalStore, tmp_path: Path) -> None:
    others = [
        "lm_head.bias",  # which vLLM would skip silently, like the next
        f"{LAYER}.self_attn.q_proj.bias",
        f"{LAYER}.self_attn.r_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "more",
    ]
    source = saved("llama", tmp_path / "source")
    changed(source, lambda tensors: tensors.update((name, torch.ones(8)) for name in others))
    blobstore.create(source, "m", store=store)
    message = refused(store, source)
    listed = ", ".join(f"'{name}'" for name in sorted(others))
    assert message.endswith(f": 5 tensors unexpected: {listed}")


def test_unexpected_names_are_only_logged_on_request(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    changed(
        source, lambda tensors: tensors.update({f"{LAYER}.self_attn.q_proj.bias": torch.ones(8)})
    )
    blobstore.create(source, "m", store=store)
    assert answer(**options(store, source, strict=False)) == expected("llama")


def test_tensors_that_vllm_computes_itself_are_accepted(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    changed(
        source,
        lambda tensors: tensors.update({f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
    )
    blobstore.create(source, "m", store=store)
    with engine_options("m", store=store) as engine:
        assert answer(**engine) == expected("llama")


def test_a_tensor_of_another_shape_is_named(store: LocalStore, tmp_path: Path) -> None:
    name = f"{LAYER}.mlp.down_proj.weight"
    source = saved("llama", tmp_path / "source")
    changed(source, lambda tensors: tensors.update({name: torch.ones(3, 5)}))
    blobstore.create(source, "m", store=store)
    message = refused(store, source)
    assert f"cannot take tensor '{name}' of m:latest, float32 [3, 5]: " in message


@pytest.fixture
def _no_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_model(*_: object, **__: object) -> None:
        pytest.fail("a model was built before the store was checked")

    monkeypatch.setattr(BaseModelLoader, "create_model", create_model)


@pytest.mark.usefixtures("_no_memory_is_taken")
def test_damage_is_reported_before_memory_is_taken(store: LocalStore, tmp_path: Path) -> None:
    source = saved("llama", tmp_path / "source")
    blobstore.create(source, "m", store=store)
    with pytest.raises(ModelNotFound, match="no model 'other:latest'"):
        LLM(**FAST, **options(store, source, name="other"))
    with pytest.raises(BlobstoreError, match="is another model now, sha256:"):
        LLM(**FAST, **options(store, source, manifest=f"sha256:{'0' * 64}"))

    path = blob_path(store, "model.norm.weight")
    flip(path)
    with pytest.raises(BlobDamaged, match="'model.norm.weight'"):
        LLM(**FAST, **options(store, source))  # hashed by default
    with (
        pytest.raises(BlobDamaged, match="'model.norm.weight'"),
        engine_options("m", store=store),
    ):
        pass
    path.unlink()
    with pytest.raises(BlobMissing, match="'model.norm.weight'"):
        LLM(**FAST, **options(store, source))


def test_the_load_format_is_found_by_its_entry_point(store: LocalStore) -> None:
    load_general_plugins()
    loader = get_model_loader(
        LoadConfig(load_format="BlobStore", model_loader_extra_config={"name": "m"})
    )
    assert type(loader).__module__ == "blobstore.integrations.vllm.loader"
    with pytest.raises(UsageError, match="must name the model"):
        get_model_loader(LoadConfig(load_format="blobstore"))


def test_the_temporary_folder_is_removed(store: LocalStore, tmp_path: Path) -> None:
    blobstore.create(
        saved("llama", tmp_path / "source"), "m", store=store, quantize=QuantizeOptions("int4")
    )
    with engine_options("m", store=store) as engine:
        folder = tmp_path / engine["model"]
        config = json.loads((folder / "config.json").read_bytes())
        names = {path.name for path in folder.iterdir()}
    assert "quantization" not in config
    assert names == {path.name for path in (tmp_path / "source").iterdir()} - {"model.safetensors"}
    assert not folder.exists()
