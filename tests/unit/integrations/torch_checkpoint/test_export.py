from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, load
from torch.distributed.checkpoint.state_dict_saver import save

import blobstore
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.integrations.torch_checkpoint import StoreWriter, export_checkpoint
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json
from tests.unit.integrations.torch_checkpoint.test_writer import assert_equal, emptied, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
FILES = {"config.json": {"model_type": "toy"}}


@pytest.fixture
def step(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store with a step that has a model, moments and other values."""
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    writer = StoreWriter(store, model="model", files=FILES)
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


def test_a_model_without_a_state_is_exported_with_its_files(
    step: LocalStore, tmp_path: Path
) -> None:
    exported = run_json("export", "run:1", tmp_path / "out", "--layout", "dcp")
    assert exported["tensors"] == len(state()["model"])
    assert_equal(
        dict(sorted(read(tmp_path / "out").items())), dict(sorted(state()["model"].items()))
    )
    assert (tmp_path / "out" / "config.json").read_bytes() == blobstore.open(
        "run:1", store=step
    ).read_file("config.json")


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
