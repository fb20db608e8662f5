from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.support.frozen import flip, forms_of, layer, layers, put, weights
from tests.unit.cli.running import run, run_json


@pytest.fixture
def frozen(store: LocalStore) -> LocalStore:
    """A store with the frozen model ``a``."""
    put(store, "a", {"x": 1, "y": 2})
    run("freeze", "a")
    return store


def test_reports_the_thawed_blobs(frozen: LocalStore) -> None:
    result = run("thaw", "a")
    assert result.stderr == ""
    assert result.stdout.startswith("thawed 2 blobs of 1 model: 10")
    assert " decompressed to 160 kB; " in result.stdout
    assert forms_of(frozen, "a") == {"x": "hot", "y": "hot"}
    assert run("thaw", "a").stdout.startswith("thawed 0 blobs of 1 model: nothing to do; ")


def test_json_has_exact_numbers(frozen: LocalStore) -> None:
    stored = sum(path.stat().st_size for path in frozen.folder("cold").iterdir())
    found = run_json("thaw", "a", "--keep-cold")
    assert found.pop("seconds") >= 0
    size = 2 * len(layer("x", weights(1)))
    assert found == {
        "names": ["a:latest"],
        "blobs": 2,
        "bytes": size,
        "stored_bytes": stored,
        "faults": [],
    }
    assert forms_of(frozen, "a") == {"x": "both", "y": "both"}


def test_damage_is_reported_with_exit_code_4(frozen: LocalStore) -> None:
    flip(frozen.cold_path(layers(frozen, "a")["x"].digest), 500)
    result = run("thaw", "a", exit_code=4)
    assert result.stdout.startswith("thawed 1 blob of 1 model")
    assert "blobstore: error: layer 'x': cold blob" in result.stderr


def test_requires_names_of_models(frozen: LocalStore) -> None:
    assert "missing argument 'NAME...'" in run("thaw", exit_code=2).stderr
    assert "no model 'b:latest'" in run("thaw", "b", exit_code=3).stderr


def test_link_requires_thawed_blobs(frozen: LocalStore, tmp_path: Path) -> None:
    result = run("link", "a", tmp_path / "links", exit_code=1)
    assert (
        "model a:latest: it is frozen, but links need uncompressed blobs; 'blobstore thaw a:latest', or link "
        "with --thaw, decompresses them" in result.stderr
    )
    assert '"blobstore thaw"' in run("link", "--help").stdout
    assert not (tmp_path / "links").exists()
    run("link", "a", tmp_path / "links", "--thaw")
    assert forms_of(frozen, "a") == {"x": "hot", "y": "hot"}
    assert all(path.exists() for path in (tmp_path / "links").iterdir())


def test_link_reports_blobs_that_cannot_be_thawed(frozen: LocalStore, tmp_path: Path) -> None:
    flip(frozen.cold_path(layers(frozen, "a")["x"].digest), 500)
    assert "layer 'x'" in run("link", "a", tmp_path / "links", "--thaw", exit_code=4).stderr
    assert not (tmp_path / "links").exists()


def test_repairs_a_frozen_model(frozen: LocalStore, tmp_path: Path) -> None:
    digest = layers(frozen, "a")["x"].digest
    run("thaw", "a", "--keep-cold")
    run("export", "a", tmp_path / "source")
    Path(frozen.blob_path(digest)).unlink()
    flip(frozen.cold_path(digest), 30_000)
    run("repair", "a", exit_code=4)
    run("repair", "a", "--from", tmp_path / "source", "--dry-run")
    assert forms_of(frozen, "a") == {"x": "cold", "y": "both"}
    run("repair", "a", "--from", tmp_path / "source")
    assert forms_of(frozen, "a") == {"x": "hot", "y": "both"}
    assert [path.name[:71] for path in frozen.folder("quarantine").iterdir()] == [digest.file_name]
    run("verify")


def test_repair_quarantines_a_damaged_cold_blob_that_the_source_lacks(
    frozen: LocalStore, tmp_path: Path
) -> None:
    run("thaw", "a", "--keep-cold")
    (tmp_path / "other" / "blobs").mkdir(parents=True)
    (tmp_path / "other" / "manifests").mkdir()
    flip(frozen.cold_path(layers(frozen, "a")["x"].digest), 30_000)
    run("repair", "a", "--from", tmp_path / "other")
    assert forms_of(frozen, "a") == {"x": "hot", "y": "both"}
    run("verify")


def test_repairs_a_damaged_file_from_its_cold_form(frozen: LocalStore, tmp_path: Path) -> None:
    run("thaw", "a", "--keep-cold")
    (tmp_path / "other" / "blobs").mkdir(parents=True)
    (tmp_path / "other" / "manifests").mkdir()
    path = frozen.blob_path(layers(frozen, "a")["x"].digest)
    flip(path)
    run("repair", "a", "--from", tmp_path / "other")
    assert Path(path).read_bytes() == layer("x", weights(1))
    assert forms_of(frozen, "a") == {"x": "both", "y": "both"}
