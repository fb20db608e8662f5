from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.operations.archive.unpack import check_archive
from blobstore.store.local import LocalStore
from tests.readers.archives import read_archive
from tests.support.archives import put_family
from tests.support.frozen import flip, layers, spoil_deltas
from tests.support.signing import key_files
from tests.unit.cli.running import run, run_json


@pytest.fixture
def family(store: LocalStore) -> LocalStore:
    put_family(store)
    return store


def test_reports_what_was_packed(family: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "family.bsar"
    result = run("pack", "base", "tuned", path)
    assert result.stderr == ""
    assert result.stdout.startswith(f"packed 2 models into {path}: 8 blobs of 141 kB take ")
    assert "% less); " in result.stdout
    assert len(check_archive(path).references) == 2


@pytest.mark.slow
def test_prints_json_with_exact_numbers(family: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "family.bsar"
    found = run_json("pack", "tuned", "base", path, "--level", "small", "-j", "1")
    assert found.pop("seconds") >= 0
    assert found == {
        "file": str(path),
        "names": ["base:latest", "tuned:latest"],
        "blobs": 8,
        "deltas": 3,
        "bytes": check_archive(path).size,
        "stored_bytes": path.stat().st_size,
        "fallbacks": 0,
        "signatures": 0,
        "notices": [],
    }


def test_reports_deltas_that_could_not_be_verified(
    family: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_deltas(monkeypatch)
    result = run("pack", "base", "tuned", tmp_path / "family.bsar")
    assert result.stdout.splitlines()[1:] == [
        "  3 blobs compressed without a base: the delta could not be verified"
    ]


def test_force_replaces_an_existing_file(family: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "family.bsar"
    path.write_bytes(b"mine")
    result = run("pack", "base", path, exit_code=1)
    assert "exists already; replace it with --force" in result.stderr
    assert path.read_bytes() == b"mine"
    run("pack", "base", path, "--force")
    check_archive(path)


def test_the_last_argument_is_the_file(family: LocalStore, tmp_path: Path) -> None:
    result = run("pack", "base", "tuned", exit_code=2)
    assert "must be a file that ends in .bsar, got 'tuned'" in result.stderr
    run("pack", tmp_path / "x.bsar", exit_code=2)


def test_exits_with_4_if_a_model_is_damaged(family: LocalStore, tmp_path: Path) -> None:
    flip(family.blob_path(layers(family, "tuned")["l1"].digest))
    result = run("pack", "tuned", tmp_path / "x.bsar", exit_code=4)
    assert "blobstore: error: tuned:latest: layer 'l1': blob" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]


def test_says_which_argument_is_missing(family: LocalStore) -> None:
    error = run("pack", "base", exit_code=2).stderr
    assert "the last argument must be a file that ends in .bsar, got 'base'" in error
    assert "missing argument 'NAME...'" in run("pack", "x.bsar", exit_code=2).stderr


def test_signatures_travel_with_the_models(family: LocalStore, tmp_path: Path) -> None:
    key, path = key_files(tmp_path), tmp_path / "family.bsar"
    run("sign", "base", "--key", key.private)
    run("cp", "base", "same")  # two names of one manifest
    packed = run("pack", "base", "same", "tuned", path)
    assert ", 2 signatures; " in packed.stdout
    assert packed.stderr == ""
    read = read_archive(path.read_bytes())
    digest = Digest.of(family.read_manifest("base"))
    assert set(read.signatures.values()) == {digest.hex}

    other = LocalStore(tmp_path / "other")
    assert run_json("unpack", path, "--store", other.root)["signatures"] == 2
    assert set(other.signatures(digest)) == set(family.signatures(digest))
    # An archive proves nothing: nobody has verified them.
    assert not any(one.is_verified for one in other.kept_signatures(digest))


def test_says_which_signatures_stay(family: LocalStore, tmp_path: Path) -> None:
    run("sign", "base", "--key", key_files(tmp_path).private)
    folder = family.signature_folder(Digest.of(family.read_manifest("base")))
    path = tmp_path / "family.bsar"
    note = run("pack", "base", path, "--no-signatures").stderr
    assert note == f"note: base:latest: the archive lacks signatures (2) of '{folder}'\n"
    assert read_archive(path.read_bytes()).signatures == {}
    damaged = next(folder.iterdir())
    damaged.chmod(0o644)
    damaged.write_bytes(b"x")
    shown = run("pack", "base", path, "--force")
    assert (
        f"note: base:latest: the archive lacks signatures (damaged: 1) of '{folder}'"
        in shown.stderr
    )
    assert ", 1 signature; " in shown.stdout


@pytest.mark.parametrize("is_checked", [True, False])
def test_an_altered_signature_stops_all(
    family: LocalStore, tmp_path: Path, is_checked: bool
) -> None:
    run("sign", "base", "--key", key_files(tmp_path).private)
    path = tmp_path / "family.bsar"
    run("pack", "base", path)
    data = path.read_bytes()
    signature = next(family.signatures(Digest.of(family.read_manifest("base"))))
    path.write_bytes(data.replace(signature, signature[:-1] + b" "))
    other = tmp_path / "other"
    error = run("unpack", path, "--store", other, *["--verify-only"] * is_checked, exit_code=4)
    assert "signature sha256:" in error.stderr
    assert "is altered" in error.stderr
    assert not LocalStore(other).has_model("base")
