from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.errors import ModelNotFound, RemoteError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.transfer.push import push_model
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.signatures.cosign import write_signature
from blobstore.store.local import LocalStore
from tests.support.damage import flip, forget_manifests
from tests.support.models import dense_tensors, write_folder
from tests.support.serve_process import serving
from tests.support.stub_registry import StubRegistry

NAMES = ("a", "b")


def filled(folder: Path) -> LocalStore:
    """Return a store with two models, which share most blobs."""
    store = LocalStore(folder)
    for name in NAMES:
        put(store, name)
    return store


def put(store: LocalStore, name: str) -> None:
    tensors = dense_tensors() | {"own": np.full(9, ord(name[0]), np.float32)}
    create(write_folder(store.root.parent / name, tensors), name, store=store)


def own_blob(store: LocalStore, name: str) -> Digest:
    (layer,) = (layer for layer in store.resolve(name).layers if layer.name == "own")
    return layer.digest


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return filled(tmp_path / "store")


@contextlib.contextmanager
def elsewhere(kind: str, folder: Path) -> Iterator[str]:
    """Give the models of :func:`filled` to a remote, and yield the start of their addresses."""
    other = filled(folder / "other")
    if kind == "objects":
        for name in NAMES:
            push_model(name, f"file://{folder}/bucket", store=other)
        yield f"file://{folder}/bucket"
    elif kind == "registry":
        with StubRegistry() as registry:
            for name in NAMES:
                registry.put(
                    other, plan_ollama(other.read_manifest(name)), f"team/{name}", "latest"
                )
            yield f"oci://{registry.host}/team"
    else:
        with serving(other, folder) as server:
            yield server.url


@pytest.mark.parametrize("kind", ["objects", "registry", "server"])
def test_damage_is_repaired_from_an_address(kind: str, store: LocalStore, tmp_path: Path) -> None:
    blob = own_blob(store, "a")
    with elsewhere(kind, tmp_path) as start:
        flip(Path(store.blob_path(blob)))
        dry = repair_models(["a"], f"{start}/a", store=store, dry_run=True)
        assert ([item.digest for item in dry.repaired], dry.faults) == ([blob], ())
        assert verify_models(store=store).faults
        done = repair_models(["a"], f"{start}/a", store=store)
        assert ([item.digest for item in done.repaired], done.faults) == ([blob], ())

        store.manifest_path(Reference.parse("a")).unlink()
        Path(store.blob_path(blob)).unlink()
        done = repair_models(["a"], f"{start}/a", store=store)
        assert [str(item.reference) for item in done.restored] == ["a:latest"]
        assert ([item.digest for item in done.repaired], done.faults) == ([blob], ())

        if kind != "registry":  # whose models have a namespace
            forget_manifests(store, "b")
            done = repair_models(["b"], start, store=store)
            assert [str(item.reference) for item in done.restored] == ["b:latest"]
    assert not verify_models(store=store).faults


def test_a_store_without_manifests_is_restored_from_all_models_of_a_remote(
    store: LocalStore, tmp_path: Path
) -> None:
    forget_manifests(store)
    shutil.rmtree(store.folder("manifests"))
    with elsewhere("objects", tmp_path) as place:
        dry = repair_models((), place, store=store, dry_run=True)
        assert (len(dry.restored), dry.faults, list(store.references())) == (2, (), [])
        assert len(repair_models((), None, store=store).faults) == 1
        done = repair_models((), place, store=store)
    assert [str(item.reference) for item in done.restored] == ["a:latest", "b:latest"]
    assert (done.verified.models, done.faults) == (2, ())


@pytest.mark.parametrize("kind", ["objects", "store"])
def test_a_manifest_comes_with_its_signatures(kind: str, store: LocalStore, tmp_path: Path) -> None:
    digest = Digest.of(store.read_manifest("a"))
    signature = write_signature(b"what is signed", b"by nobody")
    forget_manifests(store, "a")
    with elsewhere("objects", tmp_path) as bucket:
        other = LocalStore(tmp_path / "other")
        other.keep_signature(digest, signature, is_verified=True)
        push_model("a", bucket, store=other)
        place = f"{bucket}/a" if kind == "objects" else other.root
        assert repair_models(["a"], place, store=store, dry_run=True).restored[0].signatures == 0
        (restored,) = repair_models(["a"], place, store=store).restored
    assert restored.signatures == 1
    assert list(store.signatures(digest)) == [signature]


def test_only_names_that_were_lost_come_back_by_themselves(
    store: LocalStore, tmp_path: Path
) -> None:
    other = filled(tmp_path / "other")
    put(other, "never")
    remove_models(["a"], store=store)
    forget_manifests(store, "b")
    done = repair_models((), other.root, store=store)
    assert [str(item.reference) for item in done.restored] == ["b:latest"]
    done = repair_models(["a"], other.root, store=store)
    assert [str(item.reference) for item in done.restored] == ["a:latest"]
    assert done.faults == ()
    with pytest.raises(
        ModelNotFound, match="if the store knows the name or has the blobs; pull it"
    ):
        repair_models(["never"], other.root, store=store)


def test_a_missing_manifest_that_would_be_restored_is_no_error_of_a_dry_run(
    store: LocalStore, tmp_path: Path
) -> None:
    other = filled(tmp_path / "other")
    forget_manifests(store, "a")
    done = repair_models(["a"], other.root, store=store, dry_run=True)
    assert ([item.reference for item in done.restored], done.faults) == ([Reference.parse("a")], ())
    assert not store.has_model("a")
    with pytest.raises(ModelNotFound, match="has a model of this name can restore"):
        repair_models(["c"], other.root, store=store)


def test_a_damaged_manifest_at_a_remote_is_not_used(store: LocalStore, tmp_path: Path) -> None:
    other = filled(tmp_path / "other")
    forget_manifests(store, "a")
    path = other.manifest_path("a")
    path.write_bytes(path.read_bytes().replace(b'"own"', b'"won"'))
    with pytest.raises(ModelNotFound):
        repair_models(["a"], other.root, store=store)
    assert not store.has_model("a")


def test_a_remote_that_cannot_be_reached_is_an_error(store: LocalStore) -> None:
    with pytest.raises(RemoteError):
        repair_models((), "oci://127.0.0.1:9/team/a:latest", store=store)
