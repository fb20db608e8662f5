from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, ModelNotFound, NameTaken, NotFound, UnsupportedSource
from blobstore.manifests.lock_file import LockedModel, format_lock, parse_lock
from blobstore.manifests.model import MAX_MANIFEST_SIZE
from blobstore.operations.maintenance.names import copy_model
from blobstore.operations.sign.sign import sign_model
from blobstore.operations.transfer.many import push_models
from blobstore.operations.transfer.pull import pull_model
from blobstore.operations.transfer.push import push_model
from blobstore.operations.transfer.sync import lock_models, sync_models
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.models import add_blobs
from tests.support.registry import Server
from tests.support.signing import key_files, policy


@pytest.fixture
def local(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "local")
    frozen.put(store, "one", {"own": 1})
    return store


@pytest.fixture
def bucket(local: LocalStore, tmp_path: Path) -> str:
    address = f"file://{tmp_path}/bucket"
    push_model("one", address, store=local)
    return address


def states(models: list[LockedModel], store: LocalStore, **options: bool) -> list[str]:
    return [model.state for model in sync_models(models, store=store, **options)]  # type: ignore[arg-type]


def test_another_machine_gets_the_same_models(
    local: LocalStore, bucket: str, other: LocalStore
) -> None:
    locked = lock_models(["one"], remote=bucket, store=local)
    assert [model.remote for model in locked] == [f"{bucket}/one:latest"]
    locked = parse_lock(format_lock(locked), "file")
    assert states(locked, other, check=True) == ["missing"]
    assert states(locked, other) == ["fetched"]
    assert states(locked, other) == ["present"]
    assert other.read_manifest("one") == local.read_manifest("one")
    assert lock_models(["one"], store=other) == locked  # what was pulled has an origin


def test_a_lock_file_has_all_models_unless_some_are_named(
    local: LocalStore, bucket: str, other: LocalStore, tmp_path: Path
) -> None:
    file = tmp_path / "models.lock"
    copy_model("one", "two", store=local)
    assert [str(model.reference) for model in lock_models((), file, store=local)] == [
        "one:latest",
        "two:latest",
    ]
    lock_models("one", file, remote=bucket, store=local)  # replaces it
    assert [(str(model.reference), model.state) for model in sync_models(file, store=other)] == [
        ("one:latest", "fetched")
    ]
    with pytest.raises(NotFound, match="there is no lock file"):
        sync_models(tmp_path / "absent.lock", store=other)


def test_another_model_of_the_name_is_replaced_unless_that_is_not_wanted(
    local: LocalStore, bucket: str, other: LocalStore
) -> None:
    locked = lock_models(["one"], remote=bucket, store=local)
    frozen.put(other, "one", {"own": 7})
    assert states(locked, other, check=True) == ["other model"]
    (kept,) = sync_models(locked, store=other, replace_others=False)
    assert isinstance(kept.error, NameTaken)
    (done,) = sync_models(locked, store=other)
    assert (done.state, done.error) == ("replaced", None)
    assert Digest.of(other.read_manifest("one")) == locked[0].manifest


def test_a_name_that_has_moved_is_not_taken_for_the_model(
    local: LocalStore, bucket: str, other: LocalStore
) -> None:
    locked = lock_models(["one"], remote=bucket, store=local)
    frozen.put(local, "one", {"own": 8})
    with pytest.raises(BlobDamaged, match="is another model than 'one:latest'; push it first"):
        lock_models(["one"], remote=bucket, store=local)
    push_model("one", bucket, store=local)
    (result,) = sync_models(locked, store=other)
    assert "was expected" in str(result.error)
    assert not list(other.references())


def test_a_model_without_an_origin_is_locked_and_cannot_be_fetched(
    local: LocalStore, other: LocalStore, tmp_path: Path
) -> None:
    locked = lock_models(["one"], store=local)
    assert not locked[0].has_origin
    (result,) = sync_models(locked, store=other)
    assert isinstance(result.error, UnsupportedSource)
    with pytest.raises(ModelNotFound):
        lock_models(["one"], remote=f"file://{tmp_path}/empty", store=local)


def test_a_registry_is_pinned_by_digest(
    local: LocalStore, other: LocalStore, server: Server, remote: str
) -> None:
    push_model("one", f"{remote}:v1", store=local)
    pull_model(f"{remote}:v1", "one", store=local)
    locked = lock_models(["one"], store=local)
    assert locked[0].remote.startswith(f"{remote}@sha256:")
    frozen.put(local, "two", {"own": 9})
    push_model("two", f"{remote}:v1", store=local)  # the tag moves, the digest does not
    assert states(locked, other) == ["fetched"]
    assert lock_models(["one"], store=other) == locked


@pytest.mark.parametrize("is_registry", [True, False])
def test_bases_come_before_what_is_compressed_against_them(
    is_registry: bool, local: LocalStore, other: LocalStore, remote: str, tmp_path: Path
) -> None:
    place = remote if is_registry else f"file://{tmp_path}/bucket"
    add_blobs(local, "fine-tune", {"own": frozen.layer("own", frozen.tuned(5, 1))})
    push_models(["one"], place, store=local)
    push_models(["fine-tune"], place, store=local, cold=True, base="one")
    locked = lock_models(["fine-tune", "one"], remote=place, store=local)
    steps: list[str] = []

    done = sync_models(locked, store=other, progress=lambda *step: steps.append(step[0]))

    assert [(str(one.reference), one.state) for one in done] == [
        ("fine-tune:latest", "fetched"),
        ("one:latest", "fetched"),
    ]
    started = dict.fromkeys(step.partition(":")[0] for step in steps)
    assert list(started) == ["1 of 2 models, one", "2 of 2 models, fine-tune"]


@pytest.mark.parametrize("is_registry", [True, False])
def test_another_manifest_than_that_of_the_lock_file_is_an_error(
    is_registry: bool, local: LocalStore, other: LocalStore, remote: str, bucket: str
) -> None:
    push_model("one", f"{remote}:v1", store=local)
    pull_model(f"{remote}:v1", "one", store=local)
    (locked,) = lock_models(["one"], store=local)
    address = locked.remote if is_registry else f"{bucket}/one:latest"
    forged = replace(locked, remote=address, manifest=Digest.of(b"another"))
    (result,) = sync_models([forged], store=other)
    assert isinstance(result.error, BlobDamaged)
    assert f"and {forged.manifest.short} was expected" in str(result.error)


def test_a_name_whose_manifest_is_damaged_is_fetched_again(
    local: LocalStore, bucket: str, other: LocalStore
) -> None:
    locked = lock_models(["one"], remote=bucket, store=local)
    sync_models(locked, store=other)
    path = other.manifest_path(locked[0].reference)
    path.chmod(0o600)
    os.truncate(path, MAX_MANIFEST_SIZE + 1)
    assert states(locked, other, check=True) == ["missing"]
    assert states(locked, other) == ["fetched"]
    assert other.read_manifest("one") == local.read_manifest("one")


def test_signatures_come_along_and_a_notice_counts_those_that_are_not_kept(
    local: LocalStore, bucket: str, other: LocalStore, tmp_path: Path
) -> None:
    ours, theirs = (key_files(tmp_path, name) for name in ("ours", "theirs"))
    for key in (ours, theirs):
        sign_model("one", key.private, store=local)
    push_model("one", bucket, store=local)
    locked = lock_models(["one"], remote=bucket, store=local)
    policy(other, ours)
    (synced,) = sync_models(locked, store=other)
    assert len(list(other.signatures(synced.manifest))) == 2
    assert synced.notices == (
        "one:latest: signatures that came with it and are not kept: 2 (no key of the policy made them)",
    )
