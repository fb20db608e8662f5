"""Models in object storage: the contract of stores, against a real server."""

from __future__ import annotations

import pytest

from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, Conflict
from blobstore.manifests.reference import Reference
from blobstore.objects.store import ObjectStore, blob_key
from blobstore.store.local import LocalStore
from tests.support.objects import no_lease
from tests.support.store_suite import NAMES, ModelReaderSuite


def copy(origin: LocalStore, objects: ObjectStore) -> None:
    for name in NAMES:
        for blob in origin.resolve(name).blobs:
            objects.put_blob(blob.digest, blob.size, origin.read_pieces(*blob.id))
        objects.place(Reference.parse(name), origin.read_manifest(name), None, no_lease)


class TestModelsInObjectStorage(ModelReaderSuite):
    @pytest.fixture
    def reader(self, origin: LocalStore, objects: ObjectStore) -> ObjectStore:
        copy(origin, objects)
        return objects


def test_a_name_that_another_process_has_replaced_is_a_conflict(objects: ObjectStore) -> None:
    name = Reference.parse("one")
    objects.place(name, b"{}", None, no_lease)
    data, tag = objects.read_version(name)
    assert data == b"{}"
    objects.place(name, b"[1]", tag, no_lease)
    with pytest.raises(Conflict, match="one/latest' was written by another process"):
        objects.place(name, b"[2]", tag, no_lease)
    with pytest.raises(Conflict):
        objects.place(name, b"[3]", None, no_lease)
    assert objects.read_manifest(name) == b"[1]"


def test_writing_what_is_there_is_no_conflict(objects: ObjectStore) -> None:
    name = Reference.parse("one")
    for _ in range(2):
        objects.place(name, b"{}", None, no_lease)


@pytest.mark.parametrize("size", [10, 9 * 2**20])
def test_a_blob_whose_bytes_change_is_not_written(objects: ObjectStore, size: int) -> None:
    digest = Digest.of(bytes(size))
    with pytest.raises(BlobDamaged, match="changed while they were sent"):
        objects.put_blob(digest, size, [bytes(size - 1), b"x"])
    assert not objects.exists(digest, size)


def test_a_truncated_blob_is_reported(objects: ObjectStore) -> None:
    digest = Digest.of(b"whole")
    objects.client.put(blob_key(digest), b"who")
    with pytest.raises(BlobDamaged, match="3 bytes, expected 5"):
        objects.exists(digest, 5)
    with pytest.raises(BlobDamaged, match="ends at byte 3, expected 5"):
        list(objects.read_pieces(digest, 5))
