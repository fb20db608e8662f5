from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.errors import BlobDamaged, FileNotFound, ModelNotFound
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder

TEXT = b"".join(b"token %d\n" % number for number in range(400_000))


@pytest.fixture
def model(tmp_path: Path, store: LocalStore) -> str:
    folder = write_folder(tmp_path / "model", dense_tensors(), files={"merges.txt": TEXT})
    blobstore.create(folder, "m", store=store)
    return "m"


def test_reads_a_file_that_is_larger_than_a_piece(model: str, store: LocalStore) -> None:
    assert blobstore.read_file(model, "merges.txt", store=store) == TEXT


def test_a_file_or_model_that_is_absent_is_not_found(model: str, store: LocalStore) -> None:
    with pytest.raises(FileNotFound, match="has no file 'absent'; its files are .*'merges.txt'"):
        blobstore.read_file(model, "absent", store=store)
    with pytest.raises(ModelNotFound, match="'none:latest'"):
        blobstore.read_file("none", "merges.txt", store=store)


def test_a_file_with_another_digest_is_damaged(model: str, store: LocalStore) -> None:
    layer = next(item for item in store.resolve(model).layers if item.name == "merges.txt")
    path = Path(store.blob_path(layer.digest))
    path.chmod(0o600)
    path.write_bytes(TEXT.upper())
    with pytest.raises(BlobDamaged, match="file 'merges.txt' of model m:latest is damaged"):
        blobstore.read_file(model, "merges.txt", store=store)
