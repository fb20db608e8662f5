"""Models whose files lie in object storage or on a web server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.errors import DamagedSource, RemoteError, SourceNotFound, StoreError, UsageError
from blobstore.http.retry import Patience
from blobstore.objects.address import StoreAddress
from blobstore.objects.client import ObjectClient
from blobstore.objects.store import ObjectStore
from blobstore.remotes import bucket_files, download_files, web_file
from blobstore.store import partial
from blobstore.store.local import LocalStore
from tests.support.google import running_google_storage
from tests.support.models import dense_tensors, write_folder
from tests.support.raw_server import Answer, RawServer, Received, reply

_PART = 512
"""Bytes of a part of a file that is fetched."""


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial, "PART", _PART)
    monkeypatch.setattr(bucket_files, "_PIECE", 100)
    monkeypatch.setattr(download_files, "HEAD", 1)
    monkeypatch.setattr(web_file, "_PATIENCE", Patience(first=0, attempts=3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"tokenizer.json": b"{}" * 1000, "LICENSE": b"free", "notes.bin.gz": b"not needed"}
    return write_folder(tmp_path / "model", dense_tensors(), files=files)


@pytest.fixture
def data(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def put(address: StoreAddress, folder: Path) -> None:
    client = ObjectClient(address)
    for path in folder.iterdir():
        client.put(path.name, path.read_bytes())


class FileServer:
    """A server that has one file, and what it does wrong."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.etag: str | None = '"1"'
        self.has_ranges = True
        self.lost: Callable[[int], bool] = lambda _: False
        """Whether the connection is lost in the middle of the bytes from an offset on."""
        self.asked: list[range] = []
        self.counted = ""
        """The end of the URLs whose requests are counted: earlier ones may arrive late."""

    def __call__(self, request: Received) -> Answer:
        if request.path.partition("?")[0] != "/folder/model.safetensors":
            return reply(404)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("range", ""))
        etag = {"etag": self.etag} if self.etag else {}
        if found is None or not self.has_ranges:
            answer, asked = reply(200, self.data, **etag), range(len(self.data))
        else:
            asked = range(int(found[1]), int(found[2]) + 1)
            place = f"bytes {asked.start}-{asked.stop - 1}/{len(self.data)}"
            answer = reply(206, self.data[asked.start : asked.stop], content_range=place, **etag)
        if len(asked) == 1:  # what the file is
            return answer
        if request.path.endswith(self.counted):
            self.asked.append(asked)
        return answer[: -len(asked) // 2] if self.lost(asked.start) else answer


@pytest.fixture
def file(data: bytes) -> FileServer:
    return FileServer(data)


@pytest.fixture
def url(file: FileServer) -> Iterator[str]:
    with RawServer(file) as server:
        yield f"http://{server.host}/folder/model.safetensors"


def made_from(folder: Path, tmp_path: Path) -> bytes:
    """Return the manifest of the same files, imported from a folder."""
    other = LocalStore(tmp_path / "other")
    blobstore.create(folder, "m", store=other)
    return other.read_manifest("m")


def downloads(store: LocalStore) -> list[Path]:
    return [path for path in store.folder("downloads").rglob("*") if path.is_file()]


def layers(store: LocalStore, name: str) -> dict[str, str]:
    return {
        layer.name or layer.media_type: str(layer.digest) for layer in store.resolve(name).layers
    }


# Object storage


def test_a_folder_in_object_storage_becomes_the_model_of_the_same_folder_here(
    object_address: StoreAddress, folder: Path, store: LocalStore
) -> None:
    put(object_address, folder)
    found = blobstore.create(str(object_address), "remote", store=store)
    blobstore.create(folder, "local", store=store)
    assert store.read_manifest("remote") == store.read_manifest("local")
    assert not downloads(store)
    assert found.tensors == len(dense_tensors())


def test_a_folder_in_google_storage_is_imported(
    folder: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_google_storage() as server:
        server.write_account(tmp_path / "account.json")
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
        monkeypatch.setenv("GOOGLE_ALLOW_HTTP", "true")
        put(StoreAddress("gs", "bucket", "folder"), folder)
        blobstore.create("gs://bucket/folder", "m", store=store)
    assert store.read_manifest("m") == made_from(folder, tmp_path)


def test_a_folder_of_azure_whose_list_has_etags_without_quotes_is_imported(
    folder: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(request: Received) -> Answer:
        path, _, query = request.path.partition("?")
        if "comp=list" in query:
            entries = "".join(
                f"<Blob><Name>folder/{it.name}</Name><Properties><Etag>0x8D</Etag>"
                f"<Content-Type>application/octet-stream</Content-Type><Content-Length>"
                f"{it.stat().st_size}</Content-Length><Last-Modified>Wed, 25 Nov 2026 22:00:00 GMT"
                "</Last-Modified></Properties></Blob>"
                for it in folder.iterdir()
            )
            text = f"<EnumerationResults><Blobs>{entries}</Blobs><NextMarker/></EnumerationResults>"
            return reply(200, f'<?xml version="1.0"?>{text}'.encode())
        data = (folder / path.rpartition("/")[2]).read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers["range"])
        assert found is not None
        part = data[int(found[1]) : int(found[2]) + 1]
        place = f"bytes {found[1]}-{int(found[1]) + len(part) - 1}/{len(data)}"
        date = "Wed, 25 Nov 2026 22:00:00 GMT"
        return reply(206, part, content_range=place, etag='"0x8D"', last_modified=date)

    with RawServer(answer) as server:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://{server.host}/account")
        monkeypatch.setenv("AZURE_ALLOW_HTTP", "true")
        blobstore.create("az://container/folder", "m", store=store)
    assert store.read_manifest("m") == made_from(folder, tmp_path)


def test_one_object_is_imported_without_the_others(
    object_address: StoreAddress, folder: Path, store: LocalStore
) -> None:
    put(object_address, folder)
    blobstore.create(f"{object_address}/model.safetensors", "one", store=store)
    with blobstore.open("one", store=store) as model:
        assert set(model) == set(dense_tensors())
    assert "tokenizer.json" not in layers(store, "one")


def test_a_store_in_object_storage_is_named_with_the_command_that_reads_it(
    object_address: StoreAddress, objects: ObjectStore, folder: Path, store: LocalStore
) -> None:
    blobstore.create(folder, "m", store=store)
    blobstore.push("m", objects.address, store=store)
    with pytest.raises(SourceNotFound, match="blobstore pull"):
        blobstore.create(str(object_address), "other", store=store)
    with pytest.raises(SourceNotFound, match="has no files, or does not exist"):
        blobstore.create(f"{object_address}/nothing", "other", store=store)


def test_an_object_that_changes_while_it_is_read_is_not_imported(
    object_address: StoreAddress,
    folder: Path,
    data: bytes,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(object_address, folder)
    read = ObjectClient.read

    def read_and_change(client: ObjectClient, key: str, begin: int, end: int) -> Any:
        piece = read(client, key, begin, end)
        if key == "model.safetensors" and begin == 0:
            client.put(key, data[:-1] + b"x")
        return piece

    monkeypatch.setattr(ObjectClient, "read", read_and_change)
    with pytest.raises(DamagedSource, match=r"model\.safetensors' changed while it was downloaded"):
        blobstore.create(str(object_address), "m", store=store)
    assert not list(store.references())


# Web servers


@pytest.mark.parametrize("has_ranges", [True, False])
def test_the_file_of_a_url_is_imported_and_its_query_is_kept_nowhere(
    file: FileServer, url: str, folder: Path, store: LocalStore, has_ranges: bool
) -> None:
    file.has_ranges = has_ranges
    blobstore.create(f"{url}?signature=secret", "web", store=store)
    blobstore.create(folder / "model.safetensors", "local", store=store)
    with blobstore.open("web", store=store) as model, blobstore.open("local", store=store) as other:
        assert {name: model.view(name) for name in model} == {
            name: other.view(name) for name in other
        }
    assert not downloads(store)
    assert not any(
        b"secret" in path.read_bytes() for path in store.root.rglob("*") if path.is_file()
    )


def test_the_parts_of_a_file_are_fetched_by_ranges_and_each_byte_once(
    file: FileServer, url: str, data: bytes, store: LocalStore
) -> None:
    blobstore.create(url, "web", store=store)
    parts = sorted(file.asked, key=lambda part: part.start)
    assert len(parts) > 2
    assert [byte for part in parts for byte in part] == list(range(len(data)))


def test_a_lost_connection_is_resumed_at_the_next_byte(
    file: FileServer, url: str, data: bytes, store: LocalStore
) -> None:
    lost = {0, _PART}

    def is_lost(begin: int) -> bool:
        found = begin in lost
        lost.discard(begin)
        return found

    file.lost = is_lost
    blobstore.create(url, "web", store=store)
    assert sum(map(len, file.asked)) - 2 * _PART // 2 == len(data)


def test_a_download_that_was_stopped_is_continued_by_the_same_command(
    file: FileServer, url: str, data: bytes, store: LocalStore
) -> None:
    last = (len(data) - 1) // _PART * _PART
    file.lost = lambda begin: begin >= last
    with pytest.raises(RemoteError):
        blobstore.create(url, "web", store=store)
    assert downloads(store)
    file.lost, file.asked, file.counted = lambda _: False, [], "?again"
    blobstore.create(f"{url}?again", "web", store=store)
    assert 0 < sum(map(len, file.asked)) < len(data)
    assert not downloads(store)


@pytest.mark.parametrize("change", ["etag", "size"])
def test_a_file_that_changes_between_two_parts_is_not_imported(
    file: FileServer, url: str, store: LocalStore, change: str
) -> None:
    def change_file(begin: int) -> bool:
        if change == "etag":
            file.etag = f'"{begin}"'
        else:
            file.data += b"more"
        return False

    file.lost = change_file
    with pytest.raises(DamagedSource, match="changed while it was downloaded"):
        blobstore.create(url, "web", store=store)
    assert not list(store.references())


def test_nothing_of_a_file_without_a_version_is_used_by_a_later_download(
    file: FileServer, url: str, data: bytes, store: LocalStore
) -> None:
    file.etag, file.lost = None, lambda begin: begin > 0
    with pytest.raises(RemoteError):
        blobstore.create(url, "web", store=store)
    file.lost, file.asked, file.counted = lambda _: False, [], "?again"
    blobstore.create(f"{url}?again", "web", store=store)
    assert sum(map(len, file.asked)) == len(data)


def test_a_file_has_the_sha256_that_was_given_or_is_not_imported(
    url: str, data: bytes, store: LocalStore
) -> None:
    right = hashlib.sha256(data).hexdigest()
    for text in (right, right.upper(), f"sha256:{right}"):
        blobstore.create(url, "web", store=store, sha256=text)
    with pytest.raises(DamagedSource, match="has another SHA-256 than 0000"):
        blobstore.create(url, "web", store=store, sha256="0" * 64)
    with pytest.raises(UsageError, match="not a SHA-256"):
        blobstore.create(url, "web", store=store, sha256="0")


def test_a_sha256_of_anything_but_one_file_is_refused(
    object_address: StoreAddress, folder: Path, store: LocalStore
) -> None:
    put(object_address, folder)
    for source in (str(object_address), str(folder)):
        with pytest.raises(UsageError, match="SHA-256"):
            blobstore.create(source, "m", store=store, sha256="0" * 64)


def test_what_a_server_refuses_or_lacks_is_said_with_what_to_do(
    url: str, store: LocalStore
) -> None:
    with pytest.raises(SourceNotFound, match=r"there is no file .*/other\.safetensors"):
        blobstore.create(url.replace("model.", "other."), "web", store=store)
    refused = pytest.raises(RemoteError, match="download the file with a program that can log in")
    with RawServer(lambda _: reply(401)) as server, refused:
        blobstore.create(f"http://{server.host}/x.gguf", "web", store=store)
    sizeless = pytest.raises(DamagedSource, match="does not state its size")
    with RawServer(lambda _: reply(200, content_length=None)) as server, sizeless:
        blobstore.create(f"http://{server.host}/x.gguf", "web", store=store)
    with pytest.raises(UsageError, match="a login in a URL"):
        blobstore.create("https://me:secret@localhost/x.gguf", "web", store=store)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"<!DOCTYPE html><html>Log in</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "pointer of git-lfs"),
        (b"", "empty"),
    ],
)
def test_what_is_not_the_file_is_named_and_not_kept(
    file: FileServer,
    url: str,
    object_address: StoreAddress,
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    data: bytes,
    what: str,
) -> None:
    monkeypatch.setattr(download_files, "HEAD", 4096)
    file.data = data
    ObjectClient(object_address).put("model.safetensors", data)
    for source in (url, str(object_address)):
        with pytest.raises(DamagedSource, match=rf"model\.safetensors'.* is .*{what}"):
            blobstore.create(source, "m", store=store)
    assert not list(store.folder("downloads").iterdir())


def test_a_damaged_file_is_called_by_its_address(
    file: FileServer, url: str, data: bytes, store: LocalStore
) -> None:
    file.data = data[:-1]
    with pytest.raises(DamagedSource, match=rf"'{re.escape(url)}'") as caught:
        blobstore.create(f"{url}?signature=secret", "m", store=store)
    assert str(store.root) not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_small_file_of_a_folder_that_is_a_pointer_is_an_error(
    object_address: StoreAddress, folder: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_files, "HEAD", 4096)
    (folder / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    put(object_address, folder)
    with pytest.raises(DamagedSource, match=r"tokenizer\.json': this is a pointer of git-lfs"):
        blobstore.create(str(object_address), "m", store=store)


def test_the_ending_of_a_url_may_have_capitals(data: bytes, store: LocalStore) -> None:
    file = FileServer(data)

    def answer(request: Received) -> Answer:
        return file(replace(request, path="/folder/model.safetensors"))

    with RawServer(answer) as server:
        found = blobstore.create(f"http://{server.host}/A.SafeTensors", store=store)
    assert str(found.reference) == "A:latest"


def test_space_is_checked_before_the_weights_are_fetched(
    file: FileServer, url: str, data: bytes, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 2 * len(data) - 1)
    with pytest.raises(StoreError, match=r"not enough space .* are needed, and .* are free"):
        blobstore.create(url, "web", store=store)
    assert not file.asked
    monkeypatch.setattr(LocalStore, "free_space", lambda _: 2 * len(data))
    blobstore.create(url, "web", store=store)
    # The store may have all the weights, so they may need no space.
    monkeypatch.setattr(LocalStore, "free_space", lambda _: len(data))
    blobstore.create(url, "again", store=store)
