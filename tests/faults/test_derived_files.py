"""What a store derives from its blobs and manifests may be damaged or lost: nothing changes, and nothing must be repaired."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import blobstore
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.describe.list import list_models
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.store import references, verified_cache
from blobstore.store.local import LocalStore
from tests.support.archives import FAMILY, put_family


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """A store with a model that is frozen as a delta against another one, and all derived files."""
    store = LocalStore(tmp_path / "store")
    for module in (references, verified_cache):  # young files are noted too
        monkeypatch.setattr(module, "_MARGIN_NS", -(10**12))
    put_family(store)
    freeze_models(["tuned"], store=store, base="base")
    verify_models(store=store)
    looks_of(store)
    return store


def looks_of(store: LocalStore) -> object:
    """Return all that commands derive from a store."""
    usage = measure_usage(store=store)
    listed = [(one.reference, one.digest, one.size) for one in list_models(store=store)]
    tensors = {}
    for name in FAMILY:
        with blobstore.open(name, store=store) as model:
            tensors[name] = {key: value.tobytes() for key, value in model.items()}
    garbage = collect_garbage(store=store, older_than=0, dry_run=True)
    return listed, tensors, usage.referenced, usage.bases, garbage.blobs


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda _: None,
    "cut": lambda data: data[: len(data) // 2],
    "noise": lambda data: random.Random(5).randbytes(len(data)),
    "start": lambda data: bytes([data[0] ^ 1]) + data[1:],
    "middle": lambda data: b"".join(
        (data[: len(data) // 2], bytes([data[len(data) // 2] ^ 1]), data[len(data) // 2 + 1 :])
    ),
}
FILES = ("headers/*", "cold-index", "verified-*", "references-*")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("files", FILES)
def test_a_damaged_derived_file_changes_nothing(store: LocalStore, files: str, damage: str) -> None:
    expected = looks_of(store)
    damaged = list((store.root / ".blobstore").glob(files))
    assert damaged
    for path in damaged:
        changed = DAMAGES[damage](path.read_bytes())
        path.unlink()
        if changed is not None:
            path.write_bytes(changed)
    assert looks_of(store) == expected
    assert not verify_models(store=store).faults
    repaired = repair_models(store=store)
    assert (repaired.repaired, repaired.faults) == ((), ())
    assert not collect_garbage(store=store, older_than=0).blobs
    assert looks_of(store) == expected


def test_repair_makes_the_second_links_of_bases_again(store: LocalStore) -> None:
    links = {path.name for path in store.folder("bases").iterdir()}
    assert links
    shutil.rmtree(store.folder("bases"))
    repair_models(store=store, dry_run=True)
    assert not store.folder("bases").exists()
    repair_models(store=store)
    made = set(store.folder("bases").iterdir())
    assert {path.name for path in made} == links
    assert all(path.samefile(store.folder("blobs") / path.name) for path in made)
