from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import save

import blobstore
from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.integrations.torch_checkpoint import export_trainer
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.support.trainer_folders import FILES, assert_same, train, write_trainer_folder
from tests.support.zero_folders import saved_by_deepspeed, write_zero
from tests.unit.cli.running import run_json

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of the Trainer."""
    return write_trainer_folder(tmp_path / "checkpoint-3")


def loaded(store: LocalStore, name: str) -> Any:
    return blobstore.load(name, store=store, framework="torch")


def digests(store: LocalStore, name: str) -> dict[str, str]:
    layers = store.resolve(name).layers_of(media_types.TENSOR)
    return {layer.name: layer.digest.hex for layer in layers}


def test_the_state_of_a_trainer_comes_back(folder: Path, store: LocalStore) -> None:
    created = blobstore.create(folder, "run:3", store=store, state=True)
    state = loaded(store, "run:3")
    expected = train(3)
    assert_same(state["model"], dict(expected["model.safetensors"]))
    for name in FILES:
        assert_same(state[Path(name).stem], expected[name])
    assert created.tensors == 4 + 3 * 4 + 3
    assert created.notices == ()


def test_the_blobs_of_the_model_are_those_of_an_import_without_the_state(
    folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "run:3", store=store, state=True)
    blobstore.create(folder, "alone", store=store)
    assert digests(store, "run:3") == digests(store, "alone")
    assert digests(store, "run:3").items() < digests(store, "run:3.state").items()


def test_options_of_the_training_are_a_file_of_the_model(folder: Path, store: LocalStore) -> None:
    blobstore.create(folder, "run:3", store=store, state=True)
    model = blobstore.open("run:3", store=store)
    assert model.read_file("training_args.bin") == (folder / "training_args.bin").read_bytes()
    assert {"config.json", "trainer_state.json"} < set(model.files)


def test_every_step_of_a_run_is_imported_with_its_state(tmp_path: Path, cli: LocalStore) -> None:
    for count in (1, 2):
        write_trainer_folder(tmp_path / "out" / f"checkpoint-{count}", count)
    result = run_json("create", "--all", tmp_path / "out", "run", "--state")
    assert len(result["models"]) == 2
    names = {str(name) for name in cli.references()}
    steps = {f"run:checkpoint-{number}" for number in (1, 2)}
    assert names == steps | {f"{name}.state" for name in steps}
    again = run_json("create", "--all", tmp_path / "out", "run", "--state")
    assert [model["bytes_written"] for model in again["models"]] == [0, 0]


@pytest.fixture
def cli(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return the store that commands use."""
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    return store


@pytest.mark.parametrize(
    "value",
    [torch.ones(2, 2).to_sparse(), {"a": {1, 2}}, {(1, 2): 3}, object, {"a": (torch.ones(1),) * 2}],
    ids=["sparse", "set", "keys", "class", "tuple"],
)
def test_a_file_that_is_not_plain_is_kept_or_comes_back(
    folder: Path, store: LocalStore, value: Any
) -> None:
    torch.save(value, folder / "scaler.pt")
    created = blobstore.create(folder, "run:3", store=store, state=True)
    state = blobstore.open("run:3", store=store)
    if "scaler.pt" in state.files:
        assert state.read_file("scaler.pt") == (folder / "scaler.pt").read_bytes()
        assert any("kept as a file" in notice for notice in created.notices)
    else:
        assert_same(loaded(store, "run:3")["scaler"], value)


def test_a_checkpoint_that_is_one_file_has_its_state(tmp_path: Path, store: LocalStore) -> None:
    state = train(2)
    whole = {
        "state_dict": dict(state["model.safetensors"]),
        "optimizer_states": [state["optimizer.pt"]],
        "lr_schedulers": [state["scheduler.pt"]],
        "epoch": 3,
        7: "number",
        "callbacks": {"kept": {1, 2}},
    }
    torch.save(whole, tmp_path / "last.ckpt")
    created = blobstore.create(tmp_path / "last.ckpt", "run:2", store=store, state=True)
    del whole["callbacks"]
    assert_same(loaded(store, "run:2"), whole)
    assert len(created.notices) == 1
    assert "left out: 'callbacks" in created.notices[0]
    assert digests(store, "run:2").items() < digests(store, "run:2.state").items()


def test_a_folder_of_torch_has_its_state(tmp_path: Path, store: LocalStore) -> None:
    state = train(2)
    whole = {
        "model": dict(state["model.safetensors"]),
        "optimizer": {"moments": {"a.b": torch.ones(3)}, "groups": [{"lr": 0.5, "betas": (1, 2)}]},
        "step": 7,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    save(whole | {"pair": (torch.ones(1), 2)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    created = blobstore.create(tmp_path / "dcp", "run:2", store=store, state=True)
    assert created.notices[-1] == "left out: 'pair.0' is no tensor, and not a plain value"
    assert not any("optimizer" in notice for notice in created.notices)
    assert_same(loaded(store, "run:2"), whole)
    assert digests(store, "run:2").items() < digests(store, "run:2.state").items()


def in_groups(values: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Return the values of weights, and those of biases."""
    return [{name: it for name, it in values.items() if end in name} for end in ("weight", "bias")]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_training_with_deepspeed_goes_on_with_torch(
    tmp_path: Path, store: LocalStore, stage: int
) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
        weights, biases = (its.values() for its in in_groups(dict(model.named_parameters())))
        groups = [{"params": [*weights], "weight_decay": 0.1}, {"params": [*biases], "lr": 0.5}]
        return model, torch.optim.AdamW(groups, lr=0.1)

    def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        for _ in range(3):
            model(torch.ones(2, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(model.state_dict())

    model, optimizer = made()
    weights = {name: it.clone() for name, it in trained(model, optimizer).items()}
    moments = {
        key: in_groups({name: optimizer.state[it][key] for name, it in model.named_parameters()})
        for key in ("exp_avg", "exp_avg_sq")
    }
    options = optimizer.state_dict()["param_groups"]
    folder = write_zero(
        tmp_path / "out", stage, 2, in_groups(weights), moments=moments, options=options
    )
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state_0.pth")
    blobstore.create(folder, "run:3", store=store, state=True)
    expected = trained(model, optimizer)

    state = loaded(store, "run:3")
    assert_same(dict(sorted(state["model"].items())), dict(sorted(weights.items())))
    assert state["rng_state_0"]["cpu"].equal(torch.get_rng_state())
    model, optimizer = made()
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert_same(trained(model, optimizer), expected)


def test_stages_of_deepspeed_have_the_same_optimizer(tmp_path: Path, store: LocalStore) -> None:
    for name in ("stage1", "stage3", "stage2-mixed", "stage3-mixed"):
        folder = saved_by_deepspeed(name, tmp_path)
        blobstore.create(folder, f"run:{name}", store=store, state=True)
        blobstore.create(folder, "alone", store=store)
        assert digests(store, f"run:{name}") == digests(store, "alone")
    assert_same(loaded(store, "run:stage1")["optimizer"], loaded(store, "run:stage3")["optimizer"])
    states = [loaded(store, f"run:{name}-mixed")["optimizer"] for name in ("stage2", "stage3")]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for name, values in states[0]["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(value, states[1]["state"][name][key], rtol=0.1, atol=1e-4)


def test_complete_weights_next_to_an_optimizer_of_deepspeed_are_refused(
    folder: Path, store: LocalStore
) -> None:
    parameters = {"w": torch.ones(4)}
    write_zero(folder, 2, 2, [parameters], moments={"exp_avg": [parameters]})
    with pytest.raises(
        UnsupportedSource, match="has complete weights, and an optimizer of Deep"
    ) as e:
        blobstore.create(folder, "run:3", store=store, state=True)
    assert f"import '{folder / 'tag'}'" in str(e.value)
    blobstore.create(folder / "tag", "run:3", store=store, state=True)
    assert loaded(store, "run:3")["optimizer"]["state"]["w"]["exp_avg"].tolist() == [1] * 4


@pytest.mark.parametrize(
    "options",
    [{"decode": True}, {"experts": "stacked"}, {"dry_run": True}, {"paranoid": True}],
    ids=str,
)
def test_options_that_have_no_effect_or_convert_are_refused(
    folder: Path, store: LocalStore, options: Any
) -> None:
    with pytest.raises(UsageError, match="state"):
        blobstore.create(folder, "run:3", store=store, state=True, **options)
    assert list(store.references()) == []


def test_a_model_without_a_training_is_refused(tmp_path: Path, store: LocalStore) -> None:
    torch.save(torch.ones(3), tmp_path / "alone.pt")
    with pytest.raises(UnsupportedSource, match="without a training's state"):
        blobstore.create(tmp_path / "alone.pt", "m", store=store, state=True)
    assert list(store.references()) == []


def test_a_file_that_was_cut_short_fails_the_import(folder: Path, store: LocalStore) -> None:
    path = folder / "optimizer.pt"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedSource, match="optimizer.pt"):
        blobstore.create(folder, "run:3", store=store, state=True)
    assert list(store.references()) == []


class _Attack:
    """An object whose pickle runs a command."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._target}",)


@pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "rng_state_0.pth"])
def test_code_in_a_file_is_never_run(
    folder: Path, store: LocalStore, tmp_path: Path, name: str
) -> None:
    torch.save({"state": _Attack(tmp_path / "ran")}, folder / name)
    blobstore.create(folder, "run:3", store=store, state=True)
    blobstore.load("run:3", store=store)
    export_trainer("run:3", tmp_path / "out", store=store)
    assert not (tmp_path / "ran").exists()
    assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


def test_files_next_to_a_folder_of_torch_are_said_to_be_left_out(
    tmp_path: Path, store: LocalStore
) -> None:
    save({"model": {"w": torch.ones(3)}, "step": 1}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save({"last_epoch": 1}, tmp_path / "dcp" / "scheduler.pt")
    created = blobstore.create(tmp_path / "dcp", "run:1", store=store, state=True)
    assert any("left out" in one and "scheduler.pt" in one for one in created.notices)
