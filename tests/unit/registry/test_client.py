"""The client against a real registry."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobMissing, ModelNotFound, RemoteRefused
from blobstore.http.protocol import TransientError
from blobstore.registry import upload
from blobstore.registry.client import RegistryClient
from blobstore.registry.manifest import (
    OCI_INDEX,
    OCI_MANIFEST,
    RemoteDescriptor,
    RemoteManifest,
)
from blobstore.registry.upload import UploadSession
from tests.support.registry import Server

DATA = bytes(range(256)) * 1000


def pieces_of(data: bytes) -> Callable[[int], list[bytes]]:
    return lambda offset: [
        data[offset:][at : at + 1000] for at in range(0, len(data) - offset, 1000)
    ]


def push(client: RegistryClient, repository: str, data: bytes) -> Digest:
    digest = Digest.of(data)
    client.upload_blob(repository, digest, len(data), pieces_of(data))
    return digest


def manifest_of(
    config: bytes, *layers: bytes, subject: RemoteManifest | None = None
) -> RemoteManifest:
    value = {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": RemoteDescriptor("application/json", Digest.of(config), len(config)).to_json(),
        "layers": [
            RemoteDescriptor("application/raw", Digest.of(layer), len(layer)).to_json()
            for layer in layers
        ],
    }
    if subject is not None:
        value["subject"] = descriptor_of(subject).to_json()
    return RemoteManifest.of(OCI_MANIFEST, strict_json.dumps(value).encode())


def descriptor_of(manifest: RemoteManifest) -> RemoteDescriptor:
    return RemoteDescriptor(manifest.media_type, manifest.digest, len(manifest.data))


def push_model(client: RegistryClient, repository: str, tag: str = "latest") -> RemoteManifest:
    push(client, repository, b"{}")
    push(client, repository, DATA)
    manifest = manifest_of(b"{}", DATA)
    client.put_manifest(repository, tag, manifest)
    return manifest


def test_uploaded_blob_can_be_read_whole_and_in_ranges(
    client: RegistryClient, repository: str
) -> None:
    digest = push(client, repository, DATA)

    assert client.blob_size(repository, digest) == len(DATA)
    size = len(DATA)
    assert b"".join(client.read_blob(repository, digest, 0, size, size=size)) == DATA
    assert b"".join(client.read_blob(repository, digest, 0, size)) == DATA
    assert b"".join(client.read_blob(repository, digest, 5, 70000)) == DATA[5:70000]
    assert list(client.read_blob(repository, digest, 5, 5)) == []


@pytest.mark.parametrize("data", [b"", b"x", DATA[:1000]])
def test_small_blobs_can_be_uploaded(client: RegistryClient, repository: str, data: bytes) -> None:
    digest = push(client, repository, data)

    assert client.blob_size(repository, digest) == len(data)
    assert b"".join(client.read_blob(repository, digest, 0, len(data))) == data


def test_missing_blob_has_no_size_and_cannot_be_read(
    client: RegistryClient, repository: str
) -> None:
    push(client, repository, b"other")
    digest = Digest.of(b"missing")

    assert client.blob_size(repository, digest) is None
    with pytest.raises(BlobMissing, match=f"blob {digest.short}: the registry does not have it"):
        list(client.read_blob(repository, digest, 0, 7))


def test_blob_that_is_shorter_or_longer_than_expected_is_damaged(
    client: RegistryClient, repository: str
) -> None:
    digest = push(client, repository, DATA)

    for begin, end, size in [(0, 300_000, 300_000), (0, 1000, 1000), (5, 300_000, None)]:
        with pytest.raises(BlobDamaged, match="has .* bytes"):
            list(client.read_blob(repository, digest, begin, end, size=size))
    with pytest.raises(BlobDamaged, match="has fewer bytes"):
        list(client.read_blob(repository, digest, len(DATA), len(DATA) + 5))


def test_large_blob_is_uploaded_in_parts(
    client: RegistryClient, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "PART", 100_000)
    sessions: list[UploadSession] = []
    digest = Digest.of(DATA)

    client.upload_blob(repository, digest, len(DATA), pieces_of(DATA), on_session=sessions.append)

    assert [session.offset for session in sessions] == [100_000, 200_000, 256_000]
    assert b"".join(client.read_blob(repository, digest, 0, len(DATA))) == DATA


def test_upload_goes_on_where_another_process_left_it(
    client: RegistryClient,
    open_registry: Server,
    repository: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upload, "PART", 100_000)
    sessions: list[UploadSession] = []
    offsets: list[int] = []
    digest = Digest.of(DATA)

    def killed(session: UploadSession) -> None:
        sessions.append(session)
        raise KeyboardInterrupt

    def pieces(offset: int) -> list[bytes]:
        offsets.append(offset)
        return [DATA[offset:]]

    with pytest.raises(KeyboardInterrupt):
        client.upload_blob(repository, digest, len(DATA), pieces, on_session=killed)
    with RegistryClient(open_registry.host) as other:
        other.upload_blob(repository, digest, len(DATA), pieces, session=sessions[0])

    assert offsets == [0, 100_000, 200_000]
    assert client.blob_size(repository, digest) == len(DATA)


def test_upload_goes_on_after_a_lost_connection(client: RegistryClient, repository: str) -> None:
    offsets: list[int] = []
    digest = Digest.of(DATA)

    def pieces(offset: int) -> Iterator[bytes]:
        offsets.append(offset)
        yield DATA[offset : offset + 100_000]
        if len(offsets) == 1:
            raise TransientError("the connection is lost")
        yield DATA[offset + 100_000 :]

    client.upload_blob(repository, digest, len(DATA), pieces)

    assert len(offsets) == 2
    assert b"".join(client.read_blob(repository, digest, 0, len(DATA))) == DATA


def test_upload_that_the_registry_has_forgotten_begins_again(
    client: RegistryClient, open_registry: Server, repository: str
) -> None:
    url = f"http://{open_registry.host}/v2/{repository}/blobs/uploads/0?_state=x"
    digest = Digest.of(DATA)

    client.upload_blob(
        repository, digest, len(DATA), pieces_of(DATA), session=UploadSession(url, 1000)
    )

    assert client.blob_size(repository, digest) == len(DATA)


def test_blob_of_a_forgotten_upload_is_not_sent_again_if_it_has_arrived(
    client: RegistryClient, open_registry: Server, repository: str
) -> None:
    digest = push(client, repository, DATA)
    gone = UploadSession(f"http://{open_registry.host}/v2/{repository}/blobs/uploads/0", 1000)
    offsets: list[int] = []

    def pieces(offset: int) -> list[bytes]:
        offsets.append(offset)
        return [DATA[offset:]]

    client.upload_blob(repository, digest, len(DATA), pieces, session=gone)

    assert offsets == []


def test_pieces_that_end_early_are_an_error(client: RegistryClient, repository: str) -> None:
    digest = Digest.of(DATA)

    with pytest.raises(BlobDamaged, match="ends 6000 bytes early"):
        client.upload_blob(repository, digest, len(DATA), pieces_of(DATA[:250_000]))

    assert client.blob_size(repository, digest) is None


def test_blob_of_other_bytes_is_refused(client: RegistryClient, repository: str) -> None:
    with pytest.raises(RemoteRefused, match="DIGEST_INVALID"):
        client.upload_blob(repository, Digest.of(b"other"), len(DATA), pieces_of(DATA))


def test_blob_of_another_repository_is_mounted(client: RegistryClient, repository: str) -> None:
    digest = push(client, repository, DATA)

    assert client.mount_blob(f"{repository}-copy", digest, repository)
    assert client.blob_size(f"{repository}-copy", digest) == len(DATA)
    assert not client.mount_blob(repository, Digest.of(b"missing"), repository)


def test_manifest_is_returned_byte_for_byte_by_tag_and_digest(
    client: RegistryClient, repository: str
) -> None:
    manifest = push_model(client, repository, "v1")

    assert client.get_manifest(repository, "v1") == manifest
    assert client.get_manifest(repository, str(manifest.digest)) == manifest
    assert client.head_manifest(repository, "v1") == manifest.digest


def test_missing_manifest_is_not_found(client: RegistryClient, repository: str) -> None:
    push_model(client, repository)

    assert client.head_manifest(repository, "v2") is None
    with pytest.raises(
        ModelNotFound,
        match=f"manifest '.*/{repository}:v2': the registry has none; "
        f"'blobstore list oci://{client.host}/{repository}' lists the tags",
    ):
        client.get_manifest(repository, "v2")


def test_manifest_without_its_blobs_is_refused(client: RegistryClient, repository: str) -> None:
    with pytest.raises(RemoteRefused, match="MANIFEST_BLOB_UNKNOWN"):
        client.put_manifest(repository, "latest", manifest_of(b"{}", b"never pushed"))


def test_tags_are_listed(client: RegistryClient, repository: str) -> None:
    push_model(client, repository, "a")
    push_model(client, repository, "b")

    assert sorted(client.tags(repository)) == ["a", "b"]
    with pytest.raises(ModelNotFound, match="the registry has no such repository"):
        list(client.tags(f"{repository}-missing"))


def test_tags_come_in_pages(
    client: RegistryClient, repository: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.registry.client._PAGE", 2)
    for tag in "abcde":
        push_model(client, repository, tag)

    assert sorted(client.tags(repository)) == list("abcde")


def test_referrers_are_found_by_tag_if_the_registry_lists_none(
    client: RegistryClient, repository: str
) -> None:
    manifest = push_model(client, repository)
    assert client.referrers(repository, manifest.digest) == ()

    signature = manifest_of(b"{}", DATA, subject=manifest)
    client.put_manifest(repository, str(signature.digest), signature)
    index = {
        "schemaVersion": 2,
        "mediaType": OCI_INDEX,
        "manifests": [descriptor_of(signature).to_json()],
    }
    client.put_manifest(
        repository,
        f"sha256-{manifest.digest.hex}",
        RemoteManifest.of(OCI_INDEX, strict_json.dumps(index).encode()),
    )

    assert client.referrers(repository, manifest.digest) == (descriptor_of(signature),)


def test_a_registry_that_cannot_wait_says_at_once_whether_a_tag_has_changed(
    client: RegistryClient,
) -> None:
    first = push_model(client, "tests/watched")
    assert client.watch_manifest("tests/watched", "latest", None, 30) == (first.digest, False)
    assert client.watch_manifest("tests/watched", "latest", first.digest, 30) == (
        first.digest,
        False,
    )
    other = Digest.of(b"other")
    assert client.watch_manifest("tests/watched", "latest", other, 30) == (first.digest, False)
    with pytest.raises(ModelNotFound):
        client.watch_manifest("tests/watched", "none", None, 30)
