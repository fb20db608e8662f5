from __future__ import annotations

import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.errors import StoreError
from blobstore.store import spellings
from blobstore.store.scan import each_name
from blobstore.store.spellings import Spellings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for tag in ("One", "two"):
        add(tmp_path, tag)
    return tmp_path


def add(folder: Path, tag: str, repository: str = "host/org/model") -> None:
    path = folder / repository / tag
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def spellings_of(folder: Path) -> Spellings:
    return Spellings(folder, folder.with_suffix(".journal"))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the folders that are listed."""
    listed: list[str] = []

    def noted(path: str) -> list[str]:
        listed.append(Path(path).name)
        return each_name(path)

    monkeypatch.setattr(spellings, "each_name", noted)
    return listed


def test_finds_names_in_any_case(folder: Path) -> None:
    add(folder, "one", "host/Org/MODEL")
    found = spellings_of(folder).of(("host", "org", "model", "ONE"))
    assert found == [("host", "Org", "MODEL", "one"), ("host", "org", "model", "One")]
    assert spellings_of(folder).of(("host", "org", "none")) == []
    assert spellings_of(folder).first_tag(("host", "org", "model")) == "One"
    assert not spellings_of(folder).has_tags(("host", "org", "none"))


def test_lists_a_folder_again_only_after_others_changed_it(folder: Path, listed: list[str]) -> None:
    found = spellings_of(folder)
    assert found.of(("host", "org", "model", "new")) == []
    assert listed == [folder.name, "host", "org", "model"]
    add(folder, "new")
    found.note(("host", "org", "model", "new"))
    assert found.of(("host", "org", "model", "NEW")) == [("host", "org", "model", "new")]
    assert len(listed) == 4
    (folder / "host/org/model/new").unlink()
    add(folder, "NEW", "host/org/other")
    assert found.of(("host", "org", "model", "NEW")) == []
    add(folder, "newer")
    assert found.of(("host", "org", "model", "NEWER")) == [("host", "org", "model", "newer")]
    listed[4:] = []
    assert found.of(("host", "org", "other", "new")) == [("host", "org", "other", "NEW")]
    assert listed[4:] == ["other"]


@pytest.mark.parametrize("is_removed", [True, False])
def test_names_of_a_folder_that_could_not_be_listed_are_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_removed: bool
) -> None:
    def refused(path: str) -> list[str]:
        raise StoreError(f"{path}: cannot be read")

    found = spellings_of(folder)
    repository = "host", "org", "model"
    assert found.of((*repository, "one")) == [(*repository, "One")]
    shutil.rmtree(folder / "host/org/model")
    if not is_removed:
        add(folder, "none")
        monkeypatch.setattr(spellings, "each_name", refused)
    assert not found.has_tags(repository)
    monkeypatch.undo()
    add(folder, "one")
    found.note((*repository, "one"))
    assert found.of((*repository, "ONE")) == [(*repository, "one")]


def test_keeps_a_bounded_number_of_folders(folder: Path) -> None:
    found = spellings_of(folder)
    for number in range(3 * spellings._MAX_FOLDERS):
        add(folder, "tag", f"host/org/model{number}")
        assert found.has_tags(("host", "org", f"model{number}"))
    assert len(found._known) <= spellings._MAX_FOLDERS


def test_several_threads_may_ask_and_note_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spellings, "_MAX_FOLDERS", 2)  # so that each forgets what others know
    found = spellings_of(folder)

    def given(number: int) -> None:
        parts = "host", "org", "model", f"tag{number}"
        assert found.of(parts[:3]) == [parts[:3]]
        add(folder, parts[3])
        found.note(parts)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(given, range(400)))
    finally:
        sys.setswitchinterval(interval)


def test_names_that_other_processes_give_are_not_listed(folder: Path, listed: list[str]) -> None:
    repository = ("host", "org", "model")
    one, other = spellings_of(folder), spellings_of(folder)
    assert one.of((*repository, "a")) == other.of((*repository, "a")) == []
    listed.clear()
    for number in range(3):
        for own, its in ((one, other), (other, one)):
            tag = f"New{number}-{id(own)}"
            assert own.of((*repository, tag)) == []
            add(folder, tag)
            own.note((*repository, tag))
            assert its.of((*repository, tag.upper())) == [(*repository, tag)]
    assert listed == []
    (folder / "host/org/model/One").unlink()
    assert one.of((*repository, "one")) == []
    assert listed == ["model"], "the journal does not lead to this version"


@pytest.mark.parametrize(
    "journal", [b"", b"\xff\n", b"{}\n", b'["host/org/model", "x", 1, 2]\n', None]
)
def test_a_folder_is_listed_if_the_journal_is_damaged(
    folder: Path, listed: list[str], journal: bytes | None
) -> None:
    repository = ("host", "org", "model")
    one, other = spellings_of(folder), spellings_of(folder)
    assert one.of((*repository, "a")) == other.of((*repository, "a")) == []
    listed.clear()
    add(folder, "new")
    other.note((*repository, "new"))
    path = folder.with_suffix(".journal")
    if journal is None:
        path.chmod(0o666)
    else:
        path.write_bytes(journal)
    assert one.of((*repository, "NEW")) == [(*repository, "new")]
    assert listed == ["model"]


def test_a_long_journal_begins_again(
    folder: Path, listed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spellings, "_MAX_BYTES", 1000)
    repository = ("host", "org", "model")
    one, other = spellings_of(folder), spellings_of(folder)
    one.of((*repository, "a"))
    sizes = []
    for number in range(20):
        other.of((*repository, "a"))
        add(folder, f"tag{number}")
        other.note((*repository, f"tag{number}"))
        path = folder.with_suffix(".journal")
        sizes.append(path.stat().st_size if path.exists() else 0)
    assert 0 in sizes
    assert max(sizes) <= 1000
    assert one.of((*repository, "TAG19")) == [(*repository, "tag19")]


def test_another_process_lists_the_names_itself(folder: Path) -> None:
    add(folder, "v1")
    known = spellings_of(folder)
    asked = ("HOST", "org", "model", "V1")
    assert pickle.loads(pickle.dumps(known)).of(asked) == known.of(asked) != []
