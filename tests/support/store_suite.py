"""The contract of stores as tests; see ``blobstore/store/protocols.py`` for the promises.

A new store binds the suite in its own test module, by a class that has one fixture::

    class TestMyStore(ModelReaderSuite):
        @pytest.fixture
        def reader(self, origin: LocalStore) -> ModelReader:
            return a_reader_of_the_models_in(origin)


    class TestOpenModelsOfMyStore(BlobAccessSuite):
        @pytest.fixture
        def access(self, origin: LocalStore) -> BlobAccess:
            return what_an_open_model_reads()


    class TestWritingMyStore(LocalStoreSuite):
        @pytest.fixture
        def store(self) -> LocalStore:
            return an_empty_store()
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

import blobstore
from blobstore.core.digest import BlobId, Digest
from blobstore.core.mmap import MappedRegion
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    DamagedSource,
    InvalidManifest,
    ModelNotFound,
    NameConflict,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.models.model import Model
from blobstore.safetensors.header import Header
from blobstore.store.blob_ranges import BlobRange
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from blobstore.store.protocols import BlobAccess, ModelReader
from tests.support import frozen
from tests.support.models import write_folder

NAMES = ("one", "team/two:v1")
ABSENT = Digest.of(b"in no store")


def blobs_of(store: LocalStore) -> list[BlobId]:
    """Return the blobs that the models of ``store`` reference."""
    return [blob.id for name in NAMES for blob in store.resolve(name).blobs]


def content(reader: ModelReader, blob: BlobId) -> bytes:
    return b"".join(map(bytes, reader.read_pieces(*blob)))


class ModelReaderSuite:
    """What every place to read models from must do. Bind ``reader``."""

    @pytest.fixture
    def origin(self, tmp_path: Path) -> LocalStore:
        """A store with the models ``NAMES``, which share a blob."""
        store = LocalStore(tmp_path / "origin")
        frozen.put(store, NAMES[0], {"shared": 1, "own": 2})
        frozen.put(store, NAMES[1], {"shared": 1})
        return store

    @pytest.fixture
    def reader(self, origin: LocalStore) -> ModelReader:
        raise NotImplementedError

    def test_every_name_is_listed(self, reader: ModelReader) -> None:
        assert sorted(reader.references()) == sorted(map(Reference.parse, NAMES))

    def test_manifests_are_read_byte_for_byte(
        self, origin: LocalStore, reader: ModelReader
    ) -> None:
        for name in NAMES:
            assert reader.read_manifest(name) == origin.read_manifest(name)
            assert reader.read_manifest(Reference.parse(name)) == origin.read_manifest(name)

    def test_an_unknown_name_is_not_found(self, reader: ModelReader) -> None:
        with pytest.raises(ModelNotFound, match="other:latest"):
            reader.read_manifest("other")

    def test_every_blob_of_a_model_exists(self, origin: LocalStore, reader: ModelReader) -> None:
        assert all(reader.exists(*blob) for blob in blobs_of(origin))

    def test_an_unknown_blob_does_not_exist(self, reader: ModelReader) -> None:
        assert not reader.exists(ABSENT, 11)

    def test_a_blob_of_another_size_is_damaged(
        self, origin: LocalStore, reader: ModelReader
    ) -> None:
        for digest, size in blobs_of(origin):
            with pytest.raises(BlobDamaged):
                reader.exists(digest, size + 1)
            with pytest.raises(BlobDamaged):
                list(reader.read_pieces(digest, size + 1))

    def test_pieces_have_the_digest_and_the_size(
        self, origin: LocalStore, reader: ModelReader
    ) -> None:
        for blob in blobs_of(origin):
            data = content(reader, blob)
            assert BlobId(Digest.of(data), len(data)) == blob

    def test_each_reading_starts_at_the_first_byte(
        self, origin: LocalStore, reader: ModelReader
    ) -> None:
        blob = blobs_of(origin)[0]
        with_one_piece = reader.read_pieces(*blob)
        first = bytes(next(with_one_piece))
        with_one_piece.close()
        assert content(reader, blob).startswith(first)
        assert content(reader, blob) == content(reader, blob)

    def test_an_unknown_blob_cannot_be_read(self, reader: ModelReader) -> None:
        with pytest.raises(BlobMissing):
            list(reader.read_pieces(ABSENT, 11))
        with pytest.raises(BlobMissing):
            reader.read_into(ABSENT, 11, 0, memoryview(bytearray(11)))

    def test_parts_of_a_blob_are_read_alone(self, origin: LocalStore, reader: ModelReader) -> None:
        for blob in blobs_of(origin):
            data = content(reader, blob)
            for begin, end in ((0, 1), (0, blob.size), (blob.size // 3, blob.size // 2)):
                buffer = bytearray(end - begin)
                reader.read_into(*blob, begin, memoryview(buffer))
                assert buffer == data[begin:end]

    def test_nothing_can_be_read_past_the_end(
        self, origin: LocalStore, reader: ModelReader
    ) -> None:
        for blob in blobs_of(origin):
            with pytest.raises(BlobDamaged):
                reader.read_into(*blob, blob.size - 1, memoryview(bytearray(2)))

    def test_threads_share_a_reader(self, origin: LocalStore, reader: ModelReader) -> None:
        blobs = blobs_of(origin) * 4
        with ThreadPoolExecutor(8) as pool:
            read = list(pool.map(lambda blob: content(reader, blob), blobs))
        assert [Digest.of(data) for data in read] == [blob.digest for blob in blobs]


class BlobAccessSuite:
    """What every store must do for the models that are opened from it. Bind ``access``."""

    @pytest.fixture
    def origin(self, tmp_path: Path) -> LocalStore:
        """A store with the model ``model``, whose tensors are worth compressing."""
        store = LocalStore(tmp_path / "origin")
        tensors = {
            f"{name}.weight": np.frombuffer(frozen.weights(seed), bfloat16).reshape(200, 200)
            for seed, name in enumerate("ab")
        }
        blobstore.create(write_folder(tmp_path / "source", tensors), "model", store=store)
        return store

    @pytest.fixture
    def manifest(self, origin: LocalStore) -> Manifest:
        return origin.resolve("model")

    @pytest.fixture
    def blobs(self, manifest: Manifest) -> list[BlobId]:
        return [blob.id for blob in manifest.blobs]

    @pytest.fixture
    def tensors(self, manifest: Manifest) -> list[BlobId]:
        return [layer.id for layer in manifest.layers_of(media_types.TENSOR)]

    @pytest.fixture
    def bytes_of(self, origin: LocalStore, blobs: list[BlobId]) -> dict[BlobId, bytes]:
        return {blob: origin.read_blob(*blob) for blob in blobs}

    def test_a_blob_has_its_size_only(self, access: BlobAccess, blobs: list[BlobId]) -> None:
        for digest, size in blobs:
            access.check_size(digest, size)
            with pytest.raises(BlobDamaged):
                access.check_size(digest, size + 1)
        with pytest.raises(BlobMissing):
            access.check_size(ABSENT, 11)

    def test_digests_are_compared_and_every_byte_is_reported(
        self, access: BlobAccess, blobs: list[BlobId]
    ) -> None:
        for blob in blobs:
            counts: list[int] = []
            access.check_digest(*blob, counts.append)
            assert sum(counts) == blob.size
        with pytest.raises(BlobMissing):
            access.check_digest(ABSENT, 11)

    def test_small_blobs_are_read(self, access: BlobAccess, bytes_of: dict[BlobId, bytes]) -> None:
        for blob, data in bytes_of.items():
            assert access.read_blob(*blob) == data
        with pytest.raises(BlobMissing):
            access.read_blob(ABSENT, 11)

    def test_parts_of_a_blob_fill_memory(
        self, access: BlobAccess, bytes_of: dict[BlobId, bytes]
    ) -> None:
        for blob, data in bytes_of.items():
            for begin, end in ((0, blob.size), (blob.size // 3, blob.size // 2)):
                buffer = bytearray(end - begin)
                access.read_into(*blob, begin, memoryview(buffer))
                assert buffer == data[begin:end]

    def test_nothing_is_read_past_the_end_or_of_an_unknown_blob(
        self, access: BlobAccess, blobs: list[BlobId]
    ) -> None:
        for blob in blobs:
            with pytest.raises(BlobDamaged):
                access.read_into(*blob, blob.size - 1, memoryview(bytearray(2)))
        with pytest.raises(BlobMissing):
            access.read_into(ABSENT, 11, 0, memoryview(bytearray(11)))

    def test_headers_are_those_of_the_blobs(
        self, access: BlobAccess, tensors: list[BlobId], origin: LocalStore
    ) -> None:
        found = list(access.read_headers(tensors))
        assert all(isinstance(header, Header) for header in found)
        assert found == list(origin.read_headers(tensors))

    def test_whole_blobs_are_loaded_and_hashed(
        self, access: BlobAccess, tensors: list[BlobId], bytes_of: dict[BlobId, bytes]
    ) -> None:
        memory = {blob: bytearray(blob.size) for blob in tensors}
        done: list[tuple[int, int]] = []
        access.load(
            [(*blob, memoryview(buffer)) for blob, buffer in memory.items()],
            lambda _, count, total: done.append((count, total)),
        )
        assert memory == {blob: bytes_of[blob] for blob in tensors}
        total = sum(blob.size for blob in tensors)
        assert done[-1] == (total, total)

    def test_ranges_are_read_together(
        self, access: BlobAccess, tensors: list[BlobId], bytes_of: dict[BlobId, bytes]
    ) -> None:
        ranges = [
            BlobRange(*blob, begin, begin + 10) for blob in tensors for begin in (8, blob.size - 10)
        ]
        loaded = access.read_ranges(ranges)
        for digest, size, begin, end in ranges:
            assert loaded.find(digest, begin, end) == bytes_of[BlobId(digest, size)][begin:end]
        assert not access.read_ranges([]).parts(ABSENT)

    def test_a_local_blob_has_a_file_and_others_have_none(
        self, access: BlobAccess, tensors: list[BlobId], bytes_of: dict[BlobId, bytes]
    ) -> None:
        for digest, size in tensors:
            region = MappedRegion([size])
            try:
                access.map_hot(digest, size, 0, region)
            except BlobMissing:
                pass
            else:
                assert access.is_local(digest)
                mapped = memoryview(region.memory)[region.offsets[0] :][:size]
                assert mapped == bytes_of[BlobId(digest, size)]
                assert Path(access.blob_path(digest)).stat().st_size == size
                os.close(access.open_hot(digest, size))
                continue
            if access.is_local(digest):
                assert access.open_cold(digest, size).size == size
                assert Path(access.cold_path(digest)).exists()
            else:
                with pytest.raises(BlobMissing):
                    access.open_hot(digest, size)
                with pytest.raises(BlobMissing):
                    access.open_cold(digest, size)

    def test_a_manifest_is_compared_with_its_config(
        self, access: BlobAccess, origin: LocalStore, manifest: Manifest
    ) -> None:
        data = origin.read_manifest("model")
        assert access.check_manifest(data, manifest)
        changed = data.replace(b".weight", b".weighs", 1)
        with pytest.raises(InvalidManifest):
            access.check_manifest(changed, Manifest.from_bytes(changed))

    def test_an_open_model_has_the_tensors_and_files_of_the_model(
        self, access: BlobAccess, origin: LocalStore
    ) -> None:
        data = origin.read_manifest("model")
        with (
            blobstore.open("model", store=origin) as expected,
            Model(Reference.parse("model"), data, access) as model,
        ):
            model.check("digest")
            assert model.config == expected.config
            for name, array in expected.items():
                assert np.array_equal(model.get_slice(name)[:1], array[:1])
                assert np.array_equal(model[name], array)


class LocalStoreSuite:
    """What every place to write models to must do. Bind ``store``, which is empty."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        raise NotImplementedError

    def put(self, store: LocalStore, name: str, data: bytes = b"config") -> Manifest:
        """Publish a model whose config is ``data``."""
        with store.ingest() as ingest:
            added = ingest.add(len(data), lambda: [data])
            ingest.publish()
            config = Descriptor(media_type=media_types.CONFIG, digest=added.digest, size=added.size)
            manifest = Manifest(config=config, layers=())
            store.names.publish(replace_any(name), manifest)
        return manifest

    def test_an_empty_store_has_no_names(self, store: LocalStore) -> None:
        assert list(store.references()) == []
        with pytest.raises(ModelNotFound):
            store.read_manifest("a")

    def test_a_published_blob_is_read_back(self, store: LocalStore) -> None:
        with store.ingest() as ingest:
            added = ingest.add(6, lambda: [b"abc", memoryview(b"def")])
            ingest.publish()
        assert (added.digest, added.size, added.written) == (Digest.of(b"abcdef"), 6, True)
        assert store.exists(added.digest, 6)
        assert content(store, BlobId(added.digest, 6)) == b"abcdef"

    def test_an_empty_blob_is_a_blob(self, store: LocalStore) -> None:
        with store.ingest() as ingest:
            added = ingest.add(0, list)
            ingest.publish()
        assert store.exists(added.digest, 0)
        assert content(store, BlobId(added.digest, 0)) == b""

    def test_a_present_blob_is_not_written_again(self, store: LocalStore) -> None:
        self.put(store, "a")
        with store.ingest() as ingest:
            again = ingest.add(6, lambda: [b"config"])
            once = ingest.add(6, lambda: [b"config"], once=True)
            found = ingest.find(Digest.of(b"config"), 6)
        assert not again.written
        assert again == once == found

    def test_an_absent_blob_is_not_found(self, store: LocalStore) -> None:
        with store.ingest() as ingest:
            assert ingest.find(ABSENT, 11) is None

    def test_blobs_that_are_not_published_are_discarded(self, store: LocalStore) -> None:
        with store.ingest() as ingest:
            added = ingest.add(3, lambda: [b"abc"])
        assert not store.exists(added.digest, 3)

    @pytest.mark.parametrize("data", [b"ab", b"abcd", b""])
    def test_a_blob_of_another_size_than_announced_is_refused(
        self, store: LocalStore, data: bytes
    ) -> None:
        with store.ingest() as ingest:
            with pytest.raises(DamagedSource):
                ingest.add(3, lambda: [data])
            ingest.publish()
        assert not store.exists(Digest.of(data), len(data))

    def test_threads_add_blobs_to_one_ingest(self, store: LocalStore) -> None:
        contents = [bytes([number]) * 1000 for number in range(20)]
        with store.ingest() as ingest:
            with ThreadPoolExecutor(8) as pool:
                added = list(pool.map(lambda data: ingest.add(1000, lambda: [data]), contents))
            ingest.publish()
        assert [item.digest for item in added] == list(map(Digest.of, contents))
        assert all(store.exists(item.digest, 1000) for item in added)

    def test_a_manifest_is_read_back_by_its_name(self, store: LocalStore) -> None:
        manifest = self.put(store, "team/a:v1")
        assert list(store.references()) == [Reference.parse("team/a:v1")]
        assert Manifest.from_bytes(store.read_manifest("team/a:v1")) == manifest

    def test_publishing_replaces_an_older_manifest(self, store: LocalStore) -> None:
        self.put(store, "a", b"old")
        manifest = self.put(store, "a", b"new")
        assert Manifest.from_bytes(store.read_manifest("a")) == manifest

    def test_a_manifest_without_its_blobs_gets_no_name(self, store: LocalStore) -> None:
        missing = Descriptor(media_type=media_types.CONFIG, digest=ABSENT, size=11)
        with pytest.raises(BlobMissing):
            store.names.publish(replace_any("a"), Manifest(config=missing, layers=()))
        assert list(store.references()) == []

    def test_a_name_that_differs_in_case_only_is_refused(self, store: LocalStore) -> None:
        manifest = self.put(store, "model")
        with pytest.raises(NameConflict):
            store.names.publish(replace_any("Model"), manifest)
