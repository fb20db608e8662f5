"""The plugin for Lightning's Trainer, whose package the tests do not have: it is only the base class."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import blobstore
from blobstore.store.local import LocalStore


class HyperParameters(dict[str, Any]):
    """As Lightning keeps them."""


@pytest.fixture
def plugin(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = ModuleType("lightning.fabric.plugins")
    package.CheckpointIO = object  # type: ignore[attr-defined]
    for name in ("lightning", "lightning.fabric"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    module = importlib.import_module("blobstore.integrations.lightning")
    monkeypatch.delitem(sys.modules, module.__name__)
    return module.StoreCheckpointIO("run", store)


def test_a_checkpoint_is_a_step(store: LocalStore, plugin: Any) -> None:
    checkpoint = {
        "state_dict": {"net.weight": torch.ones(2)},
        "optimizer_states": [{"state": {0: {"m": torch.zeros(2)}}}],
        "loops": {"fit_loop": {"current": None}},
        "hyper_parameters": HyperParameters(lr=0.1),
    }
    path = Path("out/epoch=0-step=10.ckpt")
    plugin.save_checkpoint(checkpoint, path)
    assert blobstore.open("run:epoch-0-step-10", store=store)["net.weight"].tolist() == [1, 1]
    found = plugin.load_checkpoint(path)
    assert found["state_dict"]["net.weight"].equal(torch.ones(2))
    assert found["optimizer_states"][0]["state"][0]["m"].equal(torch.zeros(2))
    assert (found["loops"], found["hyper_parameters"]) == (checkpoint["loops"], {"lr": 0.1})
    plugin.remove_checkpoint(path)
    assert list(store.references()) == []
