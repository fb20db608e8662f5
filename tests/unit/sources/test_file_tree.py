from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from blobstore.core.untrusted_folder import Folder
from blobstore.errors import DamagedSource, SourceError
from blobstore.sources.file_tree import FileTree

NAMES = ("config.json", "unet/config.json", "unet/a/b.bin", "a/b/c/d.json")


@pytest.fixture(params=["disk", "listing"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def tree_of(folder: Path, kind: str, *, exclude: tuple[str, ...] = ()) -> FileTree:
    """Return the same files as a folder on disk and as a listing of files that are not there yet."""
    if kind == "listing":
        return FileTree(folder, exclude=exclude, listed=dict.fromkeys(NAMES, 2))
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    return FileTree(folder, exclude=exclude)


def test_a_folder_and_a_listing_have_the_same_files(tmp_path: Path, kind: str) -> None:
    tree = tree_of(tmp_path, kind)
    assert tree.entries() == ["a", "config.json", "unet"]
    assert tree.entries("unet") == ["a", "config.json"]
    assert tree.entries("none") == tree.entries("config.json") == []
    for name, is_there, is_folder in (
        ("unet", True, True),
        ("unet/a", True, True),
        ("unet/a/b.bin", True, False),
        ("none", False, False),
        ("none/x", False, False),
    ):
        assert (tree.has(name), tree.is_folder(name)) == (is_there, is_folder)
    assert tree.size("config.json") == 2
    assert tree.size("unet") is None
    # The names in a store have at most three parts.
    assert list(tree.files_below()) == ["config.json", "unet/a/b.bin", "unet/config.json"]
    assert tree.label("unet") == f"'{tmp_path}/unet'"
    assert pickle.loads(pickle.dumps(tree)).entries() == tree.entries()


def test_excluded_files_and_folders_do_not_exist(tmp_path: Path, kind: str) -> None:
    tree = tree_of(tmp_path, kind, exclude=("unet/*.json", "a", "un*/a/*"))
    assert tree.entries() == ["config.json", "unet"]
    assert tree.entries("unet") == ["a"]
    assert list(tree.files_below()) == ["config.json"]
    assert not tree.has("unet/config.json")


def test_hidden_folders_are_not_searched(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config.json").touch()
    (tmp_path / ".x.json").touch()
    assert list(FileTree(tmp_path).files_below()) == [".x.json"]


def test_a_broken_link_is_damage(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("nowhere")
    with pytest.raises(DamagedSource, match=r"x\.json' is a broken link"):
        FileTree(tmp_path).size("x.json")


def test_a_folder_that_a_link_leads_out_to_is_seen_and_not_listed(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "x.json").touch()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "data").symlink_to("../private")
    tree = FileTree(tmp_path / "m")
    assert tree.is_folder("data")
    assert list(tree.files_below()) == []
    for read in (tree.entries, tree.size, tree.path):
        with pytest.raises(SourceError, match="leads out of the model's folder by a link"):
            read("data" if read == tree.entries else "data/x.json")
    assert not FileTree(tmp_path / "m", exclude=("data",)).is_folder("data")


def test_a_file_that_is_swapped_for_a_link_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("secret")
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "x").write_text("public")
    tree = FileTree(tmp_path / "m")
    path = tree.path("x")
    path.unlink()
    path.symlink_to("../x")
    with pytest.raises(SourceError, match="leads out"):
        tree.versions.open(path)
    path.unlink()
    path.write_text("public")  # the same bytes, and another file
    with pytest.raises(DamagedSource, match="changed"):
        tree.versions.open(path)
    tree.close()
    with pytest.raises(OSError, match="descriptor"):
        tree.entries("m")


def test_no_file_is_left_out_because_it_cannot_be_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x").write_text("content")
    tree = FileTree(tmp_path)
    assert list(tree.files_below()) == ["folder/x"]

    def fails(*_: object) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Folder, "status", fails)
    for look in (tree.is_folder, tree.size, tree._is_inside):
        with pytest.raises(SourceError, match="cannot read .*folder.*: Input/output error"):
            look("folder")
