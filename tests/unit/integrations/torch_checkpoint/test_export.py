from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save

import blobstore
from blobstore.errors import BlobDamaged, BlobstoreError, UsageError
from blobstore.integrations.torch_checkpoint import (
    StoreWriter,
    export_checkpoint,
    export_trainer,
)
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.support.trainer_folders import FILES, assert_same, train, write_trainer_folder
from tests.unit.cli.running import run, run_json
from tests.unit.integrations.torch_checkpoint.test_writer import assert_equal, emptied, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
CONFIG = {"config.json": {"model_type": "toy"}}


@pytest.fixture
def step(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store with a step that has a model, moments and other values."""
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    writer = StoreWriter(store, model="model", files=CONFIG)
    save(state(), checkpoint_id="run:1", storage_writer=writer)
    return store


def read(folder: Path) -> dict[str, Any]:
    """Return all that torch finds in a folder, without knowing what that is."""
    found: dict[str, Any] = {}
    reader = FileSystemReader(folder)
    _load_state_dict(found, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def test_torch_loads_a_step_from_the_folder(step: LocalStore, tmp_path: Path) -> None:
    exported = export_checkpoint("run:1.state", tmp_path / "out", store=step)
    target = emptied(state())
    load(target, storage_reader=FileSystemReader(tmp_path / "out"))
    assert_equal(target, state())
    assert read(tmp_path / "out")["optimizer"]["groups"] == state()["optimizer"]["groups"]
    files = list((tmp_path / "out").iterdir())
    assert exported.files == len(files)
    assert exported.bytes_written == sum(path.stat().st_size for path in files)


def test_an_import_of_the_folder_has_the_blobs_of_the_step(
    step: LocalStore, tmp_path: Path
) -> None:
    blobstore.freeze(["run:1", "run:1.state"], store=step)
    run("export", "run:1.state", tmp_path / "out", "--as", "dcp")
    blobstore.create(tmp_path / "out", "again", store=step)

    def tensors(name: str) -> dict[str, Any]:
        layers = step.resolve(name).layers_of(media_types.TENSOR)
        return {layer.name: layer.digest for layer in layers}

    assert tensors("again") == tensors("run:1")


def test_the_tensors_of_other_models_are_exported(step: LocalStore, tmp_path: Path) -> None:
    blobstore.remove("run:1.state", store=step)
    exported = run_json("export", "run:1", tmp_path / "out", "--layout", "dcp")
    assert exported["tensors"] == len(state()["model"])
    found, expected = read(tmp_path / "out"), state()["model"]
    assert_equal(dict(sorted(found.items())), dict(sorted(expected.items())))


def test_progress_ends_at_all_bytes(step: LocalStore, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    export_checkpoint(
        "run:1.state",
        tmp_path / "out",
        store=step,
        progress=lambda _, done, total: calls.append((done, total)),
    )
    total = blobstore.open("run:1.state", store=step).nbytes
    assert calls == sorted(calls)
    assert calls[-1] == (total, total)


def test_an_older_folder_is_replaced_by_force_only(step: LocalStore, tmp_path: Path) -> None:
    export_checkpoint("run:1", tmp_path / "out", store=step)
    assert "--force" in run("export", "run:1", tmp_path / "out", "--as", "dcp", exit_code=1).stderr
    before = (tmp_path / "out" / ".metadata").stat().st_ino
    run("export", "run:1", tmp_path / "out", "--as", "dcp", "--force")
    assert (tmp_path / "out" / ".metadata").stat().st_ino != before


def test_a_damaged_blob_leaves_no_folder(step: LocalStore, tmp_path: Path) -> None:
    layer = step.resolve("run:1").layers_of(media_types.TENSOR)[-1]
    path = Path(step.blob_path(layer.digest))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    before = set(tmp_path.iterdir())
    with pytest.raises(BlobDamaged):
        export_checkpoint("run:1.state", tmp_path / "out", store=step)
    assert set(tmp_path.iterdir()) == before


def test_a_disk_that_is_full_leaves_no_folder(
    step: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    before = set(tmp_path.iterdir())
    with pytest.raises(BlobstoreError, match="No space left"):
        export_checkpoint("run:1.state", tmp_path / "out", store=step)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("option", ["--single", "--dequantize"])
def test_options_of_weight_files_are_refused(step: LocalStore, tmp_path: Path, option: str) -> None:
    result = run("export", "run:1", tmp_path / "out", "--as", "dcp", option, exit_code=2)
    assert "--layout dcp takes no other options" in result.stderr


@pytest.fixture
def trained(tmp_path: Path, store: LocalStore) -> Path:
    """Return a folder of the Trainer, which a store has with its state."""
    folder = write_trainer_folder(tmp_path / "checkpoint-3")
    blobstore.create(folder, "run:3", store=store, state=True)
    return folder


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_state_becomes_the_folder_again(
    trained: Path, store: LocalStore, tmp_path: Path, is_frozen: bool
) -> None:
    if is_frozen:
        blobstore.freeze(["run:3", "run:3.state"], store=store)
    exported = export_trainer("run:3.state", tmp_path / "out", store=store)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in trained.iterdir()
    }
    for name in FILES:
        assert_same(torch.load(tmp_path / "out" / name, weights_only=False), train(3)[name])
    assert_same(
        load_file(tmp_path / "out" / "model.safetensors"), dict(train(3)["model.safetensors"])
    )
    for name in ("config.json", "trainer_state.json", "training_args.bin"):
        assert (tmp_path / "out" / name).read_bytes() == (trained / name).read_bytes()
    assert exported.files == len(list((tmp_path / "out").iterdir()))


def test_a_model_and_a_state_of_two_steps_make_no_folder(
    trained: Path, store: LocalStore, tmp_path: Path
) -> None:
    folder = write_trainer_folder(tmp_path / "checkpoint-4", steps=4)
    blobstore.create(folder, "run:4", store=store, state=True)
    blobstore.copy("run:4.state", "run:3.state", store=store, force=True)
    with pytest.raises(UsageError, match="the model 'run:3' is not that of its state"):
        export_trainer("run:3", tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()
    blobstore.create(trained, "run:3", store=store, state=True)
    export_trainer("run:3", tmp_path / "out", store=store)


def test_the_files_have_no_more_than_their_tensors(
    trained: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_trainer("run:3.state", tmp_path / "out", store=store)
    for name in FILES:
        assert (tmp_path / "out" / name).stat().st_size < (trained / name).stat().st_size * 1.1


def test_parts_whose_names_are_not_those_of_files_are_left_out(
    store: LocalStore, tmp_path: Path
) -> None:
    parts = ["rng_state/../../out", "rng_state\0", "rng_state\n", "optimizer", 7]
    state = {part: {"x": 1} for part in parts} | {"model": {"w": torch.ones(1)}}
    files = {"rng_state/x.json": b"{}"}
    blobstore.save(state, "run:1", model="model", files=files, store=store)
    export_trainer("run:1", tmp_path / "in/folder", store=store)
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("in/**/*.pt*")}
    assert found == {"in/folder/optimizer.pt"}


def test_damage_leaves_no_folder(trained: Path, store: LocalStore, tmp_path: Path) -> None:
    layers = store.resolve("run:3.state").layers_of(media_types.TENSOR)
    layer = next(one for one in layers if one.name == "optimizer.state.0.exp_avg")
    path = Path(store.blob_path(layer.digest))
    path.chmod(0o600)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BlobDamaged):
        export_trainer("run:3.state", tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()
