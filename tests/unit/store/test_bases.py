from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.files import status_of
from blobstore.errors import BlobDamaged
from blobstore.manifests.descriptor import Descriptor
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store.bases import WholeBases, link_base, states, which_are_whole
from blobstore.store.local import LocalStore
from tests.support.frozen import flip, flip_in_place, layer, layers, put, tuned, weights
from tests.support.models import add_blobs

CHILD = layer("x", tuned(10, 1))


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A store with ``child``, a delta against ``base``, which is hot, cold and has a second link."""
    store = LocalStore(tmp_path / "store", lock_timeout=0.05)
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": CHILD})
    freeze_models(["child"], store=store, base="base")
    freeze_models(["base"], store=store, keep_hot=True)
    return store


@pytest.fixture
def base(store: LocalStore) -> Descriptor:
    return layers(store, "base")["x"]


def read(store: LocalStore) -> bytes:
    return b"".join(map(bytes, store.read_pieces(layers(store, "child")["x"].digest, len(CHILD))))


def paths(store: LocalStore, base: Descriptor) -> dict[str, str]:
    layout = store._layout
    return {
        "hot": layout.blob(base.digest),
        "cold": layout.cold_blob(base.digest),
        "pinned": layout.base_blob(base.digest),
    }


def truncate(path: str) -> None:
    data = Path(path).read_bytes()
    Path(path).unlink()
    Path(path).write_bytes(data[:-1])


def remove(path: str) -> None:
    Path(path).unlink()


DAMAGES: list[Callable[[str], None]] = [flip, truncate, remove]


@pytest.mark.parametrize("intact", ["hot", "cold", "pinned"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_any_intact_form_is_enough(
    store: LocalStore, base: Descriptor, intact: str, damage: Callable[[str], None]
) -> None:
    for form, path in paths(store, base).items():
        if form != intact:
            damage(path)
    assert read(store) == CHILD


@pytest.mark.parametrize("damage", DAMAGES)
def test_reports_the_base_if_no_form_is_intact(
    store: LocalStore, base: Descriptor, damage: Callable[[str], None]
) -> None:
    for path in paths(store, base).values():
        damage(path)
    with pytest.raises(BlobDamaged, match=base.digest.hex):
        read(store)


@pytest.mark.slow
def test_each_read_uses_a_form_that_is_intact_there(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "large")
    count = 1_200_000  # more than a chunk
    child = layer("x", tuned(10, 1, count))
    add_blobs(store, "base", {"x": layer("x", weights(1, count))})
    add_blobs(store, "child", {"x": child})
    freeze_models(["child"], store=store, base="base")
    freeze_models(["base"], store=store, keep_hot=True)
    base = layers(store, "base")["x"]
    found = paths(store, base)
    Path(found["pinned"]).unlink()
    flip(found["hot"], -10)
    flip(found["cold"], 1000)
    blob = store.open_cold(layers(store, "child")["x"].digest)
    buffer = memoryview(bytearray(100))
    for begin in (len(child) - 100, 1000, len(child) - 100):
        blob.read_into(begin, buffer)
        assert buffer == child[begin : begin + 100]
    with pytest.raises(BlobDamaged, match=f"its base is {base.digest}"):
        blob.read_into(0, memoryview(bytearray(len(child))))


def read_all(read_into: Callable[[int, memoryview], None]) -> bytes:
    buffer = bytearray(len(CHILD))
    read_into(0, memoryview(buffer))
    return bytes(buffer)


def test_threads_share_the_forms(store: LocalStore, base: Descriptor) -> None:
    flip(paths(store, base)["hot"])
    blob = store.open_cold(layers(store, "child")["x"].digest)
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(read_all, [blob.read_into] * 20)) == {CHILD}


def test_a_form_is_opened_only_when_it_is_needed(store: LocalStore, base: Descriptor) -> None:
    forms = store.base_files(base.digest, base.size)
    next(forms)
    Path(paths(store, base)["cold"]).write_bytes(b"no cold blob at all")
    assert list(forms) == []  # the second hard link is the first file


def test_a_restored_base_is_used_again(store: LocalStore, base: Descriptor) -> None:
    blob = store.open_cold(layers(store, "child")["x"].digest)
    found = paths(store, base)
    data = Path(found["hot"]).read_bytes()
    for path in found.values():
        Path(path).unlink()
    with pytest.raises(BlobDamaged, match="the base of cold blobs, is missing"):
        read_all(blob.read_into)
    Path(found["hot"]).write_bytes(data)
    assert read_all(blob.read_into) == CHILD


@pytest.mark.parametrize("form", ["hot", "cold", "pinned"])
def test_a_file_is_intact_until_it_changes(store: LocalStore, base: Descriptor, form: str) -> None:
    found = paths(store, base)
    for other in set(found) - {form}:
        Path(found[other]).unlink()
    bases = WholeBases(store)
    before = bases.intact_file(*base.id)
    assert before is not None
    assert before[0] == found[form]
    assert bases.intact_file(*base.id) == before == bases.file(base.digest)
    flip_in_place(found[form])
    assert bases.file(base.digest) != before
    assert bases.intact_file(*base.id) is None


@pytest.mark.parametrize("moved", ["frozen", "thawed"])
def test_a_base_that_moves_between_two_looks_is_found_again(
    store: LocalStore, base: Descriptor, monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    found = {form: Path(path) for form, path in paths(store, base).items()}
    found["pinned"].unlink()
    gone, here = ("hot", "cold") if moved == "frozen" else ("cold", "hot")
    aside = found["hot"].rename(store.root / "aside") if moved == "thawed" else None
    looks: list[Path | str] = []

    def look(path: Path | str) -> os.stat_result | None:
        """Move the base once its hot file was looked at."""
        status = status_of(path)
        if not looks and path == str(found["hot"]):
            if aside is not None:
                aside.rename(found["hot"])
            found[gone].unlink()
        looks.append(path)
        return status

    monkeypatch.setattr("blobstore.store.bases.status_of", look)
    file = WholeBases(store).intact_file(*base.id)
    assert file is not None
    assert file[0] == str(found[here])


def test_a_base_must_be_a_regular_file_to_be_intact(store: LocalStore, base: Descriptor) -> None:
    thaw_models(["base"], store=store)
    path = paths(store, base)["hot"]
    Path(path).rename(path + "-real")
    Path(path).symlink_to(path + "-real")
    bases = WholeBases(store)
    assert bases.file(base.digest) is None
    assert bases.intact_file(*base.id) is None


@pytest.mark.parametrize(
    ("hot", "cold", "expected"),
    [
        ("intact", None, (True, True)),
        ("damaged", None, (False, True)),
        (None, None, (False, True)),
        (None, "intact", (True, True)),
        (None, "damaged", (False, False)),
        ("intact", "intact", (True, True)),
        ("intact", "damaged", (True, False)),
        ("damaged", "intact", (False, True)),
        ("damaged", "damaged", (False, False)),
    ],
)
def test_returns_which_forms_are_intact(
    tmp_path: Path, hot: str | None, cold: str | None, expected: tuple[bool, bool]
) -> None:
    store = LocalStore(tmp_path / "store")
    put(store, "a", {"x": 1})
    freeze_models(["a"], store=store)
    thaw_models(["a"], store=store, keep_cold=True)
    item = layers(store, "a")["x"]
    for state, path in ((hot, store.blob_path(item.digest)), (cold, store.cold_path(item.digest))):
        if state is None:
            Path(path).unlink()
        elif state == "damaged":
            flip(path, 30_000)
    assert which_are_whole(store, item.digest, item.size, lambda _: None) == expected
    there = states(store, item.digest)
    assert [state is None for state in there] == [hot is None, cold is None]


def test_a_second_link_outlives_the_hot_file(store: LocalStore, base: Descriptor) -> None:
    Path(store.blob_path(base.digest)).unlink()
    assert link_base(store, base.digest)
    Path(store.base_path(base.digest)).unlink()
    assert not link_base(store, base.digest)


def test_a_base_that_always_changes_while_it_is_hashed_is_not_intact(
    store: LocalStore, base: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases, check, times = WholeBases(store), store.check_digest, itertools.count(1)

    def changing(digest: Digest, size: int) -> None:
        check(digest, size)
        os.utime(store.blob_path(digest), (1, next(times)))

    monkeypatch.setattr(store, "check_digest", changing)
    assert bases.intact_file(*base.id) is None
    monkeypatch.setattr(store, "check_digest", check)
    assert bases.intact_file(*base.id) is not None


def test_a_base_whose_hot_file_is_removed_while_it_is_hashed_is_intact_in_its_cold_form(
    store: LocalStore, base: Descriptor, monkeypatch: pytest.MonkeyPatch
) -> None:
    bases, check = WholeBases(store), store.check_digest

    def freezing(digest: Digest, size: int) -> None:
        Path(store.blob_path(digest)).unlink()
        check(digest, size)

    monkeypatch.setattr(store, "check_digest", freezing)
    form = bases.intact_file(*base.id)
    assert form is not None
    assert form[0] == store.cold_path(base.digest)
