from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from blobstore.errors import (
    DamagedSource,
    NameTaken,
    SourceError,
    SourceNotFound,
    StoreError,
    UsageError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.create.create_all import create_all
from blobstore.operations.create.find_models import loose_files
from blobstore.operations.maintenance.retention import expired_models
from blobstore.sources.base import SourceOptions
from blobstore.store import references
from blobstore.store.local import LocalStore
from tests.support.distributed_folders import grid
from tests.support.distributed_folders import write_folder as write_pieces
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.unit.cli.running import run

COMMIT = "c" * 40


def cached(cache: Path, repository: str) -> Path:
    """Write a repository into a cache of the Hub's client."""
    storage = cache / f"models--{repository.replace('/', '--')}"
    snapshot = storage / "snapshots" / COMMIT
    write_folder(storage / "source", dense_tensors())
    for folder in (snapshot, storage / "blobs", storage / "refs"):
        folder.mkdir(parents=True)
    (storage / "refs" / "main").write_text(COMMIT)
    for path in sorted((storage / "source").iterdir()):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.rename(storage / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    return storage


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two models, one of them broken, in folders and in the folder of an organization."""
    folder = tmp_path / "models"
    write_folder(folder / "dense", dense_tensors())
    write_folder(folder / "org" / "moe", moe_tensors())
    write_folder(folder / "broken", dense_tensors())
    (folder / "broken" / "model.safetensors").write_bytes(b"cut")
    (folder / "notes").mkdir()
    (folder / "notes" / "x.txt").touch()
    return folder


def test_imports_all_models_of_a_folder_and_continues_after_a_failure(
    store: LocalStore, models: Path
) -> None:
    steps: list[str] = []
    results = create_all(models, store=store, progress=lambda what, *_: steps.append(what))
    assert [(it.name, it.source) for it in results] == [
        ("broken:latest", models / "broken"),
        ("dense:latest", models / "dense"),
        ("org/moe:latest", models / "org" / "moe"),
    ]
    assert isinstance(results[0].error, DamagedSource)
    for result in results[1:]:
        assert result.error is None
        assert result.created is not None
        assert str(result.created.reference) == result.name
    assert sorted(map(str, store.references())) == ["dense:latest", "org/moe:latest"]
    assert {step.partition(": ")[0] for step in steps} == {
        "2 of 3 models, dense:latest",
        "3 of 3 models, org/moe:latest",
    }


def test_folders_with_pieces_are_models(store: LocalStore, tmp_path: Path) -> None:
    weight = {("model", "w"): (torch.ones(2, 2), grid((2, 2)))}
    for name in ("plain", "run/step_1", "trained/pytorch_model_fsdp_0"):
        write_pieces(tmp_path / "m" / name, weight)
    results = create_all(tmp_path / "m", store=store)
    assert [(it.name, it.error) for it in results] == [
        ("plain:latest", None),
        ("run/step_1:latest", None),
        ("trained:latest", None),
    ]
    with pytest.raises(SourceError, match="has weights itself; create it, or each of its files"):
        create_all(tmp_path / "m" / "plain", store=store)


def test_names_the_models_of_a_cache_after_their_repositories(
    store: LocalStore, tmp_path: Path
) -> None:
    cache = tmp_path / "hf" / "hub"
    cached(cache, "gpt2")
    cached(cache, "Org/Name-1.5")
    (cache / "datasets--org--data" / "snapshots").mkdir(parents=True)
    (cache / ".locks" / "models--gpt2").mkdir(parents=True)
    for folder in (cache, cache.parent):
        found = {it.name: it.created for it in create_all(folder, store=store)}
        assert list(found) == ["Org/Name-1.5:latest", "gpt2:latest"]
        created = found["Org/Name-1.5:latest"]
        assert created is not None
        assert (created.repository, created.commit) == ("Org/Name-1.5", COMMIT)


def test_models_whose_names_cannot_be_used_fail(store: LocalStore, tmp_path: Path) -> None:
    for name in ("Twin", "twin", "\u6a21"):
        write_folder(tmp_path / "m" / name, dense_tensors())
    errors = {Path(it.source).name: it.error for it in create_all(tmp_path / "m", store=store)}
    assert errors["Twin"] is None
    assert isinstance(errors["twin"], NameTaken)
    assert "gives the model no name" in str(errors["\u6a21"])
    assert str(errors["\u6a21"]).endswith(" NAME'")


def test_models_have_the_names_that_create_gives_them(store: LocalStore, tmp_path: Path) -> None:
    for name in ("a b", "org.x/c (1)"):
        write_folder(tmp_path / "m" / name, dense_tensors())
    step(tmp_path / "m" / "a b", 5)
    names = ["a-b:latest", "a-b:checkpoint-5", "org-x/c-1:latest"]
    assert [it.name for it in create_all(tmp_path / "m", store=store, dry_run=True)] == names
    assert str(create(tmp_path / "m" / "a b", store=store).reference) == names[0]


def test_options_are_those_of_create(store: LocalStore, models: Path) -> None:
    results = create_all(models, store=store, quantize="none such")
    assert all(isinstance(it.error, UsageError | DamagedSource) for it in results)


def test_a_dry_run_only_lists(store: LocalStore, models: Path) -> None:
    results = create_all(models, store=store, dry_run=True)
    assert [it.name for it in results] == ["broken:latest", "dense:latest", "org/moe:latest"]
    assert all(it.created is None and it.error is None for it in results)
    assert not store.root.exists()


def test_refuses_folders_without_models_and_models(store: LocalStore, models: Path) -> None:
    with pytest.raises(SourceNotFound, match="no such folder"):
        create_all(models / "none", store=store)
    with pytest.raises(SourceError, match="has no models; expected a cache"):
        create_all(models / "notes", store=store)
    with pytest.raises(SourceError, match="has weights itself; create it, or each of its files"):
        create_all(models / "dense", store=store)
    with pytest.raises(SourceError, match="has weights itself"):
        create_all(cached(models, "a/b"), store=store)


def test_a_store_that_fails_ends_it(models: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError):
        create_all(models, store=tmp_path / "file")


def test_a_full_disk_fails_models_and_not_the_import_of_others(
    store: LocalStore, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 10)
    errors = [str(model.error) for model in create_all(models, store=store)]
    assert ["not enough space" in error for error in errors] == [False, True, True]
    assert " kB are needed, and 10 B are free" in errors[1]


def test_the_command_prints_a_table_and_its_status_tells(
    store: LocalStore, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    dry = run("create", "--all", models, "--dry-run")
    assert dry.stdout.endswith("3 models, 0 failed; nothing was written\n")
    result = run("create", "--all", models, exit_code=4)
    heading, *rows, totals = result.stdout.splitlines()
    assert heading.split() == ["NAME", "STATUS", "TENSORS", "WRITTEN", "PRESENT", "SOURCE"]
    assert [row.split()[:2] for row in rows] == [
        ["broken:latest", "failed"],
        ["dense:latest", "created"],
        ["org/moe:latest", "created"],
    ]
    assert totals.startswith("3 models, 1 failed; ")
    assert "blobstore: error: broken:latest: " in result.stderr
    found = json.loads(run("create", "--all", models, "--json", exit_code=4).stdout)
    assert [it["error"] and it["error"]["kind"] for it in found["models"]] == [
        "DamagedSource",
        None,
        None,
    ]
    assert found["models"][1]["bytes_written"] == 0
    run("create", "--all", models, "name", exit_code=2)

    # A prefix takes the place of each namespace.
    run("create", "--all", models, "--as", "lab", exit_code=4)
    assert run("list", "lab/*", "-q").stdout.split() == ["lab/dense:latest", "lab/moe:latest"]
    error = run("create", models / "dense", "--as", "lab", exit_code=2).stderr
    assert "--as is for --all; give one model a NAME" in error


@pytest.mark.slow
def test_importing_a_model_reads_no_manifest_of_another(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(6):
        cached(tmp_path / "hub", f"org/model{number}")
    monkeypatch.setattr(references, "_MARGIN_NS", -(10**12))
    parsed: list[str] = []
    parse = LocalStore.parse

    def noted(self: LocalStore, reference: str | Reference) -> tuple[bytes, Manifest]:
        parsed.append(str(reference))
        return parse(self, reference)

    monkeypatch.setattr(LocalStore, "parse", noted)
    results = create_all(tmp_path / "hub", store=store)

    assert [result.error for result in results] == [None] * 6
    assert parsed == []
    again = create(tmp_path / "hub" / "models--org--model3", "again", store=store)
    assert again.notices == ("org/model3:latest was imported from the same commit of org/model3",)
    assert parsed == ["org/model3:latest"], "the file of references says which models have the blob"


def test_weights_next_to_folders_of_models_are_left_out(models: Path, tmp_path: Path) -> None:
    for name in ("loose.safetensors", "model.pth"):
        (models / name).write_bytes(b"x")
    found = create_all(models, store=tmp_path / "store", dry_run=True)
    assert [model.name for model in found] == ["broken:latest", "dense:latest", "org/moe:latest"]
    assert loose_files(models) == ["loose.safetensors", "model.pth"]
    assert loose_files(models / "dense") == []


@pytest.mark.parametrize(
    "name", ["config.json", "adapter_config.json", "model.safetensors.index.json"]
)
def test_a_model_with_checkpoints_in_folders_stays_one_model(models: Path, name: str) -> None:
    (models / "model.safetensors").write_bytes(b"x")
    (models / name).write_text("{}")
    assert loose_files(models) == []
    with pytest.raises(SourceError, match="has weights itself"):
        create_all(models, dry_run=True)


def step(folder: Path, number: int) -> None:
    values = {"w": np.full(9, number, np.float32)}
    write_folder(folder / f"checkpoint-{number}", values)
    (folder / f"checkpoint-{number}" / "optimizer.pt").write_bytes(b"")


@pytest.mark.parametrize("has_final", [False, True])
def test_steps_of_a_run_are_tags_of_one_name_in_their_order(
    store: LocalStore, tmp_path: Path, has_final: bool
) -> None:
    for number in (500, 1000, 1500):
        step(tmp_path / "runs" / "out", number)
    if has_final:  # what the Trainer saves at the end
        write_folder(tmp_path / "runs" / "out", dense_tensors())
    final = ["out:latest"] * has_final
    steps = [f"out:checkpoint-{number}" for number in (500, 1000, 1500)]

    made = create_all(tmp_path / "runs" / "out", store=store)

    assert [(it.name, it.error) for it in made] == [(name, None) for name in (*final, *steps)]
    removed = expired_models(steps, keep_last=1, store=store)
    assert [str(name) for name in removed] == steps[:2]
    listed = create_all(tmp_path / "runs", store=store, dry_run=True)
    assert [it.name for it in listed] == [*final, *steps]


def test_the_model_of_a_run_has_nothing_of_its_steps(store: LocalStore, tmp_path: Path) -> None:
    out = write_folder(tmp_path / "out", dense_tensors())
    step(out, 1)
    alone = create(out, store=tmp_path / "alone")
    last, _ = create_all(out, store=tmp_path / "all")
    assert last.created is not None
    assert last.created.digest == alone.digest
    for name in ("optimizer.pt", "checkpoint-1/optimizer.pt"):
        (out / name).write_bytes(b"state of " + name.encode())
    keep = SourceOptions(keep=("*.pt",))

    made = create_all(out, store=store, source_options=keep)

    assert [it.created and it.created.notices for it in made] == [(), ()]
    for name in ("out", "out:checkpoint-1"):
        names = {layer.name for layer in store.resolve(Reference.parse(name)).layers}
        assert "optimizer.pt" in names
        assert "checkpoint-1/optimizer.pt" not in names


def test_a_name_is_that_of_what_lies_in_the_folder_itself(
    store: LocalStore, tmp_path: Path
) -> None:
    for number in (1, 2):
        step(tmp_path / "out", number)
    write_folder(tmp_path / "out" / "other", dense_tensors())

    made = create_all(tmp_path / "out", "team/run", store=store)

    names = ["team/run:checkpoint-1", "team/run:checkpoint-2", "other:latest"]
    assert [(it.name, it.error) for it in made] == [(name, None) for name in names]
    with pytest.raises(UsageError, match="'run:x' has a tag"):
        create_all(tmp_path / "out", "run:x", store=store)
    with pytest.raises(UsageError, match="have names of their own; leave NAME out"):
        create_all(tmp_path, "run", store=store)
