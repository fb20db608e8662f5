from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    ModelNotFound,
    NotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.operations.bench.bench import measure_reading
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support.gguf_files import gguf_file
from tests.support.models import dense_tensors, write_folder
from tests.support.registry import running_registry

WAYS = ["1 thread", "8 threads", "open()", 'open(read="populate")', 'open(read="pread")']


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=store)
    return store


def test_a_model_is_read_from_the_disk_and_the_page_cache_in_each_way(store: LocalStore) -> None:
    reports: list[tuple[int, int]] = []
    found = measure_reading(
        "dense", store=store, progress=lambda _, done, total: reports.append((done, total))
    )

    assert [(one.place, one.how) for one in found.measurements] == [
        (place, way) for place in ("disk", "page cache") for way in WAYS
    ]
    tensors = sum(array.nbytes for array in dense_tensors().values())
    assert {one.size for one in found.measurements if one.reader == "open"} == {tensors}
    assert all(one.size > tensors for one in found.measurements if one.reader == "bare")
    assert all(one.rate > 0 for one in found.measurements)
    assert len(found.advice) >= 2
    assert found.notices == ()
    assert reports[-1][0] == reports[-1][1]


def test_frozen_blobs_are_said(store: LocalStore, tmp_path: Path) -> None:
    import numpy as np

    folder = write_folder(
        tmp_path / "zeros", {"a": np.zeros(100_000, np.float32), **dense_tensors()}
    )
    create(folder, "zeros", store=store)
    freeze_models(["zeros"], store=store)

    found = measure_reading("zeros", store=store)

    assert "blobs are frozen" in found.notices[0]
    assert len(found.measurements) == 10


def test_a_path_is_read_and_opened_if_it_is_a_gguf_file(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file([], [("a", 0, [4], bytes(16))]))

    folder = measure_reading(tmp_path / "dense", jobs=2)
    file = measure_reading(tmp_path / "model.gguf", jobs=1)

    assert [one.how for one in folder.measurements] == ["1 thread", "2 threads"] * 2
    assert "was not measured" in folder.notices[0]
    assert [one.how for one in file.measurements] == [WAYS[0], *WAYS[2:]] * 2


def test_remotes_are_read_as_if_the_store_had_nothing(store: LocalStore, tmp_path: Path) -> None:
    push_model("dense", f"file://{tmp_path}/remote", store=store)
    found = measure_reading(f"file://{tmp_path}/remote/dense:latest", store=store, jobs=3)

    assert [(one.place, one.how) for one in found.measurements] == [
        ("network", how) for how in ("1 thread", "3 threads", *WAYS[2:4])
    ]


def test_a_registry_is_measured(store: LocalStore, tmp_path: Path) -> None:
    with running_registry(tmp_path / "registry") as server:
        push_model("dense", f"{server.host}/dense", store=store)
        found = measure_reading(f"oci://{server.host}/dense")

    ways = ["1 thread", "16 threads", "open()", 'open(read="populate")']
    assert [(one.place, one.how) for one in found.measurements] == [
        ("network", way) for way in ways
    ]
    assert found.notices == ()


def test_what_cannot_be_read_is_an_error(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.gguf").write_bytes(b"GGUF\xff\xff\xff\xff")
    with pytest.raises(NotFound, match="no such file or folder"):
        measure_reading(tmp_path / "nothing")
    with pytest.raises(UnsupportedSource, match="no bytes to read"):
        measure_reading(tmp_path / "empty")
    with pytest.raises(BlobDamaged, match="version 4294967295 of GGUF"):
        measure_reading(tmp_path / "bad.gguf")
    with pytest.raises(ModelNotFound):
        measure_reading("other", store=store)
    with pytest.raises(UsageError, match="jobs must be at least 1"):
        measure_reading("dense", store=store, jobs=0)
    blob = store.resolve("dense").layers_of(*media_types.WEIGHTS)[0]
    Path(store.blob_path(blob.digest)).unlink()
    with pytest.raises(BlobMissing):
        measure_reading("dense", store=store)
