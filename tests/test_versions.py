"""Stores of other versions: those that the first version with a promise wrote, and that version with today's."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store.local import LocalStore
from tests.support.ladders import coded_blob, source, weight_blob
from tests.support.models import add_blobs

ROOT = Path(__file__).parents[1]
FIRST = "22d2f592"
"""The first commit that had docs/reference/compatibility.md."""
STORE = ROOT / "tests" / "data" / "stores" / "first.tar.xz"
"""A store that it wrote: plain models, experts, int4, a delta, and GGUF that follows from weights in safetensors."""
IDS = {
    "base:latest": "384ed96150bf",
    "bf16:latest": "b30679be9a60",
    "dense:latest": "5a8f0cd42be8",
    "experts:latest": "16b63c72d131",
    "gguf:latest": "c13b5f180422",
    "int4:latest": "84755bc11831",
    "q8:latest": "0453244dbb8b",
    "tune:latest": "eb594b116279",
}
EXPORTED = {
    "base": "faeb469e5d21",
    "dense": "7f5833e9216f",
    "experts": "de0e78a45359",
    "gguf": "9b111ef28198",
    "int4": "6ad382f3ebc1",
    "tune": "9f52973a342e",
}
PROGRAM = (
    "import sys; from blobstore.cli.main import main; sys.argv[0] = 'blobstore'; sys.exit(main())"
)


@pytest.fixture
def old_store(tmp_path: Path) -> LocalStore:
    with tarfile.open(STORE) as archive:
        archive.extractall(tmp_path / "store", filter="data")
    return LocalStore(tmp_path / "store")


def ids(store: LocalStore) -> dict[str, str]:
    return {str(name): Digest.of(store.read_manifest(name)).short for name in store.references()}


def test_the_oldest_store_is_read_as_it_was_written(old_store: LocalStore, tmp_path: Path) -> None:
    assert ids(old_store) == IDS
    assert verify_models(store=old_store).ok
    for name, digest in EXPORTED.items():
        target = tmp_path / name
        blobstore.export(name, target, store=old_store)
        (weights,) = (path for path in target.iterdir() if path.suffix != ".json")
        assert hashlib.sha256(weights.read_bytes()).hexdigest()[:12] == digest


def test_the_oldest_store_is_changed_like_any_other(old_store: LocalStore) -> None:
    remove_models(["dense"], store=old_store)
    removed = collect_garbage(store=old_store, older_than=0.0)
    thaw_models(list(old_store.references()), store=old_store)

    assert len(removed.blobs) == 11
    assert old_store.cold_files() == {}
    assert verify_models(store=old_store).ok
    assert ids(old_store) == {name: ID for name, ID in IDS.items() if name != "dense:latest"}


def has_first() -> bool:
    """Return whether git has the first version: not in an sdist, nor in a clone of the last commits."""
    known = ["git", "-C", str(ROOT), "cat-file", "-e", FIRST]
    if shutil.which("git") is None:
        return False
    return not subprocess.run(known, check=False, stderr=subprocess.DEVNULL).returncode


if has_first():

    def test_the_oldest_program_reads_what_it_can_of_a_store_of_today(tmp_path: Path) -> None:
        files = ["git", "-C", str(ROOT), "archive", FIRST, "-o", f"{tmp_path}/program.tar"]
        subprocess.run([*files, "blobstore", "cli", "manifests"], check=True)
        with tarfile.open(tmp_path / "program.tar") as archive:
            archive.extractall(tmp_path / "program", filter="data")
        store = LocalStore(tmp_path / "store")
        matrix = source(1)
        add_blobs(store, "bf16", {"w": weight_blob("w", matrix)})
        add_blobs(store, "q4", {"w": coded_blob("w", "Q4_K", matrix)})
        add_blobs(store, "plain", {"w": weight_blob("w", source(2))})
        blobstore.freeze(["bf16", "q4"], store=store)

        def first(*words: str) -> tuple[int, str]:
            """Run a command of the first version."""
            done = subprocess.run(
                [sys.executable, "-P", "-c", PROGRAM, "--store", str(store.root), *words],
                env={**os.environ, "PYTHONPATH": str(tmp_path / "program"), "NO_COLOR": "1"},
                capture_output=True,
                check=False,
                text=True,
            )
            return done.returncode, done.stdout + done.stderr

        assert all(
            name in first("list")[1] for name in ("bf16:latest", "plain:latest", "q4:latest")
        )
        code, said = first("verify")
        assert (code, said.count(" is damaged: ")) == (4, 1)
        assert "model q4:latest" in said
        assert "a newer program may know them" in said
        thaw_models(["q4"], store=store)
        assert first("verify")[0] == 0
        # That version knows no second links of names, so a name that it removes seems lost.
        assert first("rm", "plain")[0] == 0
        assert [fault.reference for fault in verify_models(store=store).faults] == ["plain:latest"]
        remove_models(["plain"], store=store)
        assert verify_models(store=store).ok
