"""Blobs are checked once before they are sent, hot or cold."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from blobstore.core.files import FileVersion
from blobstore.errors import BlobDamaged, BlobMissing
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.serve import blob_reader
from blobstore.serve.blob_reader import BlobReader
from blobstore.serve.messages import BlobPart, StoredPart
from blobstore.store import verified_cache
from blobstore.store.cold import ColdBlob
from blobstore.store.local import LocalStore
from tests.support.cold import cold
from tests.support.descriptors import open_files
from tests.support.frozen import layer, layers, put, tuned, weights
from tests.support.models import add_blobs


@pytest.fixture
def hashed() -> list[int]:
    """The bytes of each blob that was hashed."""
    return []


@pytest.fixture
def reader(store: LocalStore, hashed: list[int], monkeypatch: pytest.MonkeyPatch) -> BlobReader:
    monkeypatch.setattr(verified_cache, "_MARGIN_NS", 0)
    monkeypatch.setattr(blob_reader, "_MARGIN_NS", 0)  # files of this test do not change by chance
    return BlobReader(store, hashed.append)


def part_of(store: LocalStore, model: str, name: str) -> BlobPart:
    found = layers(store, model)[name]
    return BlobPart(found.digest, found.size, 0, found.size)


def is_verified(reader: BlobReader, part: BlobPart) -> bool:
    blob = reader.open(part)
    if blob.descriptor is not None:
        os.close(blob.descriptor)
    return blob.is_verified


def rewrite(path: str, data: bytes) -> None:
    Path(path).chmod(0o644)
    Path(path).write_bytes(data)


def test_a_cold_blob_is_hashed_once(
    store: LocalStore, reader: BlobReader, hashed: list[int]
) -> None:
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    assert not is_verified(reader, part)
    assert reader.verify(part.digest, part.size) == reader.open(part).state
    assert is_verified(reader, part)
    assert hashed == [part.size]
    assert b"".join(one.decode() for one in reader.cold_pieces(part)) == layer("a", weights(1))
    some = part._replace(begin=3, length=10)
    assert (
        b"".join(one.decode() for one in reader.cold_pieces(some)) == layer("a", weights(1))[3:13]
    )


def test_the_next_process_hashes_no_cold_blob_again(
    store: LocalStore, reader: BlobReader, hashed: list[int]
) -> None:
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    reader.verify(part.digest, part.size)
    reader.save()
    other = BlobReader(store, hashed.append)
    assert other.verify(part.digest, part.size) == other.open(part).state
    assert is_verified(other, part)
    assert hashed == [part.size]


def test_a_cold_blob_that_decodes_to_other_bytes_is_damaged(
    store: LocalStore, reader: BlobReader
) -> None:
    """All its checksums are right: only the digest says that the bytes are wrong."""
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    assert reader.verify(part.digest, part.size)
    data = bytearray(layer("a", weights(1)))
    data[-1] ^= 1
    rewrite(store.cold_path(part.digest), cold(bytes(data), digest=part.digest))
    assert not is_verified(reader, part)
    assert b"".join(one.decode() for one in reader.cold_pieces(part)) == data
    with pytest.raises(BlobDamaged, match=part.digest.hex):
        reader.verify(part.digest, part.size)


def test_a_delta_is_hashed_again_if_its_base_has_changed(
    store: LocalStore, reader: BlobReader, hashed: list[int]
) -> None:
    put(store, "base", {"a": 1})
    add_blobs(store, "tuned", {"a": layer("a", tuned(2, of=1))})
    freeze_models(["tuned"], store=store, base="base")
    part = part_of(store, "tuned", "a")
    base = store.open_cold(part.digest).base
    assert base is not None
    reader.verify(part.digest, part.size)
    assert is_verified(reader, part)
    changed = bytearray(Path(store.blob_path(base)).read_bytes())
    changed[-100:] = bytes(100)
    rewrite(store.blob_path(base), bytes(changed))
    assert not is_verified(reader, part)
    with pytest.raises(BlobDamaged, match=part.digest.hex):
        reader.verify(part.digest, part.size)
    assert hashed == [part.size]


def test_a_blob_that_has_just_changed_is_hashed_again(
    store: LocalStore, reader: BlobReader, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next change may get the same time."""
    monkeypatch.setattr(blob_reader, "_MARGIN_NS", 3600 * 10**9)
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    for count in (1, 2):
        reader.verify(part.digest, part.size)
        assert not is_verified(reader, part)
        assert hashed == [part.size] * count


def test_a_blob_that_is_frozen_has_another_state(store: LocalStore, reader: BlobReader) -> None:
    put(store, "model", {"a": 1})
    part = part_of(store, "model", "a")
    state = reader.verify(part.digest, part.size)
    assert is_verified(reader, part)
    freeze_models(["model"], store=store)
    assert not is_verified(reader, part)
    assert reader.verify(part.digest, part.size) != state


def test_a_file_that_has_just_changed_is_hashed_again(store: LocalStore, hashed: list[int]) -> None:
    """It may change again without another time."""
    put(store, "model", {"a": 1})
    part = part_of(store, "model", "a")
    reader = BlobReader(store, hashed.append)
    reader.verify(part.digest, part.size)
    assert not is_verified(reader, part)
    assert not open_files(Path(store.blob_path(part.digest)).parent)


def test_a_cold_file_that_was_replaced_since_it_was_listed_is_not_sent(
    store: LocalStore, reader: BlobReader
) -> None:
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    path = Path(store.cold_path(part.digest))
    version = FileVersion.of(path)
    assert version is not None
    stored = StoredPart(str(path), version.size, 0, version.size, version)
    reader.open_stored(stored).close()
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)
    with pytest.raises(BlobMissing, match="replaced"):
        reader.open_stored(stored)
    assert not open_files(path.parent)
    path.unlink()
    with pytest.raises(BlobMissing, match="cannot be read"):
        reader.open_stored(stored)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[os.stat_result]:
    """The files that the disk cannot read."""
    files, read = list[os.stat_result](), os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        if any(os.path.samestat(os.fstat(descriptor), file) for file in files):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, count, offset)

    monkeypatch.setattr(os, "pread", pread)
    return files


def test_a_blob_that_the_disk_cannot_read_is_damaged(
    store: LocalStore, reader: BlobReader, broken: list[os.stat_result]
) -> None:
    put(store, "model", {"a": 1})
    part = part_of(store, "model", "a")
    broken.append(Path(store.blob_path(part.digest)).stat())
    with pytest.raises(BlobDamaged, match="cannot be read: Input/output error"):
        reader.verify(part.digest, part.size)
    assert not is_verified(reader, part)
    broken.clear()
    reader.verify(part.digest, part.size)
    assert is_verified(reader, part)


def test_an_intact_blob_that_the_disk_cannot_read_any_more_is_damaged_for_all(
    store: LocalStore, reader: BlobReader, hashed: list[int], broken: list[os.stat_result]
) -> None:
    put(store, "model", {"a": 1})
    part = part_of(store, "model", "a")
    reader.verify(part.digest, part.size)
    reader.save()  # for other processes
    reader.verify_again(part)
    assert is_verified(reader, part)
    assert hashed == [part.size] * 2
    broken.append(Path(store.blob_path(part.digest)).stat())
    with pytest.raises(BlobDamaged):
        reader.verify_again(part)
    assert not is_verified(reader, part)
    for again in (reader, BlobReader(store, hashed.append)):
        with pytest.raises(BlobDamaged):
            again.verify(part.digest, part.size)


def test_a_cold_blob_that_could_not_be_decoded_is_hashed_whatever_is_known_of_it(
    store: LocalStore, reader: BlobReader, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    part = part_of(store, "model", "a")
    reader.verify(part.digest, part.size)
    reader.save()
    reader.verify_again(part)
    assert is_verified(reader, part)
    assert hashed == [part.size] * 2

    def lost(*_: object) -> None:
        raise BlobDamaged("lost")

    monkeypatch.setattr(ColdBlob, "read_into", lost)
    with pytest.raises(BlobDamaged, match="lost"):
        reader.verify_again(part)
    for again in (reader, BlobReader(store, hashed.append)):
        assert not is_verified(again, part)
        with pytest.raises(BlobDamaged, match="lost"):
            again.verify(part.digest, part.size)


def test_a_cold_file_that_the_disk_cannot_read_any_more_is_damaged(
    store: LocalStore, reader: BlobReader, broken: list[os.stat_result]
) -> None:
    put(store, "model", {"a": 1})
    freeze_models(["model"], store=store)
    path = Path(store.cold_path(part_of(store, "model", "a").digest))
    version = FileVersion.of(path)
    assert version is not None
    stored = StoredPart(str(path), version.size, 10, 1, version)
    reader.verify_again(stored)
    broken.append(path.stat())
    with pytest.raises(BlobDamaged, match="cannot be read: Input/output error"):
        reader.verify_again(stored)
    assert not open_files(path.parent)
