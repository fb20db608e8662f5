from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.history import History, WholeHistory
from blobstore.store.layout import Layout

NAME, OTHER = map(Reference.parse, ("name", "host.example/team/name"))


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(Layout(tmp_path))


def history_of(root: Path) -> WholeHistory:
    found = WholeHistory(Layout(root))
    found.update()
    return found


def kept(history: History, reference: Reference) -> list[bytes]:
    return [former.data for former in history.of(reference)]


def test_keeps_manifests_by_name_latest_first(history: History, tmp_path: Path) -> None:
    history.keep(NAME, b"1")
    history.keep(OTHER, b"2")
    history.keep(NAME, b"3")

    assert kept(history, NAME) == [b"3", b"1"]
    assert kept(history, OTHER) == [b"2"]
    assert history_of(tmp_path).manifests() == set(map(Digest.of, (b"1", b"2", b"3")))
    assert [former.until for former in history.of(NAME)] == sorted(
        (former.until for former in history.of(NAME)), reverse=True
    )


def test_the_folder_is_listed_once_for_many_names(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name may have thousands of others next to it, and other processes wait."""
    names = [Reference.parse(f"run:{number}") for number in range(30)]
    listed: list[Path] = []

    def list_names(folder: Path) -> list[str]:
        listed.append(folder)
        return []

    monkeypatch.setattr("blobstore.store.history.list_names", list_names)
    history.keep_all((name, str(name).encode()) for name in (*names, NAME, NAME))
    monkeypatch.undo()

    assert len(listed) == 1
    for name in names:
        assert kept(history, name) == [str(name).encode()]
    assert len(kept(history, NAME)) == 2


def test_keeps_the_latest_twenty_of_a_name(history: History) -> None:
    history.keep(OTHER, b"other")
    for number in range(23):
        history.keep(NAME, b"%d" % number)

    assert kept(history, NAME) == [b"%d" % number for number in reversed(range(3, 23))]
    assert kept(history, OTHER) == [b"other"]


def test_a_clock_that_was_set_back_changes_no_order(history: History, tmp_path: Path) -> None:
    history.keep(NAME, b"future")
    folder = Layout(tmp_path).history
    (path,) = folder.iterdir()
    later = int(path.name.partition("-")[0]) + 10**18
    path.rename(folder / f"{later:020d}-{path.name.partition('-')[2]}")
    for number in range(20):
        history.keep(NAME, b"%d" % number)

    assert kept(history, NAME) == [b"%d" % number for number in reversed(range(20))]


def test_the_longest_name_fits_a_file_name(history: History) -> None:
    name = Reference("h" * 255, "n" * 80, "m" * 80, "t" * 80)
    history.keep(name, b"x")
    assert kept(history, name) == [b"x"]


def test_a_store_without_history_has_none(history: History, tmp_path: Path) -> None:
    assert kept(history, NAME) == []
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_skipped(history: History, tmp_path: Path) -> None:
    history.keep(NAME, b"x")
    folder = Layout(tmp_path).history
    (key,) = (path.name.partition("-")[2] for path in folder.iterdir())
    (folder / "notes").write_bytes(b"?")
    (folder / f"x-{key}").write_bytes(b"?")
    (folder / f"{1:020d}-{key}").mkdir()
    (folder / f"{2:020d}-{key}").symlink_to("nowhere")
    os.mkfifo(folder / f"{3:020d}-{key}")
    (folder / f"{'9' * 200}-{key}").write_bytes(b"?")
    (folder / f"{'٣' * 20}-{key}").write_bytes(b"?")

    assert kept(history, NAME) == [b"x"]
    assert history_of(tmp_path).manifests() == {Digest.of(b"x")}
