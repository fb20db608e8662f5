from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    _EmptyStateDictLoadPlanner,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save

import blobstore
from blobstore.errors import (
    BlobDamaged,
    InvalidReference,
    ModelNotFound,
    StoreBusy,
    UnsupportedSource,
    UsageError,
)
from blobstore.integrations.torch_checkpoint import StoreReader, StoreWriter
from blobstore.integrations.torch_checkpoint import writer as writer_module
from blobstore.integrations.torch_checkpoint.layout import plan_tasks, tensors_of
from blobstore.manifests.step_record import RECORD_FILE
from blobstore.operations.create.step import StepPlan
from blobstore.store.local import LocalStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
TYPES += [torch.float8_e4m3fn, torch.float16]


def state() -> dict[str, Any]:
    model = {f"w{index}": torch.ones(3, 4).to(dtype) for index, dtype in enumerate(TYPES)}
    model |= {"turned": torch.arange(6.0).reshape(2, 3).t(), "number": torch.tensor(2)}
    return {
        "model": model
        | {"empty": torch.zeros(0, 2), "conjugate": torch.ones(2, dtype=torch.complex64).conj()},
        "optimizer": {"groups": [{"lr": 0.5, "betas": (0.9, 0.99)}], "state": {0: torch.ones(2)}},
        "step": 3,
    }


def emptied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: emptied(one) for key, one in value.items()}
    if isinstance(value, list):
        return list(map(emptied, value))
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    else:
        yield value


def assert_equal(found: Any, expected: Any) -> None:
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def saved(store: Path, value: Any, name: str = "run:1", **options: Any) -> None:
    save(value, checkpoint_id=name, storage_writer=StoreWriter(store, **options))


def loaded(store: Path, target: Any, name: str = "run:1", **options: Any) -> Any:
    load(target, checkpoint_id=name, storage_reader=StoreReader(store, **options))
    return target


@pytest.mark.parametrize("model", ["", "model"])
def test_a_state_comes_back(tmp_path: Path, model: str) -> None:
    saved(tmp_path, state(), model=model)
    assert_equal(loaded(tmp_path, emptied(state())), state())


def test_the_model_is_what_save_makes_of_it(tmp_path: Path) -> None:
    files = {"config.json": {"model_type": "toy"}}
    saved(tmp_path / "step", state(), model="model", files=files)
    plain = {name: tensor.resolve_conj() for name, tensor in state()["model"].items()}
    digest = blobstore.save(plain, "run:1", files=files, store=tmp_path / "saved").digest
    assert blobstore.open("run:1", store=tmp_path / "step").digest == digest


def test_a_part_of_a_state_can_be_loaded(tmp_path: Path) -> None:
    saved(tmp_path, state(), model="model")
    assert loaded(tmp_path, {"model": {"number": torch.tensor(0)}})["model"]["number"] == 2


def test_the_state_can_be_made_of_the_step_alone(tmp_path: Path) -> None:
    saved(tmp_path, state(), model="model")
    reader = StoreReader(tmp_path)
    found: dict[str, Any] = {}
    reader.reset("run:1")
    _load_state_dict(
        found, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    assert_equal(found["model"]["turned"], state()["model"]["turned"])
    assert found["optimizer"]["groups"] == state()["optimizer"]["groups"]


def test_a_model_that_was_not_trained_here_can_be_loaded(tmp_path: Path) -> None:
    blobstore.save({"w": torch.ones(2)}, "base", store=tmp_path)
    target = {"model": {"w": torch.zeros(2)}}
    assert_equal(loaded(tmp_path, target, "base", model="model"), {"model": {"w": torch.ones(2)}})
    assert_equal(loaded(tmp_path, {"w": torch.zeros(2)}, "base"), {"w": torch.ones(2)})


def test_an_alias_of_the_model_loads_all_of_its_step(tmp_path: Path) -> None:
    saved(tmp_path, state(), "run:1", model="model")
    blobstore.copy("run:1", "run:best", store=tmp_path)
    assert loaded(tmp_path, {"step": None}, "run:best") == {"step": 3}


def test_the_model_can_be_loaded_when_the_state_was_removed(tmp_path: Path) -> None:
    saved(tmp_path, state(), model="model")
    blobstore.remove(["run:1.state"], store=tmp_path)
    found = loaded(tmp_path, {"model": {"number": torch.tensor(0)}}, model="model")
    assert found["model"]["number"] == 2


def trained(step: int) -> dict[str, Any]:
    """Return a state whose first layer is frozen, and whose other one changes a little."""
    torch.manual_seed(0)
    model = {"frozen": torch.randn(64, 64), "w": torch.randn(64, 64) + step / 1000}
    return {"model": model, "optimizer": {"m": torch.full((64, 64), step / 7)}, "step": step}


def test_earlier_steps_of_a_run_are_frozen_in_the_background(store: LocalStore) -> None:
    writer = StoreWriter(store, model="model", keep="delta")
    for step in (1, 2, 3):
        save(trained(step), checkpoint_id=f"run:{step}", storage_writer=writer)
        if step == 2:
            blobstore.copy("run:2", "run:best", store=store)
        assert writer._freezing is not None
        writer._freezing.result()
    hot = {
        name: {layer.name for layer in store.resolve(name).blobs if store.has_hot(layer.digest)}
        for name in ("run:1.state", "run:best.state", "run:3.state")
    }
    assert {"frozen", "w", "optimizer.m"} <= hot["run:3.state"]
    for name in ("run:1.state", "run:best.state"):
        assert {"frozen", "w", "optimizer.m"} & hot[name] == {"frozen"}  # the newest step needs it
    for step in (1, 2, 3):
        assert_equal(loaded(store.root, emptied(trained(0)), f"run:{step}"), trained(step))


def test_a_failed_freeze_is_a_warning_and_the_steps_stay(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreBusy("another process has the lock")

    monkeypatch.setattr(writer_module, "freeze_models", fail)
    writer = StoreWriter(store, model="model", keep="delta")

    def save_both() -> None:
        for step in (1, 2):
            save(trained(step), checkpoint_id=f"run:{step}", storage_writer=writer)
            assert writer._freezing is not None
            writer._freezing.result()

    with pytest.warns(UserWarning, match=r"steps before run:2 were not frozen: another process"):
        save_both()
    assert_equal(loaded(store.root, emptied(trained(0)), "run:1"), trained(1))


@pytest.mark.parametrize(("store", "keep"), [("s3://bucket/x", "delta"), (None, "deltas")])
def test_what_cannot_be_kept_as_deltas_is_refused(store: str | None, keep: Any) -> None:
    with pytest.raises(UsageError, match="keep is 'files', or 'delta' in a folder, got 'delta"):
        StoreWriter(store, keep=keep)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        ({"w": torch.ones(1), "other": {"a": object()}}, {}, r"'other\.a' is a builtins\.object"),
        ({"w": torch.ones(1, dtype=torch.complex128)}, {}, "'w' is of type torch.complex128"),
        ({"w": torch.ones(1)}, {"model": "net"}, "no tensors under 'net'"),
        ({"w": torch.ones(1).to_sparse()}, {}, "'w'"),
        ({"step": 1}, {}, "no tensors"),
    ],
    ids=["object", "type", "model", "sparse", "empty"],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(
    tmp_path: Path, value: Any, options: dict[str, Any], message: str
) -> None:
    saved(tmp_path, {"w": torch.zeros(1)}, "run:0")
    with pytest.raises(CheckpointException, match=message):
        saved(tmp_path, value, **options)
    store = LocalStore(tmp_path)
    assert [str(name) for name in store.references()] == ["run:0"]
    assert list(store.folder("temporary").iterdir()) == []
    assert store.read_leases().held == {}


def test_a_writer_saves_step_after_step_and_after_a_failure(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path, model="model")
    for step in range(3):
        writer.metrics = {"loss": 1 / (step + 1)}
        save(state() | {"step": step}, checkpoint_id=f"run:{step}", storage_writer=writer)
        with pytest.raises(CheckpointException):
            save({"model": object()}, checkpoint_id="run:x", storage_writer=writer)
    assert loaded(tmp_path, {"step": None}, "run:2") == {"step": 2}
    assert b"0.333" in blobstore.open("run:2", store=tmp_path).read_file("metrics.json")


def test_a_step_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="checkpoint_id"):
        save(state(), storage_writer=StoreWriter(tmp_path))
    with pytest.raises(InvalidReference):
        save(state(), checkpoint_id="a:b:c", storage_writer=StoreWriter(tmp_path))
    assert StoreWriter.validate_checkpoint_id("run:1")
    assert not StoreReader.validate_checkpoint_id("/tmp/x")


def test_ranks_do_not_save_for_themselves(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="use_collectives"):
        save(
            state(),
            checkpoint_id="r:1",
            storage_writer=StoreWriter(tmp_path),
            use_collectives=False,
        )


def test_plans_that_are_cached_are_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    save(state(), checkpoint_id="run:1", storage_writer=writer, planner=planner)
    with pytest.raises(CheckpointException, match="enable_plan_caching"):
        save(state(), checkpoint_id="run:2", storage_writer=writer, planner=planner)


def test_a_step_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    saved(tmp_path, state())
    with pytest.raises(CheckpointException, match="no step 'run:2'"):
        loaded(tmp_path, state(), "run:2")
    with pytest.raises(ModelNotFound):
        blobstore.open("run:2", store=tmp_path)


def test_a_record_that_does_not_fit_is_damaged(tmp_path: Path) -> None:
    record = b'{"version":1,"state":{"x":1}}'
    blobstore.save({"w": torch.ones(1)}, "r:1", files={RECORD_FILE: record}, store=tmp_path)
    reader = StoreReader(tmp_path)
    reader.reset("r:1")
    with pytest.raises(BlobDamaged, match=RECORD_FILE):
        reader.read_metadata()


def test_a_value_that_nothing_wrote_is_damaged(tmp_path: Path) -> None:
    record = b'{"version":1,"state":{"w":{"$tensor":"w"},"v":{"$call":"os.system"}}}'
    blobstore.save({"w": torch.ones(1)}, "r:1", files={RECORD_FILE: record}, store=tmp_path)
    with pytest.raises(CheckpointException, match="no value of the kind 'call'"):
        loaded(tmp_path, {"w": torch.zeros(1), "v": 0}, "r:1")


def test_a_tensor_of_which_ranks_have_only_a_part_is_refused() -> None:
    planner = DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(4, 2)}, is_coordinator=True)
    plan = planner.create_local_plan()
    (item,) = plan.items
    assert item.tensor_data is not None
    larger = dataclasses.replace(item.tensor_data, size=torch.Size([8, 2]))
    item = dataclasses.replace(item, tensor_data=larger)
    plans = [dataclasses.replace(plan, items=[item])]
    with pytest.raises(UnsupportedSource, match="32 of the 64 bytes"):
        plan_tasks(plans, StepPlan(tensors_of(plans)), "", "", "", "")
