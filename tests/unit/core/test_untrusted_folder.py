"""A folder that is opened once: what its names and links may lead to."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from blobstore.core.untrusted_folder import MAX_DEPTH, Folder
from blobstore.errors import BlobstoreError, SourceError


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Return a folder with files, and with a private one next to it."""
    (tmp_path / "top" / "a" / "b").mkdir(parents=True)
    (tmp_path / "top" / "a" / "b" / "x").write_text("inside")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "x").write_text("secret")
    return tmp_path / "top"


def content(folder: Folder, name: str) -> bytes:
    descriptor, size = folder.open(name)
    try:
        return os.pread(descriptor, size, 0)
    finally:
        os.close(descriptor)


def following(top: Path) -> Folder:
    return Folder(top, boundary=Path(os.path.realpath(top)))


@pytest.mark.parametrize("follows", [False, True])
def test_what_is_in_a_folder_is_read_by_its_name(top: Path, *, follows: bool) -> None:
    folder = following(top) if follows else Folder(top)
    assert folder.names() == ["a"]
    assert folder.names("a") == ["b"]
    assert content(folder, "a/b/x") == b"inside"
    assert folder.status("a/b/x").st_size == 6
    assert folder.folder("a").names("b") == ["x"]
    assert {name for name, _ in folder.walk()} == {"a", "a/b", "a/b/x"}
    for name in ("no", "a/no/x"):
        with pytest.raises(FileNotFoundError):
            folder.open(name)
    with pytest.raises(NotADirectoryError) as caught:
        folder.names("a/b/x")
    assert caught.value.filename == str(top / "a/b/x")
    folder.close()
    with pytest.raises(OSError, match="descriptor"):
        folder.names()


@pytest.mark.parametrize("follows", [False, True])
def test_names_that_lead_out_are_refused(top: Path, *, follows: bool) -> None:
    folder = following(top) if follows else Folder(top)
    for name in ("../private/x", "a/../../private/x"):
        with pytest.raises(OSError, match="leads out"):
            folder.open(name)


def test_no_link_is_followed_without_a_boundary(top: Path) -> None:
    (top / "file").symlink_to("a/b/x")
    (top / "folder").symlink_to("a")
    folder = Folder(top)
    for name in ("file", "folder/b/x"):
        with pytest.raises(OSError, match=r"symbolic|directory") as caught:
            folder.open(name)
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    with pytest.raises(OSError, match="symbolic"):
        folder.status("file")
    for name in ("folder", "folder/b"):
        with pytest.raises(NotADirectoryError):
            folder.names(name)


def test_links_are_followed_within_the_boundary_alone(top: Path) -> None:
    (top / "relative").symlink_to("a/b/x")
    (top / "absolute").symlink_to(top / "a")
    (top / "out").symlink_to("../private")
    (top / "broken").symlink_to("../no")
    (top / "loop").symlink_to("loop")
    folder = following(top)
    assert content(folder, "relative") == content(folder, "absolute/b/x") == b"inside"
    assert folder.names("absolute") == ["b"]
    for name in ("out", "out/x"):
        with pytest.raises(SourceError, match=f"{name}' leads out .* --exclude {name}"):
            folder.status(name)
    with pytest.raises(FileNotFoundError):
        folder.status("broken")
    with pytest.raises(OSError, match="symbolic"):
        folder.status("loop")


def test_the_boundary_may_be_above_the_folder(tmp_path: Path, top: Path) -> None:
    (top / "link").symlink_to("../private/x")
    folder = Folder(top, boundary=Path(os.path.realpath(tmp_path)))
    assert content(folder, "link") == b"secret"
    assert content(folder, "a/b/x") == b"inside"


def test_a_link_that_is_set_after_the_folder_was_opened_leads_nowhere(
    top: Path, tmp_path: Path
) -> None:
    for folder in (Folder(top), following(top)):
        assert folder.names() == ["a"]
    top.rename(tmp_path / "moved")
    top.symlink_to("private")
    assert Folder(top).names() == ["x"]  # the user has named the link
    for opened in (folder,):
        assert content(opened, "a/b/x") == b"inside"


def test_a_link_that_is_swapped_after_it_was_resolved_is_refused(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "link").symlink_to("a/b/x")
    folder = following(top)
    real = os.path.realpath

    def realpath(path: Path) -> str:
        found = real(path)
        (top / "a" / "b").rename(top / "moved")
        (top / "a" / "b").symlink_to(top.parent / "private")
        return found

    monkeypatch.setattr(os.path, "realpath", realpath)
    with pytest.raises(NotADirectoryError):
        content(folder, "link")


def test_pipes_and_folders_are_no_files(top: Path) -> None:
    os.mkfifo(top / "pipe")
    folder = Folder(top)
    for name in ("pipe", "a"):
        with pytest.raises(BlobstoreError, match="not a regular file"):
            folder.open(name)


def test_another_process_opens_the_folder_itself(top: Path) -> None:
    folder = following(top)
    assert folder.names() == ["a"]
    copy = pickle.loads(pickle.dumps(folder))
    folder.close()
    assert copy.names() == ["a"]


def test_no_descriptor_stays_open(top: Path) -> None:
    before = len(os.listdir("/dev/fd"))
    folder = following(top)
    (top / "link").symlink_to("a")
    content(folder, "link/b/x")
    folder.folder("a/b").close()
    with pytest.raises(FileNotFoundError):
        folder.names("a/b/no/x")
    del folder  # as a source that could not be opened
    assert len(os.listdir("/dev/fd")) == before


def test_folders_are_walked_through_to_a_depth(top: Path) -> None:
    deepest = top.joinpath(*["d"] * MAX_DEPTH)
    deepest.mkdir(parents=True)
    with_file = deepest / "x"
    with_file.write_text("inside")
    folder = Folder(top)
    assert dict(folder.walk())[str(with_file.relative_to(top))].st_size == 6
    before = len(os.listdir("/dev/fd"))
    (deepest / "d").mkdir()
    with pytest.raises(OSError, match="64 deep") as caught:
        list(folder.walk())
    assert caught.value.filename == str(top)
    assert len(os.listdir("/dev/fd")) == before


def test_a_walk_follows_no_link(top: Path) -> None:
    (top / "link").symlink_to("a")
    assert {name for name, _ in following(top).walk()} == {"a", "a/b", "a/b/x", "link"}
