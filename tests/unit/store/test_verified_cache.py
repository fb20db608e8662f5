from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.core.digest import Digest
from blobstore.core.files import FileVersion, open_own
from blobstore.errors import BlobDamaged, StoreError
from blobstore.manifests.descriptor import Descriptor
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.store import verified_cache as verified
from blobstore.store.local import LocalStore
from blobstore.store.verified_cache import VerifiedBlobs
from tests.support import frozen, sandbox
from tests.support.models import add_blobs

DATA = b"bytes of a blob"
DIGEST = Digest.of(DATA)
SIZE = len(DATA)
OTHER = Digest.of(b"another")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """Return a store with one blob, which is old enough to be recorded."""
    monkeypatch.setattr(verified, "_MARGIN_NS", 0)
    store = LocalStore(tmp_path / "store")
    store.folder("blobs").mkdir(parents=True)
    cache_of(store).parent.mkdir()
    path_of(store).write_bytes(DATA)
    return store


def path_of(store: LocalStore, digest: Digest = DIGEST) -> Path:
    return Path(store.blob_path(digest))


def cache_of(store: LocalStore) -> Path:
    return store._layout.verified(os.geteuid())


def note(store: LocalStore, *digests: Digest) -> None:
    blobs = VerifiedBlobs(store)
    for digest in digests or (DIGEST,):
        with blobs.noting(digest):
            pass
    blobs.save()


def has(store: LocalStore, digest: Digest = DIGEST, size: int = SIZE) -> bool:
    return VerifiedBlobs(store).has(digest, size)


def test_remembers_intact_blobs(store: LocalStore) -> None:
    assert not has(store)
    note(store)
    assert has(store)
    assert not has(store, OTHER)
    assert not has(store, size=SIZE + 1)


def test_readers_create_no_folder_for_the_cache(store: LocalStore) -> None:
    cache_of(store).parent.rmdir()
    note(store)
    assert [path.name for path in store.root.iterdir()] == ["blobs"]


def test_keeps_only_what_was_saved(store: LocalStore) -> None:
    with VerifiedBlobs(store).noting(DIGEST):
        pass
    assert not has(store)
    assert not cache_of(store).exists()


def test_the_cache_is_the_only_new_file_and_lies_outside_the_folders_of_ollama(
    store: LocalStore,
) -> None:
    note(store)
    assert [path.name for path in store.folder("blobs").iterdir()] == [DIGEST.file_name]
    assert {path.name for path in store.root.iterdir()} == {"blobs", ".blobstore"}
    assert list((store.root / ".blobstore").iterdir()) == [cache_of(store)]
    assert cache_of(store).stat().st_mode & 0o777 == 0o600


# Changes of the blob


def rewrite(path: Path) -> None:
    found = path.stat()
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))


def replace(path: Path) -> None:
    found = path.stat()
    new = path.with_name("new")
    new.write_bytes(DATA[::-1])
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(path)


def make_a_link(path: Path) -> None:
    target = path.with_name("target")
    path.replace(target)
    path.symlink_to(target)


@pytest.mark.parametrize("change", [rewrite, replace, make_a_link, Path.unlink])
def test_a_changed_blob_is_not_trusted(store: LocalStore, change: Callable[[Path], None]) -> None:
    note(store)
    change(path_of(store))
    assert not has(store)


@pytest.mark.parametrize("field", range(5))
def test_every_property_of_the_file_counts(store: LocalStore, field: int) -> None:
    note(store)
    blobs = VerifiedBlobs(store)
    found = path_of(store).stat()
    version = [found.st_dev, found.st_ino, SIZE, found.st_mtime_ns, found.st_ctime_ns]
    assert blobs._known(DIGEST.hex) == tuple(version)
    version[field] += 1
    blobs._new[DIGEST.hex] = FileVersion(*version)
    blobs.save()
    assert blobs._known(DIGEST.hex) == tuple(version)
    assert not blobs.has(DIGEST, version[2])


def test_a_blob_that_changed_just_before_it_was_hashed_is_not_noted(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_MARGIN_NS", 3600 * 10**9)
    note(store)
    assert not has(store)


def test_it_counts_when_a_blob_was_opened_not_when_all_of_it_was_read(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_MARGIN_NS", 3600 * 10**9)
    blobs = VerifiedBlobs(store)
    with blobs.noting(DIGEST):
        monkeypatch.setattr(verified, "_MARGIN_NS", 0)  # as if reading it took an hour
    blobs.save()
    assert not has(store)


def test_a_blob_from_the_future_is_not_noted(store: LocalStore) -> None:
    year = 365 * 86400 * 10**9
    found = path_of(store).stat()
    os.utime(path_of(store), ns=(found.st_atime_ns, found.st_mtime_ns + year))
    note(store)
    assert not has(store)


def test_a_blob_that_changes_while_it_is_hashed_is_not_noted(store: LocalStore) -> None:
    blobs = VerifiedBlobs(store)
    with blobs.noting(DIGEST):
        rewrite(path_of(store))
    blobs.save()
    assert not has(store)


@pytest.mark.parametrize(("error", "is_kept"), [(BlobDamaged, False), (StoreError, True)])
def test_only_damage_makes_the_cache_forget_a_blob(
    store: LocalStore, error: type[Exception], is_kept: bool
) -> None:
    note(store)
    blobs = VerifiedBlobs(store)
    with pytest.raises(error), blobs.noting(DIGEST):
        raise error(str(DIGEST))
    blobs.save()
    assert has(store) is is_kept


# Cold blobs


@pytest.fixture
def delta(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalStore, Descriptor]:
    """Return a store with a cold blob that is a delta, and was found intact."""
    monkeypatch.setattr(verified, "_MARGIN_NS", 0)
    store = LocalStore(tmp_path / "frozen")
    frozen.put(store, "base", {"a": 1})
    add_blobs(store, "tuned", {"a": frozen.layer("a", frozen.tuned(2, of=1))})
    freeze_models(["tuned"], store=store, base="base")
    layer = frozen.layers(store, "tuned")["a"]
    assert store.open_cold(*layer.id).base
    note_cold(store, layer)
    assert VerifiedBlobs(store).has_cold(*layer.id)
    return store, layer


def test_the_cache_is_opened_once_for_all_blobs_of_a_model(
    delta: tuple[LocalStore, Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layer = delta
    hot = Digest.of(DATA)
    path_of(store, hot).write_bytes(DATA)
    note(store, hot)
    opened = list[Path]()

    def noted(path: Path, access: int = os.O_RDONLY) -> Any:
        opened.append(path)
        return open_own(path, access)

    monkeypatch.setattr(verified, "open_own", noted)
    blobs = [(hot, SIZE), layer.id, (OTHER, 3), (hot, SIZE + 1)]
    assert VerifiedBlobs(store).unknown(blobs) == {(OTHER, 3), (hot, SIZE + 1)}
    assert opened == [cache_of(store)]
    cache_of(store).unlink()
    assert VerifiedBlobs(store).unknown(blobs) == set(blobs)


def note_cold(store: LocalStore, layer: Descriptor) -> None:
    blobs = VerifiedBlobs(store)
    _, before = blobs.open_cold(*layer.id)
    blobs.note(before)
    blobs.save()


def test_a_cold_blob_is_not_trusted_as_another_form_or_size(
    delta: tuple[LocalStore, Descriptor],
) -> None:
    store, layer = delta
    blobs = VerifiedBlobs(store)
    assert not blobs.has(*layer.id)
    assert not blobs.has_cold(layer.digest, layer.size + 1)
    frozen.flip(store.cold_path(layer.digest))
    assert not blobs.has_cold(*layer.id)


def test_a_delta_is_not_trusted_if_its_base_has_changed(
    delta: tuple[LocalStore, Descriptor],
) -> None:
    store, layer = delta
    base = store.open_cold(*layer.id).base
    assert base is not None
    frozen.flip_in_place(store.blob_path(base))
    assert not VerifiedBlobs(store).has_cold(*layer.id)


def test_a_thawed_blob_is_not_trusted(delta: tuple[LocalStore, Descriptor]) -> None:
    store, layer = delta
    thaw_models(["tuned"], store=store)
    blobs = VerifiedBlobs(store)
    assert not blobs.has_cold(*layer.id)
    assert not blobs.has(*layer.id)


def test_a_cold_blob_that_was_replaced_after_it_was_opened_is_not_noted(
    delta: tuple[LocalStore, Descriptor], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, layer = delta
    real = store.open_cold

    def opened(*arguments: Any) -> Any:
        blob = real(*arguments)
        frozen.flip(store.cold_path(layer.digest), -1)
        frozen.flip(store.cold_path(layer.digest), -1)
        return blob

    monkeypatch.setattr(store, "open_cold", opened)
    note_cold(store, layer)
    monkeypatch.undo()
    assert not VerifiedBlobs(store).has_cold(*layer.id)


def test_a_cold_blob_that_is_damaged_is_forgotten(delta: tuple[LocalStore, Descriptor]) -> None:
    store, layer = delta
    blobs = VerifiedBlobs(store)
    blobs.forget(blobs.open_cold(*layer.id)[1])
    blobs.save()
    assert not VerifiedBlobs(store).has_cold(*layer.id)


def test_what_another_instance_has_saved_is_seen(store: LocalStore) -> None:
    blobs = VerifiedBlobs(store)
    assert not blobs.has(DIGEST, SIZE)
    note(store)
    assert blobs.has(DIGEST, SIZE)


# The cache file


_DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda data: b"",
    lambda data: data[:-1],
    lambda data: data + b"x",
    lambda data: data + bytes(8192),  # three pages
    lambda data: data[:4096],
    lambda data: b"\xff" * len(data),
    lambda data: data.replace(b"blobs 2", b"blobs 1"),
    lambda data: b"verified blobs 1\n" + str(Digest.of(b"")).encode() + b"\n",
]


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_malformed_cache_is_ignored_and_rewritten(
    store: LocalStore, damage: Callable[[bytes], bytes]
) -> None:
    note(store)
    whole = cache_of(store).read_bytes()
    cache_of(store).write_bytes(damage(whole))
    assert not has(store)
    assert VerifiedBlobs(store).saved_at == 0
    note(store)
    assert cache_of(store).read_bytes() == whole


def test_a_record_with_any_bit_flipped_is_no_entry(store: LocalStore) -> None:
    note(store)
    whole = cache_of(store).read_bytes()
    begin = whole.index(bytes.fromhex(DIGEST.hex))
    for place in range(begin, begin + verified._SLOT):
        changed = bytearray(whole)
        changed[place] ^= 1
        cache_of(store).write_bytes(changed)
        assert not has(store), place
    note(store)
    assert has(store)


def test_an_entry_is_found_only_where_a_record_begins(store: LocalStore) -> None:
    note(store)
    whole = bytearray(cache_of(store).read_bytes())
    begin = whole.index(bytes.fromhex(DIGEST.hex))
    record = whole[begin : begin + verified._SLOT]
    whole[begin : begin + verified._SLOT + 8] = bytes(8) + record
    cache_of(store).write_bytes(whole)
    assert not has(store)


def test_a_cache_keeps_all_entries_of_a_large_store(store: LocalStore) -> None:
    found = [Digest.of(bytes([number % 256, number // 256])) for number in range(600)]
    version = FileVersion(1, 2**64 - 1, 3, -4, 2**63 - 1)
    for part in (found[:1], found[1:100], found[100:]):
        blobs = VerifiedBlobs(store)
        blobs._new = {digest.hex: version for digest in part}
        blobs.save()
    assert {VerifiedBlobs(store)._known(digest.hex) for digest in found} == {version}
    for digest in found[::2]:
        blobs._new[digest.hex] = None
    blobs.save()
    kept = [blobs._known(digest.hex) is not None for digest in found]
    assert kept == [False, True] * 300


def test_a_full_cache_does_not_grow_beyond_its_limit(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verified, "_MAX_PAGES", 1)
    blobs = VerifiedBlobs(store)
    for number in range(100):
        blobs._new = {Digest.of(bytes([number])).hex: FileVersion(1, 2, 3, 4, 5)}
        blobs.save()
    note(store)
    assert cache_of(store).stat().st_size == 2 * 4096
    assert not has(store)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_system_that_gives_new_files_away_has_no_cache(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.replace

    def replace(source: str, target: str) -> None:
        real(source, target)
        os.chown(target, sandbox.NOBODY, -1)

    monkeypatch.setattr(Path, "replace", replace)
    note(store)
    assert not has(store)


def test_an_entry_is_read_and_written_without_reading_the_others(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = VerifiedBlobs(store)
    found = [Digest.of(bytes([number])).hex for number in range(200)]
    blobs._new = dict.fromkeys(found, FileVersion(1, 2, 3, 4, 5))
    blobs.save()
    pages: list[int] = []
    real = verified._Table.page

    def page(table: verified._Table, number: int) -> bytes:
        pages.append(number)
        return real(table, number)

    monkeypatch.setattr(verified._Table, "page", page)
    assert blobs._known(found[0])
    note(store)
    assert has(store)
    assert len(pages) == 3


def test_a_cache_that_others_can_write_is_ignored(store: LocalStore) -> None:
    for mode, trusted in [(0o600, True), (0o644, True), (0o620, False), (0o602, False)]:
        note(store)
        cache_of(store).chmod(mode)
        assert has(store) is trusted, oct(mode)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_cache_of_another_user_is_ignored(store: LocalStore) -> None:
    note(store)
    os.chown(cache_of(store), sandbox.NOBODY, -1)
    assert not has(store)
    note(store)
    assert has(store)


def test_links_and_pipes_are_not_followed(store: LocalStore) -> None:
    note(store)
    elsewhere = store.root / "elsewhere"
    cache_of(store).replace(elsewhere)
    cache_of(store).symlink_to(elsewhere)
    assert not has(store)
    cache_of(store).unlink()
    os.mkfifo(cache_of(store))
    assert not has(store)
    note(store)
    assert has(store)


def test_entries_that_another_process_has_written_are_kept(store: LocalStore) -> None:
    path_of(store, OTHER).write_bytes(DATA)
    blobs = VerifiedBlobs(store)
    note(store, OTHER)
    with blobs.noting(DIGEST):
        pass
    blobs.save()
    assert has(store)
    assert has(store, OTHER)


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_not_an_error(store: LocalStore) -> None:
    def run() -> bool:
        note(store)
        return has(store)

    assert sandbox.call(run, unprivileged=True) == "False"
    note(store)
    whole = cache_of(store).read_bytes()
    path_of(store, OTHER).write_bytes(DATA)
    assert sandbox.call(lambda: note(store, OTHER), unprivileged=True) == "None"
    assert cache_of(store).read_bytes() == whole


def test_the_store_itself_is_not_created_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "gone")
    note(store)
    assert not store.root.exists()
