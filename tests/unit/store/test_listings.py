from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from blobstore.core.files import FileVersion
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.store import listings, scan
from blobstore.store.catalog import read_catalog
from blobstore.store.listings import VERSION, Listings, is_settled
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let folders count as old ones."""
    monkeypatch.setattr(listings, "is_settled", lambda *_: True)


def reread(known: Listings) -> Listings:
    return Listings(*known.tables())


def listed(known: Listings, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str] | None:
    """Return the files of a folder that is listed again; None if what is kept is used."""
    found: list[str] | None = None

    def list_one(path: str) -> tuple[list[str], list[str]]:
        nonlocal found
        folders, found = scan.folders_and_files(path)
        return folders, found

    with monkeypatch.context() as patch:
        patch.setattr(listings, "folders_and_files", list_one)
        known.folders_and_files(str(folder))
    return found


def change_time(folder: Path) -> None:
    """Give a folder another version, however coarse the clock is."""
    os.utime(folder, ns=(0, folder.stat().st_mtime_ns + 1))


def test_a_folder_is_listed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", "new\nline", os.fsdecode(b"\xff")):
        (tmp_path / name).touch()
    known = Listings()
    first = listed(known, tmp_path, monkeypatch)
    assert first == sorted(os.listdir(tmp_path))
    assert known.is_new
    again = reread(known)
    assert listed(again, tmp_path, monkeypatch) is None
    assert again.folders_and_files(str(tmp_path)) == ([], first)
    assert not again.is_new
    (tmp_path / "a").unlink()
    change_time(tmp_path)
    assert listed(again, tmp_path, monkeypatch) == [name for name in first if name != "a"]


def test_folders_in_a_folder_are_listed_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("step10", "step9"):
        (tmp_path / name).mkdir()
    known = Listings()
    assert listed(known, tmp_path, monkeypatch) == []
    again = reread(known)
    assert listed(again, tmp_path, monkeypatch) is None
    assert again.folders_and_files(str(tmp_path)) == (["step9", "step10"], [])
    (tmp_path / "step9").rmdir()
    change_time(tmp_path)
    assert again.folders_and_files(str(tmp_path)) == (["step10"], [])


@pytest.mark.parametrize("kind", ["folder", "link", "empty", "young", "absent"])
def test_other_folders_are_listed_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tmp_path / "folder"
    if kind != "absent":
        folder.mkdir()
    if kind not in {"empty", "absent"}:
        (folder / "file").touch()
    if kind == "folder":
        (folder / "inside").mkdir()
    if kind == "link":
        (folder / "inside").symlink_to(tmp_path)
    if kind == "young":
        monkeypatch.setattr(listings, "is_settled", lambda *_: False)
    known = Listings()
    for one in (known, known, reread(known)):
        assert listed(one, folder, monkeypatch) is not None
    assert not known.is_new


def test_only_folders_that_were_asked_for_are_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    known = Listings()
    for name in ("a", "b"):
        known.folders_and_files(str(tmp_path / name))
    again = reread(known)
    assert again.tables() == known.tables()
    again.folders_and_files(str(tmp_path / "b"))
    assert again.tables()[1] == os.fsencode(f"{tmp_path}/b\0file")


def test_what_may_change_again_without_a_new_version_is_not_settled() -> None:
    old = time.time_ns() - 10**12
    version = FileVersion(1, 2, 3, old, old)
    assert is_settled(version)
    assert not is_settled(version, margin=10**18)
    later = old + 10**15
    assert not is_settled(version._replace(modified=later))
    assert not is_settled(version._replace(changed=later))


@pytest.mark.parametrize("tables", [(b"", b"\xff\0"), (bytes(80), b"one"), (bytes(40), b"")])
def test_tables_of_a_wrong_file_hide_nothing(tmp_path: Path, tables: tuple[bytes, bytes]) -> None:
    (tmp_path / "file").touch()
    assert Listings(*tables).folders_and_files(str(tmp_path)) == ([], ["file"])


@pytest.mark.parametrize("names", ["other", "", "../../../../blobs", ".", "/", "../../"])
def test_gc_keeps_models_that_listings_hide(tmp_path: Path, names: str) -> None:
    store = LocalStore(tmp_path / "store")
    for name in ("a", "b"):
        add_blobs(store, name, {name: blob((name, "U8", (3,), b"abc"))})
    known = store.known_references()
    for name in ("a", "b"):
        folder = store.manifest_path(name).parent
        known.listings.folders_and_files(str(folder))
        version = FileVersion.of(folder)
        assert version is not None
        known.listings._seen[str(folder)] = VERSION.pack(*version), names
    known.save()
    assert [one for one in read_catalog(store) if one.error is None] == []
    assert collect_garbage(store=store, older_than=0, force=True).blobs == ()
    for name in ("a", "b"):
        assert all(store.has_hot(one.digest) for one in store.resolve(name).blobs)
