"""Steps that one, two and four ranks save are one model, and equal to what an import makes of torch's own folders."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import blobstore
from blobstore.manifests import media_types
from blobstore.manifests.step_record import METRICS_FILE
from blobstore.operations.maintenance.verify import verify_models
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.real.training_steps import CONFIG, METRICS, RANKS, STEP, WORLDS
from tests.support.clients import run_python
from tests.support.once import made_once

STATE = f"{STEP}.state"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of stores, one for each number of ranks; the program checks what it loads from them."""

    def save(folder: Path) -> None:
        command = (sys.executable, "-m", "tests.real.training_steps", folder)
        ran = run_python(command, os.environ)
        assert ran.code == 0, ran.stderr[-5000:]

    return made_once(tmp_path_factory, "steps", save)


def blobs(store: Path | LocalStore, name: str) -> dict[str, str]:
    """Return the digests of the tensors of a model by name."""
    layers = LocalStore.of(store).resolve(name).layers_of(media_types.TENSOR)
    return {layer.name: layer.digest.hex for layer in layers}


def test_any_number_of_ranks_saves_the_same_models(saved: Path) -> None:
    stores = [LocalStore(saved / str(world)) for world in WORLDS]
    for name in (STEP, STATE):
        assert len({store.read_manifest(name) for store in stores}) == 1
    for store in stores:
        assert verify_models(store=store).faults == ()


def test_object_storage_has_the_same_models(saved: Path, tmp_path: Path) -> None:
    for name in (STEP, STATE):
        blobstore.pull(f"file://{saved}/bucket/{name}", name, store=tmp_path)
        expected = LocalStore(saved / "4").read_manifest(name)
        assert LocalStore(tmp_path).read_manifest(name) == expected
    assert verify_models(store=tmp_path).faults == ()


def test_the_model_has_no_bytes_of_its_own_besides_the_state(saved: Path) -> None:
    store = saved / "2"
    assert blobs(store, STEP).items() < blobs(store, STATE).items()
    model = blobstore.open(STEP, store=store)
    assert model.config == CONFIG
    assert json.loads(model.read_file(METRICS_FILE)) == METRICS
    assert "optimizer.state.rows.exp_avg" in blobs(store, STATE)


def test_a_step_that_is_saved_again_adds_nothing(saved: Path) -> None:
    store = LocalStore(saved / "2")
    assert store.read_manifest(STEP) == store.read_manifest("run:step-2")


def test_an_import_of_the_folder_of_torch_has_the_same_blobs(saved: Path, tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    blobstore.create(saved / "dcp", "model", store=store)
    assert blobs(store, "model") == blobs(saved / "4", STEP)
    all_of_it = SourceOptions(subtree=".")
    blobstore.create(saved / "dcp", "all", store=store, source_options=all_of_it)
    # Without a model, names are those of torch: the step was saved so after one that failed.
    assert blobs(store, "all") == blobs(saved / "4", "run:after")


def test_an_import_of_an_exported_folder_has_the_same_blobs(saved: Path, tmp_path: Path) -> None:
    blobstore.export(STEP, tmp_path / "exported", store=saved / "4")
    blobstore.create(tmp_path / "exported", "model", store=tmp_path / "store")
    assert blobs(tmp_path / "store", "model") == blobs(saved / "4", STEP)


@pytest.mark.parametrize("name", ["fsdp", "parallel"])
def test_sharded_training_saves_the_model_of_its_folder(
    saved: Path, tmp_path: Path, name: str
) -> None:
    blobstore.create(saved / name, name, store=tmp_path)
    assert blobs(tmp_path, name) == blobs(saved / "trained", f"{name}:1")


def test_parts_that_do_not_travel_give_the_same_models(saved: Path) -> None:
    one, new = LocalStore(saved / "one"), LocalStore(saved / "new")
    names = list(new.references())
    assert len(names) == 2 * 10
    for name in names:
        assert one.read_manifest(name) == new.read_manifest(name)


def test_a_rank_that_fails_leaves_no_step_and_no_files(saved: Path) -> None:
    store = LocalStore(saved / str(RANKS))
    names = {str(reference) for reference in store.references()}
    asynchronous = {f"run:step-{step}{end}" for step in (2, 3) for end in ("", ".state")}
    assert names == {STEP, STATE, "run:after"} | asynchronous
    assert list(store.folder("temporary").iterdir()) == []
    assert store.read_leases().held == {}
