from __future__ import annotations

from pathlib import Path

import pytest

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


def test_finds_names_in_any_case(folder: Path) -> None:
    add(folder, "one", "host/Org/MODEL")
    found = Spellings(folder).of(("host", "org", "model", "ONE"))
    assert found == [("host", "Org", "MODEL", "one"), ("host", "org", "model", "One")]
    assert Spellings(folder).of(("host", "org", "none")) == []
    assert Spellings(folder).first_tag(("host", "org", "model")) == "One"
    assert not Spellings(folder).has_tags(("host", "org", "none"))


def test_lists_a_folder_again_only_after_others_changed_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def noted(path: Path) -> list[str]:
        listed.append(path.name)
        return each_name(path)

    monkeypatch.setattr("blobstore.store.spellings.each_name", noted)
    found = Spellings(folder)
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


def test_keeps_a_bounded_number_of_folders(folder: Path) -> None:
    found = Spellings(folder)
    for number in range(3 * spellings._MAX_FOLDERS):
        add(folder, "tag", f"host/org/model{number}")
        assert found.has_tags(("host", "org", f"model{number}"))
    assert len(found._known) <= spellings._MAX_FOLDERS
