"""The record of what was fetched from an upstream."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create, import_source
from blobstore.planning.import_options import ImportOptions
from blobstore.serve import pulled as pulled_models
from blobstore.serve.library import Library
from blobstore.serve.pulled import Origin, PulledModels
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.store import manifests
from blobstore.store.fetched import mark_of
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.serve import ask

ORIGIN = Origin("org/model", "a" * 40, {"config.json": "b" * 40})
FROM_PEER = replace(ORIGIN, commit="c" * 40, peer="http://peer")


def import_as(store: LocalStore, tmp_path: Path, origin: Origin) -> None:
    """Import a model as a fetch does."""
    folder = write_folder(tmp_path / "fetched", dense_tensors())
    with contextlib.closing(HuggingFaceFolder(folder)) as source:
        source.repository, source.commit = origin.repository, origin.commit
        reference = Reference.parse(origin.repository)
        PulledModels(store).names.giving(reference)
        update = replace(store.names.seen(reference), is_fetched=True)
        mark = mark_of((origin.repository, origin.commit))
        import_source(source, update, store, ImportOptions(), started=0.0, mark=mark)


def record_of(store: LocalStore, what: str = f"@{ORIGIN.commit}") -> Path:
    return store.folder("pulled") / Digest.of(f"{ORIGIN.repository}{what}".encode()).hex


def test_a_record_survives_the_process(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN, is_public=True)
    again = PulledModels(store)
    assert again.all() == [ORIGIN]
    assert again.of_repository("org/model") == [ORIGIN]
    assert again.of_repository("org/other") == []
    again.own()  # so that it does not read them again
    again.forget(ORIGIN)
    assert again.all() == PulledModels(store).all() == []


def test_a_record_that_a_fetch_holds_is_not_forgotten(store: LocalStore) -> None:
    pulled, commit = PulledModels(store), (ORIGIN.repository, ORIGIN.commit)
    with pulled.held(commit) as is_recorded:
        assert not is_recorded
    pulled.keep(ORIGIN, is_public=False)
    pulled.hold(commit)
    with pulled.held(commit) as is_recorded:
        assert is_recorded
    pulled.forget(ORIGIN)
    assert PulledModels(store).all() == [ORIGIN]
    assert not pulled.is_public(ORIGIN.repository)
    pulled.release(commit)
    pulled.forget(ORIGIN)
    assert pulled.all() == PulledModels(store).all() == []


def test_the_last_use_survives_the_process(store: LocalStore) -> None:
    pulled = PulledModels(store)
    assert pulled.last_use(ORIGIN) == 0
    pulled.keep(ORIGIN, is_public=True)
    path = record_of(store)
    os.utime(path, (1000, 1000))
    assert pulled.last_use(ORIGIN) == 1000
    pulled.touch(ORIGIN)
    assert PulledModels(store).last_use(ORIGIN) > 1000
    os.utime(path, (1000, 1000))
    pulled.touch(ORIGIN)
    assert path.stat().st_mtime == 1000, "it is not written for each request"
    assert pulled.last_use(ORIGIN) > 1000


RECORDS = (
    b"",
    b"{}",
    b"[]",
    b'{"repository": "org/model"}',
    b'{"repository": "org/model", "public": 1}',
    b'{"repository": 1, "public": true}',
    ORIGIN.to_bytes().replace(b"a" * 40, b"main"),
    ORIGIN.to_bytes().replace(b'"peer":""', b'"peer":1'),
)


@pytest.mark.parametrize("data", RECORDS)
def test_a_model_with_a_damaged_record_was_fetched_and_is_not_for_everyone(
    store: LocalStore, tmp_path: Path, data: bytes
) -> None:
    import_as(store, tmp_path, ORIGIN)
    PulledModels(store).keep(ORIGIN, is_public=True)
    for path in store.folder("pulled").iterdir():
        path.write_bytes(data)
    pulled = PulledModels(store)
    assert pulled.origin(store.resolve("org/model")) == Origin(ORIGIN.repository, ORIGIN.commit)
    assert ORIGIN.repository not in pulled.open()
    assert pulled.incomplete == {(ORIGIN.repository, ORIGIN.commit)}
    pulled.keep(ORIGIN, is_public=True)
    assert not pulled.incomplete
    assert PulledModels(store).get((ORIGIN.repository, ORIGIN.commit)) is not None
    assert PulledModels(store).is_public(ORIGIN.repository)


def test_a_damaged_record_says_nothing_of_other_models(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "own", dense_tensors()), "org/model", store=store)
    PulledModels(store).keep(FROM_PEER, is_public=None)
    record_of(store, f"@{FROM_PEER.commit}").write_bytes(b"{")  # of no model in the store
    pulled = PulledModels(store)
    assert pulled.all() == []
    assert not pulled.incomplete
    assert pulled.origin(store.resolve("org/model")) is None


def test_what_a_killed_process_was_writing_is_no_record(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN, is_public=True)
    (store.folder("pulled") / ".1-abc.tmp").write_bytes(b"{")
    assert PulledModels(store).all() == [ORIGIN]


def test_models_of_the_stores_own_have_no_origin(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "source", dense_tensors()), "org/model", store=store)
    pulled = PulledModels(store)
    assert pulled.origin(store.resolve("org/model")) is None
    pulled.keep(ORIGIN, is_public=True)
    assert pulled.origin(store.resolve("org/model")) is None


def test_records_of_another_process_are_noticed(store: LocalStore) -> None:
    writer, reader = PulledModels(store), PulledModels(store)
    for number in range(20):  # more than one within a tick of the file system's clock
        origin = replace(ORIGIN, commit=f"{number:040x}")
        writer.keep(origin, is_public=True)
        assert reader.records()[origin.repository, origin.commit] == origin
    writer.note_public(ORIGIN.repository, is_public=False)
    assert not reader.is_public(ORIGIN.repository)
    for origin in writer.all():
        writer.forget(origin)
    assert reader.all() == []


def test_the_process_that_writes_the_records_does_not_read_them_again(store: LocalStore) -> None:
    writer = PulledModels(store)
    PulledModels(store).keep(ORIGIN, is_public=True)
    writer.own()
    assert writer.all() == [ORIGIN]
    path = record_of(store)
    path.write_bytes(b"{}")
    assert writer.all() == [ORIGIN]


# Who may read a repository


def test_whether_a_repository_is_public_is_said_once_for_all_of_its_commits(
    store: LocalStore,
) -> None:
    pulled = PulledModels(store)
    pulled.keep(ORIGIN, is_public=True)
    pulled.keep(replace(ORIGIN, commit="d" * 40), is_public=False)
    assert not pulled.is_public(ORIGIN.repository)
    assert not PulledModels(store).is_public(ORIGIN.repository)
    pulled.note_public(ORIGIN.repository, is_public=True)
    assert pulled.open() == PulledModels(store).open() == {ORIGIN.repository}
    pulled.forget(ORIGIN)  # the other one is still there
    assert pulled.open() == PulledModels(store).open() == {ORIGIN.repository}


def test_who_may_read_a_repository_is_written_before_its_commit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash in between must leave no commit for everyone that is not."""
    pulled, written = PulledModels(store), list[Path]()
    monkeypatch.setattr(pulled, "_write", lambda path, _: written.append(path))
    pulled.keep(ORIGIN, is_public=False)
    assert written == [record_of(store, "@"), record_of(store)]


def test_nothing_is_noted_of_a_repository_of_which_nothing_was_fetched(store: LocalStore) -> None:
    pulled = PulledModels(store)
    pulled.note_public(ORIGIN.repository, is_public=False)
    assert not store.folder("pulled").exists()
    pulled.keep(ORIGIN, is_public=True)
    pulled.forget(ORIGIN)
    assert list(store.folder("pulled").iterdir()) == []
    assert pulled.is_public(ORIGIN.repository)


def test_a_restricted_repository_stays_noted_without_its_commits(store: LocalStore) -> None:
    pulled = PulledModels(store)
    pulled.keep(ORIGIN, is_public=False)
    pulled.forget(ORIGIN)
    for one in (pulled, PulledModels(store)):
        assert not one.is_public(ORIGIN.repository)
        assert not one.of_repository(ORIGIN.repository)


def test_a_commit_is_for_nobody_if_no_record_is_about_its_repository(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN, is_public=True)
    record_of(store, "@").unlink()
    assert not PulledModels(store).is_public(ORIGIN.repository)


def test_a_peer_does_not_say_whether_a_repository_is_public(store: LocalStore) -> None:
    pulled = PulledModels(store)
    pulled.keep(FROM_PEER, is_public=None)
    assert pulled.is_public(ORIGIN.repository)
    pulled.keep(ORIGIN, is_public=False)
    pulled.keep(FROM_PEER, is_public=None)
    assert not pulled.is_public(ORIGIN.repository)
    assert not PulledModels(store).is_public(ORIGIN.repository)
    assert PulledModels(store).get((FROM_PEER.repository, FROM_PEER.commit)) == FROM_PEER


def test_a_record_that_cannot_be_read_now_is_not_absent(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    import_as(store, tmp_path, ORIGIN)
    pulled, reference = PulledModels(store), Reference.parse("org/model")
    pulled.keep(ORIGIN, is_public=True)
    with monkeypatch.context() as patch:
        for module in (pulled_models, manifests):
            patch.setattr(module, "read_regular", fails)
        with pytest.raises(StoreError, match="cannot read .*: Input/output error"):
            pulled.with_others(ORIGIN)
        with pytest.raises(StoreError, match="cannot read .*: Input/output error"):
            pulled.names.has_given(reference)
    assert pulled.with_others(ORIGIN) == ORIGIN
    assert pulled.names.has_given(reference)


def test_records_of_others_that_cannot_be_read_open_nothing_and_are_reported_once(
    store: LocalStore, tmp_path: Path
) -> None:
    import_as(store, tmp_path, ORIGIN)
    create(write_folder(tmp_path / "own", dense_tensors()), "org/own", store=store)
    PulledModels(store).keep(ORIGIN, is_public=True)
    shutil.rmtree(store.folder("pulled"))
    store.folder("pulled").write_bytes(b"")  # as if this user must not list it
    with pytest.raises(StoreError, match="cannot list"):
        PulledModels(store)
    noted: list[str] = []

    def note(error: str) -> None:
        noted.append(error)

    library = Library(store, note=note)
    for name, status in (("model", 404), ("own", 200)) * 2:
        assert ask(library, f"/org/{name}/resolve/main/config.json").status == status
    assert len(noted) == 1
