from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import blobstore
from blobstore.errors import InvalidManifest, ModelNotFound, UnsupportedSource, UsageError
from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.store.local import LocalStore

distributed = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = {"config.json": {"model_type": "toy"}}


def plain() -> dict[str, Any]:
    """Return a state that torch's own planner takes apart without loss."""
    return {
        "model": {"layer.weight": torch.arange(6.0).reshape(2, 3).t(), "tied": torch.ones(2)},
        "optimizer": {
            "state": {"layer.weight": {"step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.5, "betas": (0.9, 0.99)}, {"names": ["a"], "lr": float("inf")}],
        },
        "random": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002 - what programs keep
        "python": random.getstate(),
        "step": 3,
        "dtype": torch.bfloat16,
        "nothing": None,
    }


def rich() -> dict[str, Any]:
    """Return a state with containers that torch's own planner does not know."""
    return {
        "model": OrderedDict(b=torch.ones(2), a=torch.zeros(1, dtype=torch.bfloat16)),
        "optimizer": {"state": {1: {"m": torch.ones(3)}, 0: {"m": torch.zeros(3)}}},
        "milestones": Counter({30: 1, 80: 2}),
        "pair": (torch.tensor(1), [{}, (2, {"deep": torch.tensor([1j]).conj()})]),
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "$sign": {"$tuple": 1},
    }


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor | np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bool((found == expected).all())
        return
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        if not type(expected) is dict:  # noqa: E714
            assert list(found) == list(expected)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("model", ["", "model"])
@pytest.mark.parametrize("state", [plain, rich])
def test_a_state_comes_back(store: LocalStore, state: Any, model: str, *, background: bool) -> None:
    options: Any = {"model": model, "store": store, "background": background}
    saved: Any = blobstore.save(state(), "run:1", **options)
    saved = saved.result() if background else saved
    assert_same(blobstore.load("run:1", store=store), state())
    assert blobstore.open("run:1", store=store).digest == saved.digest
    assert not saved.replaced


@distributed
@pytest.mark.parametrize("model", ["", "model"])
def test_a_state_is_saved_as_a_writer_does(store: LocalStore, tmp_path: Path, model: str) -> None:
    options: dict[str, Any] = {"model": model, "metrics": {"loss": 0.5}}
    options |= {"files": CONFIG} if model else {}
    blobstore.save(plain(), "run:1", store=store, **options)
    writer = StoreWriter(tmp_path, **options)
    save_distributed(plain(), checkpoint_id="run:1", storage_writer=writer)
    names = ["run:1", "run:1.state"] if model else ["run:1"]
    assert [str(name) for name in store.references()] == names
    for name in names:
        assert store.read_manifest(name) == LocalStore(tmp_path).read_manifest(name)
    assert_same(blobstore.load("run:1", store=tmp_path), plain())


@distributed
def test_torch_loads_the_tensors_of_any_state(store: LocalStore) -> None:
    blobstore.save(rich(), "run:1", model="model", store=store)
    target = {"optimizer": {"state": {0: {"m": torch.ones(3)}, 1: {"m": torch.zeros(3)}}}}
    load_distributed(target, checkpoint_id="run:1", storage_reader=StoreReader(store))
    assert_same(target["optimizer"], rich()["optimizer"])
    with pytest.raises(CheckpointException, match=r"'pair\[0\]' is a torch\.Tensor"):
        load_distributed({"pair": 0}, checkpoint_id="run:1", storage_reader=StoreReader(store))


def test_the_model_is_the_one_of_its_tensors(store: LocalStore, tmp_path: Path) -> None:
    saved = blobstore.save(plain(), "run:1", model="model", files=CONFIG, store=store)
    alone = blobstore.save(plain()["model"], "run:1", files=CONFIG, store=tmp_path)
    assert saved.digest == alone.digest
    again = blobstore.save(plain(), "run:2", model="model", store=store)
    assert (saved.bytes_present, again.bytes_written) == (0, 0)
    assert again.bytes_present == saved.bytes_written


def test_an_alias_and_object_storage_have_the_state(store: LocalStore, tmp_path: Path) -> None:
    blobstore.save(plain(), "run:1", model="model", store=store)
    blobstore.copy("run:1", "run:best", store=store)
    assert_same(blobstore.load("run:best", store=store), plain())
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    bucket = f"file://{tmp_path}/bucket"
    for replaced in (False, True):
        state = plain() | {"model": {"w": torch.tensor(int(replaced))}}
        assert blobstore.save(state, "run:1", model="model", store=bucket).replaced == replaced
        assert_same(blobstore.load("run:1", store=bucket), state)
    blobstore.save({"w": torch.ones(2)}, "other", store=store)
    blobstore.push("other", f"{bucket}/run:1", store=store)
    with pytest.raises(UsageError, match="the model 'run:1' is not that of its state"):
        blobstore.load("run:1", store=bucket)
    state = {"w": torch.ones(2), "step": 2}
    blobstore.save(state, "run:1", store=bucket)
    assert_same(blobstore.load("run:1", store=bucket), state)


def test_any_model_is_a_state_of_its_tensors(store: LocalStore) -> None:
    blobstore.save({"w": torch.ones(2)}, "m", store=store)
    assert_same(blobstore.load("m", store=store), {"w": torch.ones(2)})
    assert_same(blobstore.load("m", store=store, framework="numpy"), {"w": np.ones(2, np.float32)})
    with pytest.raises(ModelNotFound, match="there is no step 'run:7'"):
        blobstore.load("run:7", store=store)


def test_a_state_belongs_to_the_model_it_was_saved_with(store: LocalStore) -> None:
    blobstore.save(plain(), "run:1", model="model", store=store)
    blobstore.save({"w": torch.ones(2)}, "run:1", store=store)
    assert_same(blobstore.load("run:1", store=store), {"w": torch.ones(2)})
    assert_same(blobstore.load("run:1.state", store=store), plain())
    blobstore.remove("run:1", store=store)
    assert_same(blobstore.load("run:1", store=store), plain())


def test_a_state_that_is_newer_than_its_model_is_of_a_step_that_is_replaced(
    store: LocalStore,
) -> None:
    blobstore.save({"w": torch.ones(2)}, "run:1", store=store)
    blobstore.save(plain(), "run:2", model="model", store=store)
    blobstore.copy("run:2.state", "run:1.state", store=store)
    os.utime(store.root / "manifests/registry.ollama.ai/library/run/1", (1, 1))
    assert_same(blobstore.load("run:1", store=store), plain())


def test_a_copy_has_the_state_of_its_own_step(store: LocalStore) -> None:
    for step in (1, 2):
        blobstore.save(plain() | {"step": step}, f"run:{step}", model="model", store=store)
    for step in (2, 1):
        blobstore.copy(f"run:{step}", "run:best", store=store)
        assert blobstore.load("run:best", store=store)["step"] == step
    blobstore.remove(["run:1", "run:1.state"], store=store)
    assert blobstore.load("run:best", store=store)["step"] == 1
    assert_same(blobstore.load("run:2", store=store), plain() | {"step": 2})
    blobstore.save(plain()["model"], "run:other", store=store)  # an equal model, and not a copy
    assert_same(blobstore.load("run:other", store=store), plain()["model"])


def test_a_step_that_is_replaced_is_loaded_from_its_state_alone(store: LocalStore) -> None:
    old, new = plain(), plain() | {"model": {"w": torch.ones(2)}, "step": 4}
    blobstore.save(old, "run:1", model="model", store=store)
    blobstore.copy("run:1", "run:best", store=store)
    blobstore.save(new, "run:2", model="model", store=store)
    blobstore.copy("run:2.state", "run:1.state", store=store, force=True)  # the other name is next
    assert_same(blobstore.load("run:1", store=store), new)
    assert_same(dict(blobstore.open("run:1", store=store, framework="torch")), old["model"])
    assert_same(blobstore.load("run:best", store=store), old)
    blobstore.copy("run:1", "run:last", store=store)  # the model alone
    assert_same(blobstore.load("run:last", store=store), old["model"])


def test_other_manifests_are_not_read(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run:1", "run:2", "other"):
        blobstore.save(plain(), name, model="model", store=store)
    read: set[str] = set()
    intact = LocalStore.read_manifest

    def noted(self: LocalStore, reference: Any) -> bytes:
        read.add(str(reference))
        return intact(self, reference)

    monkeypatch.setattr(LocalStore, "read_manifest", noted)
    assert_same(blobstore.load("run:1", store=store), plain())
    assert read == {"run:1", "run:1.state"}


def test_a_damaged_state_is_reported(store: LocalStore) -> None:
    blobstore.save(plain(), "run:1", model="model", store=store)
    store.manifest_path("run:1.state").write_bytes(b"{}")
    with pytest.raises(InvalidManifest):
        blobstore.load("run:1", store=store)


def test_tensors_of_two_libraries_come_back_as_they_were(store: LocalStore) -> None:
    state = {"w": torch.ones(2), "x": np.arange(3)}
    blobstore.save(state, "m", store=store)
    found = blobstore.load("m", store=store)
    assert_same(found, state)
    assert [type(one) for one in found.values()] == [torch.Tensor, np.ndarray]


def test_a_name_of_any_length_is_loaded(store: LocalStore) -> None:
    name = f"run:{'t' * 80}"
    blobstore.save(plain(), name, store=store)
    assert_same(blobstore.load(name, store=store), plain())


def test_values_of_torch_come_back_with_other_tensors(store: LocalStore) -> None:
    blobstore.save({"w": torch.ones(2), "type": torch.int8}, "run:1", store=store)
    found = blobstore.load("run:1", store=store, framework="numpy")
    assert_same(found, {"w": np.ones(2, np.float32), "type": torch.int8})


def test_arrays_are_tensors_if_there_are_no_others(store: LocalStore) -> None:
    state = {"model": {"w": np.arange(3)}, "step": 3}
    blobstore.save(state, "run:1", model="model", store=store)
    assert blobstore.open("run:1", store=store)["w"].tolist() == [0, 1, 2]
    assert_same(blobstore.load("run:1", store=store), state)


def test_arrays_of_mlx_come_back(store: LocalStore) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX does not run on this machine")
    blobstore.save({"w": mx.ones(2), "step": (3, np.ones(1))}, "run:1", store=store)
    found = blobstore.load("run:1", store=store)
    assert type(found["w"]) is mx.array
    assert_same(found["step"], (3, np.ones(1)))


def nested(depth: int) -> Any:
    """Return a value in some dicts."""
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({"w": torch.ones(1), "x": object()}, UnsupportedSource, "the value 'x' is a builtins.obj"),
        ({"w": torch.ones(1), "x": {(1, 2): [set]}}, UnsupportedSource, r"'x\.\(1, 2\)\[0\]' is a"),
        ({"a.b": torch.ones(1), "a": {"b": 1}}, UsageError, "would have the key 'a.b'"),
        ({"x": {1: torch.ones(1), "1": 2}}, UsageError, "would have the key 'x.1'"),
        ({"w": torch.ones(1), "x": {"\ud800": 1}}, UnsupportedSource, "not Unicode"),
        ({"w": torch.ones(1), "x": nested(100)}, UsageError, "has over 100 parts"),
        ({"w": torch.ones(1), "x": nested(5000)}, UsageError, "nested too deeply"),
        ({"x": 1}, UsageError, "there are no tensors"),
    ],
    ids=range(8),
)
def test_refuses_a_state_that_would_not_come_back(
    store: LocalStore, state: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        blobstore.save(state, "run:1", store=store)
    assert not list(store.references())


class Training:
    """A small training with all that a program saves."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=8)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "random": torch.get_rng_state(),
        }

    def resume(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state["random"])

    def step(self) -> float:
        inputs = torch.randn(16, 4)
        loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_training_has_the_same_losses(store: LocalStore, *, background: bool) -> None:
    training = Training()
    losses = []
    for step in range(8):
        options: Any = {"model": "model", "store": store, "background": background}
        saved: Any = blobstore.save(training.state(), f"run:{step}", **options)
        losses.append(training.step())
    if background:
        saved.result()
    assert len(set(losses)) == 8
    for first in (0, 3):
        resumed = Training()
        resumed.resume(blobstore.load(f"run:{first}", store=store))
        assert [resumed.step() for _ in range(first, 8)] == losses[first:]
