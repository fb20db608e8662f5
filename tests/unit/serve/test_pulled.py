"""The record of what was fetched from an upstream."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from blobstore.errors import StoreError
from blobstore.operations.create.create import create
from blobstore.serve.pulled import Origin, PulledModels
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

ORIGIN = Origin("org/model", "a" * 40, {"config.json": "b" * 40}, is_public=True)


def test_a_record_survives_the_process(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN)
    again = PulledModels(store)
    assert again.all() == [ORIGIN]
    assert again.of_repository("org/model") == [ORIGIN]
    assert again.of_repository("org/other") == []
    again.forget(ORIGIN)
    assert again.all() == PulledModels(store).all() == []


def test_the_last_use_survives_the_process(store: LocalStore) -> None:
    pulled = PulledModels(store)
    assert pulled.last_use(ORIGIN) == 0
    pulled.keep(ORIGIN)
    (path,) = store.folder("pulled").iterdir()
    os.utime(path, (1000, 1000))
    assert pulled.last_use(ORIGIN) == 1000
    pulled.touch(ORIGIN)
    assert PulledModels(store).last_use(ORIGIN) > 1000


def test_a_damaged_record_is_an_error_and_not_a_model_for_everyone(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN)
    (path,) = store.folder("pulled").iterdir()
    for data in (b"", b"{}", b"[]", ORIGIN.to_bytes().replace(b"a" * 40, b"main")):
        path.write_bytes(data)
        with pytest.raises(StoreError, match="the record of a fetched model, cannot be read"):
            PulledModels(store)


def test_what_a_killed_process_was_writing_is_no_record(store: LocalStore) -> None:
    PulledModels(store).keep(ORIGIN)
    (store.folder("pulled") / ".1-abc.tmp").write_bytes(b"{")
    assert PulledModels(store).all() == [ORIGIN]


def test_models_of_the_stores_own_have_no_origin(store: LocalStore, tmp_path: Path) -> None:
    create(write_folder(tmp_path / "source", dense_tensors()), "org/model", store=store)
    pulled = PulledModels(store)
    assert pulled.origin(store.resolve("org/model")) is None
    pulled.keep(ORIGIN)
    assert pulled.origin(store.resolve("org/model")) is None


def test_records_of_another_process_are_noticed(store: LocalStore) -> None:
    writer, reader = PulledModels(store), PulledModels(store)
    for number in range(20):  # more than one within a tick of the file system's clock
        origin = replace(ORIGIN, commit=f"{number:040x}")
        writer.keep(origin)
        assert reader.get((origin.repository, origin.commit)) == origin
    writer.note_public(ORIGIN.repository, is_public=False)
    assert reader.restricted() == {ORIGIN.repository}
    for origin in writer.all():
        writer.forget(origin)
    assert reader.all() == []


def test_a_record_that_is_damaged_later_is_an_error_too(store: LocalStore) -> None:
    reader = PulledModels(store)
    PulledModels(store).keep(ORIGIN)
    (path,) = store.folder("pulled").iterdir()
    path.write_bytes(b"{}")
    with pytest.raises(StoreError, match="cannot be read"):
        reader.all()


def test_the_process_that_writes_the_records_does_not_read_them_again(store: LocalStore) -> None:
    writer = PulledModels(store)
    PulledModels(store).keep(ORIGIN)
    writer.own()
    assert writer.all() == [ORIGIN]
    (path,) = store.folder("pulled").iterdir()
    path.write_bytes(b"{}")
    assert writer.all() == [ORIGIN]
