from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.interrupts import Stopped
from blobstore.errors import StoreError
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models
from blobstore.store.local import LocalStore
from blobstore.store.scan import (
    digest_of,
    file_sizes,
    is_folder,
    list_names,
    scan_folder,
    walk_files,
)
from tests.support.models import add_blobs

LISTINGS = [
    list_names,
    scan_folder,
    lambda folder: list(walk_files(folder)),
    lambda folder: list(file_sizes(folder, [])),
]


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_folder_that_does_not_exist_is_empty(
    tmp_path: Path, listing: Callable[[Path], list[object]]
) -> None:
    assert listing(tmp_path / "none") == []


@pytest.mark.parametrize("listing", LISTINGS)
def test_a_broken_link_and_a_file_are_not_empty_folders(
    tmp_path: Path, listing: Callable[[Path], list[object]]
) -> None:
    (tmp_path / "link").symlink_to("unmounted")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(StoreError, match=f"cannot list '{tmp_path / name}'"):
            listing(tmp_path / name)


def test_a_request_to_end_the_program_stops_a_walk(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for name in "ab":
        (tmp_path / name).touch()
    walk = walk_files(tmp_path)
    next(walk)
    request.getfixturevalue("requested")
    with pytest.raises(Stopped):
        next(walk)


def test_listings_are_sorted_by_name(tmp_path: Path) -> None:
    for name in ("b", "c", "a"):
        (tmp_path / name).touch()
    assert list_names(tmp_path) == ["a", "b", "c"]
    assert [entry.name for entry in scan_folder(tmp_path)] == ["a", "b", "c"]


def test_walking_finds_everything_but_folders_and_follows_no_links(tmp_path: Path) -> None:
    for name in ("in/deep", "out"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").touch()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "out")
    os.mkfifo(tmp_path / "in" / "pipe")
    found = [entry.path for entry in walk_files(tmp_path, {str(tmp_path / "out")})]
    assert found == [str(tmp_path / "in" / name) for name in ("deep/file", "link", "pipe")]


@pytest.mark.parametrize("name", ["", "published", "lock", "history", "arrivals"])
def test_a_store_with_a_link_in_place_of_its_own_is_not_written(
    store: LocalStore, tmp_path: Path, name: str
) -> None:
    add_blobs(store, "team/m:v1", {"x": b"x"})
    place, away = store.root / ".blobstore" / name, tmp_path / "away"
    if place.exists():
        place.rename(away)
    place.symlink_to(away)
    before = sorted(away.rglob("*"))
    writes: list[Callable[[], object]] = [
        lambda: collect_garbage(store=store, older_than=0, force=True),
        lambda: remove_models("team/m:v1", store=store),
        lambda: copy_model("team/m:v1", "team/n", store=store),
        lambda: store.ingest().__enter__(),
    ]
    for write in writes:
        with pytest.raises(StoreError, match=f"{place.name}' is a link"):
            write()
    assert sorted(away.rglob("*")) == before


def test_links_that_lead_to_other_disks_are_allowed(store: LocalStore, tmp_path: Path) -> None:
    add_blobs(store, "team/m:v1", {"x": b"x"})
    freeze_models("team/m:v1", store=store)
    for place in (store.folder("blobs"), store.folder("cold")):
        place.rename(tmp_path / place.name)
        place.symlink_to(tmp_path / place.name)
    remove_models("team/m:v1", store=store)
    assert collect_garbage(store=store, older_than=0, force=True).refusal == ""


def test_links_to_folders_are_folders(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "broken").symlink_to("none")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    names = ("link", "broken", "loop", "file", "none")
    assert [is_folder(str(tmp_path / name)) for name in names] == [True, False, False, False, False]


def test_names_of_blobs_spell_digests() -> None:
    digest = Digest.of(b"")
    assert digest_of(digest.file_name) == digest
    for name in ("sha256-0", f"{digest.file_name}-partial", str(digest).upper(), ""):
        assert digest_of(name) is None
