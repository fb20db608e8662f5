from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blobstore.core.digest import BlobId, Digest
from blobstore.core.files import sync_folder
from blobstore.store.layout import Layout
from blobstore.store.local import LocalStore
from blobstore.store.quarantine import put_in_place, quarantine_cold, replace_damaged

RIGHT = b"right"
DIGEST = Digest.of(RIGHT)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    layout = Layout(tmp_path)
    layout.blobs.mkdir()
    layout.temporary.mkdir(parents=True)
    return layout


def blob(layout: Layout) -> Path:
    return Path(layout.blob(DIGEST))


def ready(layout: Layout) -> Path:
    path = layout.temporary / "1-a-0"
    path.write_bytes(RIGHT)
    return path


def replace(layout: Layout, new: Path | None = None) -> Path | None:
    return put_in_place(LocalStore(layout.root), DIGEST, new or ready(layout))


def test_a_quarantined_file_keeps_its_inode(layout: Layout) -> None:
    blob(layout).write_bytes(b"wrong")
    inode = blob(layout).stat().st_ino
    quarantined = replace(layout)
    assert quarantined is not None
    assert quarantined.parent == layout.quarantine
    assert quarantined.name.startswith(f"sha256-{DIGEST.hex}.2")
    assert quarantined.stat().st_ino == inode
    assert quarantined.read_bytes() == b"wrong"
    assert blob(layout).read_bytes() == RIGHT
    assert not list(layout.temporary.iterdir())


def test_a_missing_file_is_not_quarantined(layout: Layout) -> None:
    assert replace(layout) is None
    assert blob(layout).read_bytes() == RIGHT
    assert not layout.quarantine.exists()


def test_a_second_copy_gets_another_name(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "strftime", lambda *_: "20260101T000000Z")
    paths = []
    for content in (b"1", b"2", b"3"):
        blob(layout).unlink(missing_ok=True)
        blob(layout).write_bytes(content)
        paths.append(replace(layout))
    names = [quarantined.name.partition(".")[2] for quarantined in paths if quarantined is not None]
    assert names == ["20260101T000000Z", "20260101T000000Z-2", "20260101T000000Z-3"]
    assert [quarantined.read_bytes() for quarantined in paths if quarantined is not None] == [
        b"1",
        b"2",
        b"3",
    ]


def test_a_file_that_an_interrupted_repair_quarantined_is_not_quarantined_twice(
    layout: Layout,
) -> None:
    blob(layout).write_bytes(b"wrong")
    layout.quarantine.mkdir()
    before = layout.quarantine / f"{DIGEST.file_name}.20260101T000000Z"
    os.link(blob(layout), before)
    assert replace(layout) == before
    assert list(layout.quarantine.iterdir()) == [before]


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").touch()


def make_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize(
    "make", [make_folder, make_link, os.mkfifo], ids=lambda make: make.__name__
)
def test_links_and_folders_are_quarantined_unchanged(
    make: Callable[[Path], object], layout: Layout
) -> None:
    make(blob(layout))
    kind = blob(layout).lstat().st_mode
    quarantined = replace(layout)
    assert quarantined is not None
    assert quarantined.lstat().st_mode == kind
    assert blob(layout).read_bytes() == RIGHT


def test_quarantines_files_without_hard_links(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "link", refuse)
    blob(layout).write_bytes(b"wrong")
    quarantined = replace(layout)
    assert quarantined is not None
    assert quarantined.read_bytes() == b"wrong"
    assert blob(layout).read_bytes() == RIGHT


def test_a_rename_that_fails_leaves_the_blob_unchanged(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob(layout).write_bytes(b"wrong")
    new = ready(layout)

    def refuse(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="Input/output"):
        replace(layout, new)
    assert blob(layout).read_bytes() == b"wrong"


def test_each_step_is_durable_before_the_next(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    link, rename, sync = os.link, Path.replace, sync_folder

    def noting_link(*arguments: object, **options: object) -> None:
        steps.append("link")
        link(*arguments, **options)  # type: ignore[arg-type]

    def noting_replace(path: Path, target: object) -> Path:
        steps.append("replace")
        return rename(path, target)  # type: ignore[arg-type]

    def noting_sync(folder: Path) -> None:
        steps.append(f"sync {folder.name}")
        sync(folder)

    blob(layout).write_bytes(b"wrong")
    new = ready(layout)
    monkeypatch.setattr(os, "link", noting_link)
    monkeypatch.setattr(Path, "replace", noting_replace)
    monkeypatch.setattr("blobstore.store.quarantine.sync_folder", noting_sync)
    replace(layout, new)
    assert steps == ["link", "sync quarantine", "replace", "sync blobs"]


def test_a_file_that_another_process_has_repaired_in_the_meantime_stays(layout: Layout) -> None:
    blob(layout).write_bytes(b"wrong")
    new = ready(layout)

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        blob(layout).unlink(missing_ok=True)
        blob(layout).write_bytes(RIGHT)  # before this process got the lock
        yield

    found = replace_damaged(
        LocalStore(layout.root), BlobId(DIGEST, len(RIGHT)), new, lock, lambda _: None
    )
    assert found == (False, None)
    assert new.exists()
    assert not layout.quarantine.exists()


def test_a_file_whose_cold_form_is_quarantined_gets_its_second_link(layout: Layout) -> None:
    """It may be the base of other cold blobs, and programs that know none of them delete blobs."""
    blob(layout).write_bytes(RIGHT)
    layout.cold.mkdir()
    cold = Path(layout.cold_blob(DIGEST))
    cold.write_bytes(b"damaged")
    quarantined = quarantine_cold(LocalStore(layout.root), DIGEST)
    assert quarantined is not None
    assert quarantined.read_bytes() == b"damaged"
    assert not cold.exists()
    assert Path(layout.base_blob(DIGEST)).samefile(blob(layout))
