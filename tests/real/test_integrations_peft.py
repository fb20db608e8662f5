"""Adapters loaded from the store give the same results as PEFT gives for their folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import blobstore
from blobstore.errors import BlobstoreError, MissingLibrary, ModelNotFound, UsageError
from blobstore.integrations.transformers import from_store
from blobstore.store.local import LocalStore
from tests.real.tiny import logits, make

peft: Any = pytest.importorskip("peft", reason="it is in the test group")
# PEFT asks transformers under a name that this is about to lose.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


def load(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def adapter(store: LocalStore, tmp_path: Path) -> Path:
    """The folder of an adapter; the store has it as ``lora``, and its base as ``base``."""
    base = tmp_path / "base"
    make("llama", torch.float32).save_pretrained(base)
    config = peft.LoraConfig(
        r=3, lora_alpha=12, init_lora_weights=False, target_modules=["q_proj", "v_proj"]
    )
    peft.get_peft_model(load(base), config).save_pretrained(tmp_path / "lora")
    blobstore.create(base, "base", store=store)
    change(tmp_path / "lora", base_model_name_or_path="base")
    blobstore.create(tmp_path / "lora", "lora", store=store)
    return tmp_path / "lora"


def change(folder: Path, **values: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_an_adapter_is_loaded_with_its_base(
    adapter: Path, store: LocalStore, tmp_path: Path
) -> None:
    expected = peft.PeftModel.from_pretrained(load(tmp_path / "base"), adapter)

    model = from_store("lora", store=store)

    assert type(model) is type(expected)
    assert not model.training
    assert torch.equal(logits(model), logits(expected))
    assert not torch.equal(logits(model), logits(load(tmp_path / "base")))
    assert {one.device.type for one in model.parameters()} == {"cpu"}


def test_the_base_can_be_named(adapter: Path, store: LocalStore) -> None:
    change(adapter, base_model_name_or_path="/elsewhere/base")
    blobstore.create(adapter, "lora", store=store)

    with pytest.raises(ModelNotFound, match=r"an adapter of '/elsewhere/base'.*base=…"):
        from_store("lora", store=store)
    named: Any = from_store("lora", store=store, base="base")
    assert named.base_model.model.name_or_path == "base:latest"
    with pytest.raises(UsageError, match="base:latest is not an adapter"):
        from_store("base", store=store, base="lora")


def test_tensors_that_do_not_fit_are_listed(adapter: Path, store: LocalStore) -> None:
    weights = adapter / "adapter_model.safetensors"
    tensors = load_file(weights)
    first = min(tensors)
    save_file(
        {name: one for name, one in tensors.items() if name != first} | {"x": tensors[first]},
        weights,
    )
    blobstore.create(adapter, "lora", store=store)

    with pytest.raises(BlobstoreError, match="1 tensor missing: .*1 tensor unexpected: "):
        from_store("lora", store=store)


@pytest.mark.parametrize(
    "values", [{"peft_type": "NONE"}, {"peft_type": None}, {"r": "x"}, {"r": 10**12}, {"r": -1}]
)
def test_a_damaged_config_is_one_error(
    adapter: Path, store: LocalStore, values: dict[str, Any]
) -> None:
    change(adapter, **values)
    blobstore.create(adapter, "lora", store=store)

    with pytest.raises(BlobstoreError, match="PEFT cannot load lora:latest"):
        from_store("lora", store=store)


def test_a_config_cannot_have_a_module_imported(adapter: Path, store: LocalStore) -> None:
    change(adapter, megatron_config={"a": 1}, megatron_core="this")
    blobstore.create(adapter, "lora", store=store)

    from_store("lora", store=store)
    assert "this" not in sys.modules


def test_without_peft_the_error_says_what_to_install(
    adapter: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        MissingLibrary, match="lora:latest is an adapter, which the package peft loads; install"
    ):
        from_store("lora", store=store)
