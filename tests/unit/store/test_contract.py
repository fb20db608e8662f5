"""LocalStore by the contract of stores, with hot blobs and with cold ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
from blobstore.store.protocols import BlobAccess, ModelReader
from tests.support.store_suite import (
    NAMES,
    BlobAccessSuite,
    LocalStoreSuite,
    ModelReaderSuite,
    blobs_of,
)


class TestHotBlobs(ModelReaderSuite):
    @pytest.fixture
    def reader(self, origin: LocalStore) -> ModelReader:
        return origin


class TestColdBlobs(ModelReaderSuite):
    @pytest.fixture
    def reader(self, origin: LocalStore) -> ModelReader:
        freeze_models(NAMES, store=origin)
        assert any(origin.is_cold(digest) for digest, _ in blobs_of(origin))
        return origin


class TestOpenModels(BlobAccessSuite):
    @pytest.fixture
    def access(self, origin: LocalStore) -> BlobAccess:
        return origin


class TestOpenFrozenModels(BlobAccessSuite):
    @pytest.fixture
    def access(self, origin: LocalStore) -> BlobAccess:
        freeze_models(["model"], store=origin)
        assert len(origin.frozen()) == 2
        return origin


class TestWriting(LocalStoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> LocalStore:
        return LocalStore(tmp_path / "store")
