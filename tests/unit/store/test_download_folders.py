"""Folders of files that are downloaded to be imported."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.errors import DamagedSource, StoreBusy, StoreError
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store.download_folders import Downloads, is_full
from blobstore.store.local import LocalStore


@contextlib.contextmanager
def folder_of(store: LocalStore, source: str) -> Iterator[Path]:
    with Downloads(store, is_quantized=False) as downloads:
        yield downloads.folder(source, "1")


def test_a_folder_is_removed_after_the_import_and_kept_if_that_is_stopped(
    store: LocalStore,
) -> None:
    with pytest.raises(KeyboardInterrupt), folder_of(store, "a") as folder:
        (folder / "file").write_bytes(b"some")
        raise KeyboardInterrupt
    with folder_of(store, "a") as again:
        assert again == folder
        assert (again / "file").read_bytes() == b"some"
    assert not folder.exists()


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (StoreError("the download failed"), OSError(errno.ENOSPC, "full")),
        (DamagedSource("another SHA-256"), None),
    ],
)
def test_a_full_disk_and_damaged_files_leave_no_folder(
    store: LocalStore, error: Exception, cause: Exception | None
) -> None:
    with pytest.raises(type(error)), folder_of(store, "a") as folder:
        (folder / "file").write_bytes(b"some")
        raise error from cause
    assert not folder.exists()
    assert not is_full(StoreError("another reason"))


def test_parts_of_a_source_share_a_folder_if_they_are_imported_together(
    store: LocalStore,
) -> None:
    with Downloads(store, is_quantized=False) as downloads:
        assert downloads.folder("a", "1", "Q4") != downloads.folder("a", "1", "Q8")
    with Downloads(store, is_quantized=False, is_shared=True) as downloads:
        folder = downloads.folder("a", "1", "Q4")
        (folder / "1").mkdir()
        for name in ("[4].gguf", "4.gguf"):
            (folder / "1" / name).write_bytes(b"")
        downloads.remove(["[4].gguf", "absent.gguf"])
        assert downloads.folder("a", "1", "Q8") == folder
        assert [path.name for path in (folder / "1").iterdir()] == ["4.gguf"]
    assert not folder.exists()


def test_one_process_at_a_time_uses_a_folder(store: LocalStore) -> None:
    store.lock_timeout = 0
    with folder_of(store, "a"):
        busy = pytest.raises(StoreBusy, match="another process is downloading 'a'")
        with busy, folder_of(store, "a"):
            pass
        with folder_of(store, "b"):
            pass


def test_gc_removes_old_folders_that_no_process_uses_and_du_counts_them(store: LocalStore) -> None:
    def files() -> int:
        return sum(path.is_file() for path in store.folder("downloads").rglob("*"))

    for name, age in (("old", 10), ("young", 0), ("used", 10)):
        with pytest.raises(KeyboardInterrupt), folder_of(store, name) as folder:
            (folder / "in").mkdir()
            (folder / "in" / "file").write_bytes(bytes(5000))
            now = (folder / "in" / "file").stat().st_mtime
            os.utime(folder / "in" / "file", (now - age, now - age))
            raise KeyboardInterrupt
    assert measure_usage(store=store).partial.size >= 3 * 5000
    with pytest.raises(KeyboardInterrupt), folder_of(store, "used"):
        collect_garbage(store=store, older_than=5, dry_run=True)
        assert files() == 3
        found = collect_garbage(store=store, older_than=5)
        assert len(found.leftovers) == 1
        assert files() == 2
        raise KeyboardInterrupt
    assert len(list(store.folder("downloads").iterdir())) == 2


# Space


@pytest.mark.parametrize(
    ("to_fetch", "weights", "is_quantized", "fits"),
    [
        (50, 50, False, True),
        (50, 51, False, False),
        (0, 101, False, False),
        (100, 100, True, True),
        (101, 1, True, False),
    ],
)
def test_there_must_be_space_for_the_files_and_for_what_the_store_gets(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    to_fetch: int,
    weights: int,
    is_quantized: bool,
    fits: bool,
) -> None:
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 100)
    with Downloads(store, is_quantized=is_quantized) as downloads:
        if fits:
            downloads.check_space(to_fetch, weights)
            return
        with pytest.raises(StoreError, match="not enough space"):
            downloads.check_space(to_fetch, weights)


def test_weights_that_the_store_may_have_need_no_space(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 100)
    with store.ingest() as ingest:
        ingest.add(70, lambda: [bytes(70)])
        ingest.publish()
    with Downloads(store, is_quantized=False) as downloads:
        downloads.check_space(60, 110)
        with pytest.raises(StoreError):
            downloads.check_space(60, 111)


def test_a_disk_that_fills_is_said_with_both_sizes(store: LocalStore) -> None:
    full = pytest.raises(StoreError, match=r"\d+ B are needed, and .* are free")
    with full, Downloads(store, is_quantized=False) as downloads:
        downloads.check_space(50, 50)
        raise OSError(errno.ENOSPC, "full")


def test_who_waits_for_a_folder_gets_its_files(store: LocalStore) -> None:
    waiting, seen = threading.Event(), []

    def wait() -> None:
        with Downloads(store, is_quantized=False, progress=note) as downloads:
            folder = downloads.folder("a", "1")
            seen.append((folder / "file").read_bytes())

    def note(what: str, done: int, total: int) -> None:
        del done, total
        seen.append(what.encode())
        if len(seen) > 1:  # it has said so, and is a waiter
            waiting.set()

    with ThreadPoolExecutor(1) as pool:
        with folder_of(store, "a") as folder:
            (folder / "file").write_bytes(b"all")
            second = pool.submit(wait)
            waiting.wait()
        second.result()
    assert {*seen} == {b"waiting for the process that downloads a", b"all"}
    assert not folder.exists()


def test_a_link_in_place_of_a_folder_of_downloads_is_not_followed(
    store: LocalStore, tmp_path: Path
) -> None:
    with Downloads(store, is_quantized=False) as downloads:
        folder = downloads.folder("hf://org/m", "commit")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commit").symlink_to(elsewhere)
    with Downloads(store, is_quantized=False) as downloads:
        assert not (downloads.folder("hf://org/m", "commit") / "commit").exists()
    shutil.rmtree(store.folder("downloads"), ignore_errors=True)
    store.folder("downloads").symlink_to(elsewhere)
    with (
        Downloads(store, is_quantized=False) as downloads,
        pytest.raises(StoreError, match="is a link"),
    ):
        downloads.folder("hf://org/m", "commit")
    assert elsewhere.is_dir()
