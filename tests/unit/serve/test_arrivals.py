"""What is left of a fetch, and what is looked at before its first byte: with a real upstream."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.errors import NameConflict, NameTaken, RemoteError
from blobstore.http.retry import Patience
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.maintenance.verify import verify_models
from blobstore.serve import arrivals, find_upstream, import_memory
from blobstore.serve.arrivals import Arrival, lock_arrivals
from blobstore.serve.library import Library
from blobstore.serve.model_files import model_files
from blobstore.serve.pull_through import PullThrough
from blobstore.serve.refusal import as_refusal
from blobstore.serve.upstream import PATIENT, Upstream
from blobstore.sources import selection
from blobstore.sources.hub_listing import ListedFile
from blobstore.sources.versions import SourceVersions
from blobstore.store.local import LocalStore
from blobstore.store.names import NewModel
from tests.support.hub_server import HubServer, Repo
from tests.support.models import write_folder
from tests.support.serve import read_parts

NAME = "org/model"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model-00002-of-00002.safetensors"


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture
def repo(hub: HubServer, tmp_path: Path) -> Repo:
    tensors = {name: np.arange(50_000, dtype=np.float32) + ord(name) for name in "ab"}
    return hub.add(NAME, write_folder(tmp_path / "model", tensors, shards=2))


@pytest.fixture
def through(store: LocalStore, hub: HubServer, repo: Repo) -> Iterator[PullThrough]:
    del repo
    made = PullThrough(Library(store), Upstream.parse(hub.url), fresh=300)
    yield made
    made.close()


def arrive(through: PullThrough) -> Arrival:
    """Fetch the model, and return how that has ended."""
    found = through._upstreams.find(NAME, "main", "", PATIENT)
    key = NAME, found.commit
    fetches = through._fetches
    claim = through._limit.claim("@".join(key))
    arrival = Arrival(through._store, Reference.parse(NAME), NAME, found, claim, fetches)
    fetches.running[key] = arrival
    arrival.start()
    arrival.ended.wait()
    return arrival


def left(through: PullThrough) -> dict[str, int]:
    """Return the sizes of the files of arrivals."""
    folder = through._store.folder("arrivals")
    return {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def test_files_of_a_lost_upstream_stay_and_are_not_fetched_again(
    through: PullThrough, hub: HubServer, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.cut[WEIGHTS] = 1
    monkeypatch.setattr(find_upstream, "PATIENT", Patience(attempts=1))
    assert isinstance(arrive(through).error, RemoteError)
    found = left(through)
    assert found[WEIGHTS] >= 100_000
    assert not through._limit._claims
    assert sum(item.other_size for item in through._limit._broken_off()) == sum(found.values())
    before = through._fetches.fetched
    assert arrive(through).error is None
    size = sum(path.stat().st_size for path in repo.folder.iterdir())
    assert through._fetches.fetched - before == size - sum(found.values())
    assert left(through) == {}


@pytest.mark.parametrize("is_own", [True, False])
def test_a_name_that_a_fetch_gives_while_another_one_imports_is_given_again(
    through: PullThrough, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as to the same model with one more file. What the operator gives it stays."""
    assert arrive(through).error is None
    store, name = through._store, Reference.parse(NAME)
    manifest = store.resolve(name)
    other = replace(manifest, layers=manifest.layers[:-1])
    several, install = [other], store.names.install

    def install_later(*models: Any, **options: Any) -> list[bytes | None]:
        while several:
            new = several.pop()
            update = replace(store.names.seen(name), is_fetched=not is_own)
            install([NewModel(update, new.to_bytes(), new.blobs)], is_brought=False)
        return install(*models, **options)

    monkeypatch.setattr(store.names, "install", install_later)
    assert isinstance(arrive(through).error, NameTaken) == is_own
    assert store.parse(name)[1] == (other if is_own else manifest)


def test_files_of_a_wrong_upstream_do_not_stay(through: PullThrough, repo: Repo) -> None:
    repo.corrupt.add(WEIGHTS)
    assert arrive(through).error is not None
    assert left(through) == {}


def test_what_another_attempt_has_left_and_this_one_does_not_claim_is_removed(
    through: PullThrough, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo.cut[WEIGHTS] = 2
    monkeypatch.setattr(find_upstream, "PATIENT", Patience(attempts=1))
    arrive(through)
    (folder,) = through._store.folder("arrivals").iterdir()
    (folder / "deep").mkdir()
    for name in (".taken-x", "deep/former.json"):
        (folder / name).write_bytes(b"x")
    assert isinstance(arrive(through).error, RemoteError)
    assert not left(through).keys() - {path.name for path in repo.folder.iterdir()}


def test_a_name_that_the_store_cannot_give_is_refused_before_the_first_byte(
    through: PullThrough, hub: HubServer
) -> None:
    path = through._store.manifest_path("org/MODEL")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"another model")
    assert isinstance(arrive(through).error, NameConflict)
    assert hub.sent == 0
    assert not any("tree" in asked for asked in hub.requests)


def test_a_file_that_decides_is_refused_by_its_listed_size(
    through: PullThrough, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selection, "MAX_SMALL_FILE", 10)
    assert arrive(through).error is None
    asked = [path for path in hub.requests if "/resolve/" in path and path.startswith("GET")]
    assert {path.rpartition("/")[2] for path in asked} == {"config.json"}
    (origin,) = through._library.pulled.all()
    others = through._library.pulled.with_others(origin).others
    assert {INDEX, WEIGHTS} <= others.keys()


def test_a_fetch_goes_on_where_it_was_when_others_took_the_memory(
    through: PullThrough, hub: HubServer
) -> None:
    with limits.Held(limits.IMPORTS) as others:
        others.add(limits.IMPORTS.most, "others")
        error = arrive(through).error
    assert isinstance(error, limits.Crowded)
    assert as_refusal(error).status == HTTPStatus.SERVICE_UNAVAILABLE
    assert left(through).keys() == {INDEX}
    assert arrive(through).error is None
    asked = [path for path in hub.requests if path.startswith("GET")]
    assert sum(path.endswith(INDEX) for path in asked) == 1
    assert limits.IMPORTS.taken == 0


@pytest.mark.parametrize("name", [INDEX, WEIGHTS])
def test_a_process_without_open_files_does_not_take_the_model_for_a_damaged_one(
    through: PullThrough, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    open_file = SourceVersions.open

    def fail(versions: SourceVersions, path: Path) -> tuple[int, int]:
        if path.name == name:
            raise OSError(errno.EMFILE, "Too many open files")
        return open_file(versions, path)

    with monkeypatch.context() as patch:
        patch.setattr(SourceVersions, "open", fail)
        error = arrive(through).error
    assert isinstance(error, limits.Crowded)
    assert left(through)
    before = through._fetches.fetched
    assert arrive(through).error is None
    if name == WEIGHTS:
        assert through._fetches.fetched == before, "all files were there"
    manifest = through._store.resolve(NAME)
    assert not {INDEX, WEIGHTS} & {layer.name for layer in manifest.layers}


DYING = """
import os, signal, sys
from blobstore.core.digest import Digest
from blobstore.serve.arrivals import lock_arrivals
from blobstore.store.local import LocalStore
name, store = sys.argv[1], LocalStore(sys.argv[2])
whole, partial = Digest.of(name.encode()), Digest.of(name.encode() * 2)
if name == "server":
    lock_arrivals(store)
with store.writing(), store.lease() as lease:
    lease.hold([whole, partial])
    for folder, file in (
        ("blobs", whole.file_name), ("partial", f"{partial.hex}-{name}"), ("temporary", f"{lease.name}-0")
    ):
        path = store.folder(folder) / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_server_removes_what_a_killed_one_has_left_and_nobody_else(
    store: LocalStore, repo: Repo
) -> None:
    create(repo.folder, "own", store=store)
    expected = {path.name for path in store.folder("blobs").iterdir()}
    for name in ("server", "user"):
        command = [sys.executable, "-c", DYING, name, str(store.root)]
        assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    os.close(lock_arrivals(store))
    user, partial = Digest.of(b"user"), Digest.of(b"useruser")
    assert {path.name for path in store.folder("blobs").iterdir()} == {*expected, user.file_name}
    assert [path.name for path in store.folder("partial").iterdir()] == [f"{partial.hex}-user"]
    assert list(store.folder("temporary").iterdir()) == []
    assert store.read_leases() == ({}, {})
    assert not verify_models(store=store).faults


# Repositories that an import cannot take apart


@pytest.mark.parametrize("is_large", [False, True])
def test_a_model_whose_index_is_malformed_or_takes_too_much_memory_is_stored_as_it_is(
    through: PullThrough, repo: Repo, monkeypatch: pytest.MonkeyPatch, is_large: bool
) -> None:
    if is_large:
        monkeypatch.setattr(limits, "IMPORT", 1000)
    else:
        (repo.folder / INDEX).write_bytes(b"{")
    assert arrive(through).error is None
    files = model_files(through._store, through._store.resolve(NAME))
    assert files.keys() == {"config.json"}
    (origin,) = through._library.pulled.all()
    assert WEIGHTS in through._library.pulled.with_others(origin).others


def test_weights_in_too_many_blobs_are_stored_as_they_are(
    through: PullThrough, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_memory, "_PER_BLOB", limits.IMPORT)
    assert arrive(through).error is None
    files = model_files(through._store, through._store.resolve(NAME))
    assert files.keys() == {path.name for path in repo.folder.iterdir()}
    assert not through._store.resolve(NAME).layers_of(media_types.TENSOR)
    assert limits.IMPORTS.taken == 0


def test_files_that_an_import_fails_at_are_stored_as_they_are(
    through: PullThrough, repo: Repo
) -> None:
    (repo.folder / WEIGHTS).write_bytes(b"no safetensors" * 100)
    assert arrive(through).error is None
    files = model_files(through._store, through._store.resolve(NAME))
    assert files.keys() == {path.name for path in repo.folder.iterdir()}
    assert read_parts(through._store, files[WEIGHTS].parts) == b"no safetensors" * 100
    assert not verify_models(store=through._store).faults


def test_of_a_repository_without_a_model_the_small_files_come(
    through: PullThrough, repo: Repo
) -> None:
    for path in repo.folder.iterdir():
        path.unlink()
    (repo.folder / "tokenizer.json").write_bytes(b"{}")
    (repo.folder / "vocab.bin.onnx").write_bytes(b"onnx")
    assert arrive(through).error is None
    manifest = through._store.resolve(NAME)
    assert model_files(through._store, manifest).keys() == {"tokenizer.json"}
    assert not verify_models(store=through._store).faults


@pytest.mark.parametrize("name", ["a b.onnx", "a/b/c/d.onnx", "\u00e9.onnx", "x" * 256])
def test_names_that_no_store_has_are_no_other_files(name: str) -> None:
    listed = {one: ListedFile(one, 1, "sha1", "a" * 40) for one in (name, "d/good.onnx")}
    assert arrivals._others(listed, ()).keys() == {"d/good.onnx"}


def test_files_that_exclude_each_other_are_no_other_files() -> None:
    listed = {one: ListedFile(one, 1, "sha1", "a" * 40) for one in ("a", "a/b")}
    assert arrivals._others(listed, ()) == {}
    assert arrivals._others({"a": listed["a"]}, ["a/b"]) == {}


def test_others_of_too_many_files_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {one: ListedFile(one, 1, "sha1", "a" * 40) for one in "abc"}
    monkeypatch.setattr(arrivals, "_MAX_FILES", 3)
    assert arrivals._others(listed, ()) == listed
    assert arrivals._others(listed, ["d"]) == {}
