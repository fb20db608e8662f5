from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster

import blobstore
from blobstore.errors import BlobstoreError, DamagedSource, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import tensor_bytes
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip
from tests.support.descriptors import open_files
from tests.support.models import dense_tensors, moe_tensors, quantizable_tensors, write_folder
from tests.support.options import grouped

NAME = Reference.parse("m")


@pytest.fixture(scope="module", params=["threads", "fork", "spawn", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "dask":
        with warnings.catch_warnings(action="ignore"):  # of Dask itself, about its sockets
            cluster = LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None)
            client = Client(cluster)
        yield client.get_executor()
        with warnings.catch_warnings(action="ignore"):
            client.close()
            cluster.close()
    elif request.param == "threads":
        with ThreadPoolExecutor(2) as pool:
            yield pool
    else:
        with ProcessPoolExecutor(2, get_context(request.param)) as pool:
            yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", dense_tensors() | moe_tensors(), shards=2)


def leftovers(store: LocalStore) -> list[str]:
    """Return what an import leaves only if it fails to clean up."""
    folders = (store.folder("temporary"), store.folder("leases"))
    return [path.name for folder in folders for path in folder.iterdir()]


@pytest.mark.parametrize(
    "options", [{}, {"experts": "stacked"}, {"quantize": "int4", "overrides": ["*norm*=none"]}]
)
def test_every_executor_creates_the_same_manifest(
    tmp_path: Path, store: LocalStore, executor: Executor, options: dict[str, Any]
) -> None:
    folder = write_folder(tmp_path / "model", quantizable_tensors(), shards=3)
    expected = LocalStore(tmp_path / "expected")
    by_threads = blobstore.create(folder, "m", store=expected, **grouped(options))
    created = blobstore.create(folder, "m", store=store, executor=executor, **grouped(options))
    assert store.read_manifest(NAME) == expected.read_manifest(NAME)
    assert created.bytes_written == by_threads.bytes_written
    assert created.bytes_present == by_threads.bytes_present
    assert leftovers(store) == []
    blobstore.open("m", store=store, verify="digest").close()


class SavesBeforeTheJobs(ThreadPoolExecutor):
    """An executor whose workers open a source that a trainer has just replaced."""

    def __init__(self, save: Callable[[], object]) -> None:
        super().__init__(1)
        self._save = save

    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        self._save()
        return super().submit(*arguments, **keywords)


@pytest.mark.parametrize("names", [True, False], ids=["same names", "other names"])
def test_a_source_that_is_replaced_before_a_worker_opens_it_is_an_error(
    tmp_path: Path, store: LocalStore, names: bool
) -> None:
    folder = write_folder(tmp_path / "model", {"a": np.zeros((4, 4), np.float32)})
    other = {"a" if names else "b": np.ones((4, 4), np.float32)}
    later = write_folder(tmp_path / "later", other)

    def save() -> None:
        if (later / "model.safetensors").exists():
            (later / "model.safetensors").replace(folder / "model.safetensors")

    with (
        SavesBeforeTheJobs(save) as executor,
        pytest.raises(DamagedSource, match=r"model\.safetensors' changed while it was read"),
    ):
        blobstore.create(folder, "m", store=store, executor=executor)
    assert list(store.references()) == []
    assert leftovers(store) == []


def test_a_second_import_writes_nothing(
    folder: Path, store: LocalStore, executor: Executor
) -> None:
    first = blobstore.create(folder, "m", store=store)
    second = blobstore.create(folder, "n", store=store, executor=executor, paranoid=True)
    assert (second.bytes_written, second.bytes_present) == (0, first.bytes_written)


def test_progress_is_reported_per_blob(folder: Path, store: LocalStore, executor: Executor) -> None:
    calls: list[tuple[str, int, int]] = []
    created = blobstore.create(
        folder, "m", store=store, executor=executor, progress=lambda *call: calls.append(call)
    )
    tensors = created.blobs - 3  # the config, config.json and the record of the source
    assert len(calls) == tensors
    assert calls[-1][1] == calls[-1][2]


def test_an_error_of_a_worker_leaves_nothing(
    tmp_path: Path, store: LocalStore, executor: Executor
) -> None:
    tensors = quantizable_tensors()
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name][3, 5] = np.nan
    folder = write_folder(tmp_path / "model", tensors)
    with pytest.raises(DamagedSource, match=rf"^tensor '{name}': element \[3, 5\] is nan"):
        blobstore.create(
            folder, "m", store=store, executor=executor, quantize=QuantizeOptions("int4")
        )
    assert leftovers(store) == []
    assert list(store.folder("blobs").iterdir()) == []


def test_a_worker_replaces_a_damaged_blob(
    folder: Path, store: LocalStore, executor: Executor
) -> None:
    blobstore.create(folder, "m", store=store)
    flip(blob_path(store, "mask"))
    created = blobstore.create(folder, "n", store=store, executor=executor)
    assert created.blobs_repaired == 1
    blobstore.open("m", store=store, verify="rehash").close()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_or_interrupt_of_the_caller_leaves_nothing(
    tmp_path: Path, store: LocalStore, error: type[BaseException]
) -> None:
    tensors = {f"t{number}": np.full(2**18, number, np.float64) for number in range(24)}
    folder = write_folder(tmp_path / "model", tensors)

    def fail(*_: object) -> None:
        raise error

    with ProcessPoolExecutor(2, get_context("fork")) as executor:
        with pytest.raises(error):
            blobstore.create(folder, "m", store=store, executor=executor, progress=fail)
        assert leftovers(store) == []
    assert leftovers(store) == []
    assert list(store.folder("blobs").iterdir()) == []


def test_a_killed_worker_is_an_error_and_leaves_nothing(
    folder: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent, plain = os.getpid(), tensor_bytes.Converter.convert

    def killed(self: Any, recipe: Any) -> Iterator[Any]:
        yield from plain(self, recipe)
        if os.getpid() != parent and "experts" in recipe.spec.name:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tensor_bytes.Converter, "convert", killed)
    with (
        ProcessPoolExecutor(2, get_context("fork")) as executor,
        pytest.raises(BlobstoreError, match="the executor lost a worker"),
    ):
        blobstore.create(folder, "m", store=store, executor=executor)
    assert leftovers(store) == []
    assert list(store.references()) == []


def test_garbage_collection_keeps_what_workers_write_and_find(
    folder: Path, store: LocalStore, executor: Executor
) -> None:
    blobstore.create(folder, "m", store=store)
    (store.folder("blobs") / store.resolve(NAME).layers[0].digest.file_name).unlink()
    store.manifest_path(NAME).unlink()

    def collect(*_: object) -> None:
        collect_garbage(store=store, older_than=0, force=True)

    blobstore.create(folder, "m", store=store, executor=executor, progress=collect)
    blobstore.open("m", store=store, verify="digest").close()


def test_leaves_no_source_open_in_this_process(
    folder: Path, store: LocalStore, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as executor:
        blobstore.create(folder, "m", store=store, executor=executor)
        assert open_files(tmp_path) == []


def test_rejects_a_number_of_threads_for_an_executor(folder: Path, store: LocalStore) -> None:
    with ThreadPoolExecutor() as executor, pytest.raises(UsageError, match="cannot be combined"):
        blobstore.create(folder, "m", store=store, executor=executor, jobs=2)
    assert not store.root.exists()
