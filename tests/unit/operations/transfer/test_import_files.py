from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import DamagedSource
from blobstore.manifests.reference import Reference
from blobstore.operations.transfer.import_files import import_files
from blobstore.registry.layouts.files import RemoteFile
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.models import dense_tensors, write_folder

NAME = Reference.parse("pulled")
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


class Fetched:
    """Files that were fetched, below names that say nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.files: list[RemoteFile] = []

    def add(self, path: str, data: bytes, compression: str | None = None) -> None:
        digest = Digest.of(data)
        (self._folder / digest.hex).write_bytes(data)
        is_tar = compression is not None
        self.files.append(RemoteFile(path, digest, len(data), is_tar, compression or ""))

    def import_to(self, store: LocalStore) -> None:
        import_files(
            self.files, lambda file: self._folder / file.digest.hex, replace_any(NAME), store=store
        )


@pytest.fixture
def fetched(tmp_path: Path) -> Fetched:
    return Fetched(tmp_path / "fetched")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {"tokenizer.json": b"{}"}
    return write_folder(tmp_path / "source", dense_tensors(), shards=2, files=files)


def tar_of(members: dict[str, bytes], kind: bytes = tarfile.REGTYPE) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind, "/etc/passwd"
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


def test_files_are_imported_as_create_imports_their_folder(
    fetched: Fetched, source: Path, store: LocalStore, tmp_path: Path
) -> None:
    for path in source.iterdir():
        fetched.add(path.name, path.read_bytes())
    fetched.import_to(store)
    blobstore.create(source, "created", store=store)
    assert store.read_manifest(NAME) == store.read_manifest("created")


@pytest.mark.parametrize("compression", COMPRESS)
def test_tars_are_unpacked(
    fetched: Fetched, source: Path, store: LocalStore, compression: str
) -> None:
    weights = {path for path in source.iterdir() if path.suffix == ".safetensors"}
    for path in weights:
        fetched.add(path.name, path.read_bytes())
    others = {f"./{path.name}": path.read_bytes() for path in set(source.iterdir()) - weights}
    fetched.add("", COMPRESS[compression](tar_of(others)), compression)
    fetched.import_to(store)
    blobstore.create(source, "created", store=store)
    assert store.read_manifest(NAME) == store.read_manifest("created")


@pytest.mark.parametrize(
    "data",
    [
        tar_of({"../escape": b"x"}),
        tar_of({"/absolute": b"x"}),
        tar_of({"link": b""}, tarfile.SYMTYPE),
        tar_of({"link": b""}, tarfile.LNKTYPE),
        tar_of({"device": b""}, tarfile.CHRTYPE),
        tar_of({"pipe": b""}, tarfile.FIFOTYPE),
        tar_of({"model.safetensors": b"x"}),
        tar_of({"model.safetensors/x": b"x"}),
        tar_of({"a": b"x", "a/b": b"x"}),
        tar_of({"a": b"x" * 5000})[:2000],
        b"no tar" * 1000,
    ],
)
def test_rejects_hostile_tars(
    fetched: Fetched, source: Path, store: LocalStore, tmp_path: Path, data: bytes
) -> None:
    fetched.add("model.safetensors", b"weights")
    fetched.add("", data, "")
    with pytest.raises(DamagedSource):
        fetched.import_to(store)
    assert not store.has_model(NAME)
    assert not (tmp_path / "escape").exists()


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
def test_rejects_damaged_compression(fetched: Fetched, store: LocalStore, compression: str) -> None:
    data = COMPRESS[compression](tar_of({"a": bytes(range(256)) * 50}))
    for cut in (data[:40], data[: len(data) // 2], b"x" * 100):
        fetched.files.clear()
        fetched.add("", cut, compression)
        with pytest.raises(DamagedSource):
            fetched.import_to(store)


@pytest.mark.slow
def test_a_tar_may_not_unpack_to_far_more_than_it_has(fetched: Fetched, store: LocalStore) -> None:
    bomb = gzip.compress(tar_of({"a": bytes(100 * 2**20)}))
    fetched.add("", bomb, "gzip")
    with pytest.raises(DamagedSource, match="too much"):
        fetched.import_to(store)


def test_a_tar_does_not_write_through_the_link_to_a_fetched_file(
    fetched: Fetched, store: LocalStore, tmp_path: Path
) -> None:
    fetched.add("config.json", b"{}")
    fetched.add("", tar_of({"config.json": b"[]"}), "")
    with pytest.raises(DamagedSource, match="cannot be unpacked"):
        fetched.import_to(store)
    assert (tmp_path / "fetched" / Digest.of(b"{}").hex).read_bytes() == b"{}"
    assert not store.has_model(NAME)
