"""Pushes to a real registry: what arrives there, what is not sent twice, and what is refused."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    ModelNotFound,
    RemoteError,
    RemoteRefused,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.operations.transfer.push import Pushed
from blobstore.operations.transfer.registry_target import RegistryOptions
from blobstore.planning.plan import QuantizeOptions
from blobstore.registry.client import RegistryClient
from blobstore.registry.layouts.oci import MAX_LAYERS
from blobstore.registry.layouts.plan import FILE_PATH, RemoteLayout
from blobstore.registry.layouts.read import RemoteModel, read_model
from blobstore.registry.manifest import RemoteManifest
from blobstore.registry.reference import RemoteReference
from blobstore.registry.upload import PART, UploadSession
from blobstore.remotes import transfer_cache
from blobstore.remotes.checked_pieces import CheckedPieces
from blobstore.remotes.transfer_cache import PushCache
from blobstore.store.local import LocalStore
from blobstore.store.notes import pack, unpack
from tests.support.models import dense_tensors, quantizable_tensors, write_folder
from tests.support.ollama_store import PROJECTOR, add_gguf_model
from tests.support.options import grouped
from tests.support.registry import Server, token_registry
from tests.support.token_server import TokenServer

LAYOUTS: tuple[RemoteLayout, ...] = ("oci", "ollama", "image")


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    """A store with one model."""
    store = LocalStore(tmp_path / "origin")
    blobstore.create(write_folder(tmp_path / "dense", dense_tensors()), "org/Dense", store=store)
    return store


def push(origin: LocalStore, remote: str, name: str = "org/Dense", **options: Any) -> Pushed:
    return blobstore.push(name, remote, store=origin, **grouped(options))


def read_back(remote: str) -> tuple[RemoteModel, dict[Digest, bytes]]:
    """Return a model and its blobs, as any client reads them."""
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:

        def manifest(reference: object) -> RemoteManifest:
            return client.get_manifest(address.repository, str(reference))

        def blob(digest: Digest, begin: int, end: int) -> bytes:
            return b"".join(client.read_blob(address.repository, digest, begin, end))

        model = read_model(
            manifest(address.tag), manifest, lambda digest, size: blob(digest, 0, size)
        )
        assert isinstance(model, RemoteModel)
        contents = {}
        for item in model.blobs:
            place = model.places.get(item.digest)
            digest, begin = (place.digest, place.offset) if place else (item.digest, 0)
            contents[item.digest] = blob(digest, begin, begin + item.size)
        return model, contents


def count_calls(monkeypatch: pytest.MonkeyPatch, *methods: str) -> dict[str, int]:
    """Count the calls of the client's methods from now on."""
    counts = dict.fromkeys(methods, 0)

    def counted(method: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[method] += 1
            return original(*arguments, **options)

        return call

    for method in methods:
        original = getattr(RegistryClient, method)
        monkeypatch.setattr(RegistryClient, method, counted(method, original))
    return counts


def damage(store: LocalStore, digest: Digest) -> None:
    """Flip a bit of a blob without changing its size."""
    path = Path(store.blob_path(digest))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model_comes_back(origin: LocalStore, remote: str, layout: Any) -> None:
    done = push(origin, remote, registry=RegistryOptions(layout=layout), verify=True)
    assert not done.is_unchanged
    assert done.bytes_verified == done.bytes_sent + done.bytes_mounted + done.bytes_present > 0
    model, contents = read_back(remote)
    assert model.layout == layout
    assert model.manifest == origin.read_manifest("org/Dense")
    assert all(Digest.of(data) == digest for digest, data in contents.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_unchanged_model_costs_one_request(
    origin: LocalStore, remote: str, layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = push(origin, remote, registry=RegistryOptions(layout=layout))
    counts = count_calls(
        monkeypatch, "head_manifest", "blob_size", "mount_blob", "upload_blob", "put_manifest"
    )
    again = push(origin, remote, registry=RegistryOptions(layout=layout))
    assert again.is_unchanged
    assert again.digest == first.digest
    assert again.bytes_sent == 0
    assert counts == {**dict.fromkeys(counts, 0), "head_manifest": 1}


def test_equal_models_of_two_stores_have_equal_remote_digests(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    blobstore.create(tmp_path / "dense", "team/Dense", store=other)
    for layout in LAYOUTS:
        first = push(origin, remote, registry=RegistryOptions(layout=layout))
        assert (
            push(other, remote, "team/Dense", registry=RegistryOptions(layout=layout)).digest
            == first.digest
        )


def test_a_model_of_more_layers_than_a_manifest_may_have_becomes_an_index(
    origin: LocalStore, remote: str
) -> None:
    done = push(origin, remote, registry=RegistryOptions(max_layers=3), verify=True)
    assert done.manifests > 3
    model, _ = read_back(remote)
    assert model.manifest == origin.read_manifest("org/Dense")


def test_a_registry_that_refuses_many_layers_gets_an_index(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon's registry answers 405 to a manifest of more than 500 layers, and this one of more than 100."""
    assert MAX_LAYERS <= 500
    original = RegistryClient.put_manifest

    def put(
        self: Any, repository: str, reference: str, manifest: RemoteManifest, *rest: Any
    ) -> None:
        if len(json.loads(manifest.data).get("layers", ())) > 100:
            raise RemoteRefused("405 UNSUPPORTED")
        original(self, repository, reference, manifest, *rest)

    monkeypatch.setattr(RegistryClient, "put_manifest", put)
    store = LocalStore(tmp_path / "many")
    tensor = dense_tensors()["mask"]
    tensors = {f"layers.{number}.weight": tensor for number in range(150)}
    blobstore.create(write_folder(tmp_path / "source", tensors), "many", store=store)
    with pytest.raises(RemoteRefused, match="layers; if that is too many .* '--max-layers 100'"):
        push(store, remote, "many", registry=RegistryOptions(max_layers=10_000))
    with pytest.raises(RemoteRefused, match="'--layout oci'"):
        push(store, remote, "many", registry=RegistryOptions(layout="ollama"))
    assert push(store, remote, "many", registry=RegistryOptions(max_layers=100)).manifests == 3
    assert read_back(remote)[0].manifest == store.read_manifest("many")


def test_blobs_of_another_repository_are_mounted(origin: LocalStore, remote: str) -> None:
    first = push(origin, remote)
    second = push(origin, f"{remote}-copy")
    assert (second.bytes_sent, second.bytes_mounted) == (0, first.bytes_sent)


def test_no_blob_is_mounted_from_the_repository_itself(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, "mount_blob")
    pushed = push(
        origin,
        remote,
        registry=RegistryOptions(mount_from=(RemoteReference.parse(remote).repository,)),
    )
    assert pushed.bytes_sent
    assert calls == {"mount_blob": 0}


def test_blobs_are_mounted_from_a_given_repository(
    origin: LocalStore, remote: str, tmp_path: Path
) -> None:
    first = push(origin, remote)
    other = LocalStore(tmp_path / "other")  # it has pushed nothing before
    blobstore.create(tmp_path / "dense", "org/Dense", store=other)
    repository = RemoteReference.parse(remote).repository
    second = push(
        other, f"{remote}-copy", registry=RegistryOptions(mount_from=("tests/none", repository))
    )
    assert (second.bytes_sent, second.bytes_mounted) == (0, first.bytes_sent)


def test_wrong_notes_cost_only_requests(origin: LocalStore, remote: str) -> None:
    push(origin, remote)
    (note,) = origin.folder("remotes").glob("registry-*")
    kind, key = transfer_cache._NOTE, Digest.of(note.name.encode())
    known = json.loads(unpack(kind, key, note.read_bytes()) or b"")
    for content in (
        b"\xff",
        b"[]",
        b'{"a": 1}',
        json.dumps({"tests/gone": [blob for blobs in known.values() for blob in blobs]}).encode(),
    ):
        note.write_bytes(pack(kind, key, content))
        done = push(origin, f"{remote}-{len(content)}")
        assert done.bytes_mounted == 0
        assert done.bytes_sent > 0


def test_notes_of_other_users_are_not_read(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(origin, remote)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert push(origin, f"{remote}-copy").bytes_mounted == 0


def test_frozen_blobs_are_decompressed_on_the_way(origin: LocalStore, remote: str) -> None:
    blobstore.freeze("org/Dense", store=origin)
    push(origin, remote, verify=True)
    assert read_back(remote)[0].manifest == origin.read_manifest("org/Dense")


def test_a_dry_run_sends_nothing(origin: LocalStore, remote: str) -> None:
    planned = push(origin, remote, dry_run=True)
    assert planned.is_dry_run
    assert not origin.folder("remotes").exists()
    with RegistryClient(RemoteReference.parse(remote).host) as client:
        assert client.head_manifest(RemoteReference.parse(remote).repository, "latest") is None
    assert push(origin, remote).bytes_sent == planned.bytes_sent > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_progress_only_grows_and_ends_at_the_total(
    origin: LocalStore, remote: str, layout: Any
) -> None:
    reports: list[tuple[int, int]] = []
    push(
        origin,
        remote,
        registry=RegistryOptions(layout=layout),
        verify=True,
        progress=lambda _, done, total: reports.append((done, total)),
    )
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1][0] == reports[-1][1]


def test_gc_removes_no_blob_that_is_being_pushed(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RegistryClient.upload_blob
    data = origin.read_manifest("org/Dense")

    def collect(self: Any, *arguments: Any, **options: Any) -> int:
        if origin.has_model("org/Dense"):
            blobstore.remove("org/Dense", store=origin)
        blobstore.gc(store=origin, older_than=0, force=True)
        return original(self, *arguments, **options)

    monkeypatch.setattr(RegistryClient, "upload_blob", collect)
    push(origin, remote, streams=1)
    assert read_back(remote)[0].manifest == data
    monkeypatch.undo()
    blobstore.gc(store=origin, older_than=0, force=True)
    assert not list(origin.folder("blobs").glob("sha256-*"))


# Facts about the model


def test_the_config_states_what_the_model_is(tmp_path: Path, remote: str) -> None:
    files = {
        "config.json": b'{"architectures": ["TinyForCausalLM"], "model_type": "tiny"}',
        "README.md": b"---\nlicense: apache-2.0\n---\nA model.\n",
    }
    store = LocalStore(tmp_path / "store")
    tensors = {"a.weight": dense_tensors()["model.embed_tokens.weight"]}
    blobstore.create(write_folder(tmp_path / "tiny", tensors, files=files), "Tiny-32", store=store)
    push(store, remote, "Tiny-32")
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        manifest = json.loads(client.get_manifest(address.repository, "latest").data)
        config = manifest["config"]
        digest = Digest.parse(config["digest"])
        content = b"".join(client.read_blob(address.repository, digest, 0, config["size"]))
    value = json.loads(content)
    assert value["descriptor"] == {"family": "tiny", "name": "Tiny-32", "licenses": ["Apache-2.0"]}
    assert value["config"] == {
        "architecture": "TinyForCausalLM",
        "format": "safetensors",
        "paramSize": "0.0K",
        "precision": "float32",
    }
    paths = [layer["annotations"][FILE_PATH] for layer in manifest["layers"]]
    assert "model.safetensors" in paths
    assert "config.json" in paths


# Damage, and errors of arguments


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_blob_is_never_published(origin: LocalStore, remote: str, layout: Any) -> None:
    layer = origin.resolve("org/Dense").layers_of(media_types.TENSOR)[2]
    damage(origin, layer.digest)
    with pytest.raises(BlobDamaged, match="is damaged.*repair") as caught:
        push(origin, remote, registry=RegistryOptions(layout=layout))
    assert layout == "image" or layer.name in str(caught.value)
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        assert client.head_manifest(address.repository, "latest") is None
        assert client.blob_size(address.repository, layer.digest) is None


def test_a_missing_blob_is_an_error_before_anything_is_sent(
    origin: LocalStore, remote: str
) -> None:
    layer = origin.resolve("org/Dense").layers_of(media_types.TENSOR)[0]
    Path(origin.blob_path(layer.digest)).unlink()
    with pytest.raises(BlobMissing):
        push(origin, remote)


def test_verifying_finds_bits_that_the_server_has_lost(
    origin: LocalStore, server: Server, remote: str
) -> None:
    push(origin, remote)
    layer = max(origin.resolve("org/Dense").layers, key=lambda layer: layer.size)
    path = server.blob(str(layer.digest))
    intact = path.read_bytes()
    path.write_bytes(bytes([intact[0] ^ 1]) + intact[1:])
    try:
        with pytest.raises(BlobDamaged, match="the registry returns bytes with digest"):
            push(origin, remote, verify=True)
    finally:
        path.write_bytes(intact)


def test_verifying_sends_again_what_the_registry_has_lost(
    origin: LocalStore, server: Server, remote: str
) -> None:
    push(origin, remote)
    layer = max(origin.resolve("org/Dense").layers, key=lambda layer: layer.size)
    server.blob(str(layer.digest)).unlink()

    assert push(origin, remote).is_unchanged  # that is one request, which cannot tell
    healed = push(origin, remote, verify=True)

    assert not healed.is_unchanged
    assert healed.bytes_sent == layer.size
    assert push(origin, remote, verify=True).is_unchanged


def test_an_unknown_model_is_an_error(origin: LocalStore, remote: str) -> None:
    with pytest.raises(ModelNotFound):
        push(origin, remote, "none")


def test_a_name_without_a_host_needs_a_remote(origin: LocalStore) -> None:
    with pytest.raises(UsageError, match="has no host to push to"):
        blobstore.push("org/Dense", store=origin)


def test_a_name_with_a_host_is_its_own_remote(origin: LocalStore, server: Server) -> None:
    name = f"{server.host}/Own/Model:v1"
    blobstore.copy("org/Dense", name, store=origin)
    done = blobstore.push(name, store=origin)
    assert str(done.remote) == f"{server.host}/own/model:v1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "tar"}, "layout must be"),
        ({"streams": 0}, "at least 1"),
        ({"max_layers": 0}, "at least 1"),
        ({"limit_rate": 0}, "at least 1 byte"),
    ],
)
def test_wrong_options_are_refused(
    origin: LocalStore, remote: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        push(origin, remote, **grouped(options))


def test_a_digest_is_nothing_to_push_to(origin: LocalStore, remote: str) -> None:
    with pytest.raises(UsageError, match="cannot push to the digest"):
        push(origin, f"{remote}@sha256:{'0' * 64}")


def test_a_registry_that_does_not_answer_is_an_error(
    origin: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RegistryClient, "head_manifest", refuse_connection)
    with pytest.raises(RemoteError):
        push(origin, "127.0.0.1:1/a/b")


def refuse_connection(*_: object) -> None:
    raise RemoteError("connection refused")


def test_a_refused_manifest_of_few_layers_is_an_error(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RemoteRefused("the tag cannot be changed", status=403, code="DENIED")

    monkeypatch.setattr(RegistryClient, "put_manifest", refuse)
    with pytest.raises(RemoteRefused, match="the tag cannot be changed") as caught:
        push(origin, remote)
    assert (caught.value.status, caught.value.code) == (403, "DENIED")
    assert "max-layers" not in str(caught.value)


# Large blobs


@pytest.fixture
def large(tmp_path: Path) -> tuple[LocalStore, bytes]:
    """A store with a model of one blob that is uploaded in two parts."""
    from tests.support.models import add_blobs, blob

    data = os.urandom(2**20) * (PART // 2**20 + 1)
    content = blob(("x", "U8", (len(data),), data))
    store = LocalStore(tmp_path / "large")
    add_blobs(store, "large", {"x": content})
    return store, content


def test_a_killed_upload_goes_on_where_it_stopped(
    large: tuple[LocalStore, bytes], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = large
    keep = PushCache.keep_session

    def die(self: Any, digest: Digest, session: UploadSession) -> None:
        keep(self, digest, session)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(PushCache, "keep_session", die)
        push(store, remote, "large", registry=RegistryOptions(layout="ollama"))
    offsets: list[int] = []
    pieces = CheckedPieces.__call__

    def recorded(self: Any, offset: int) -> Any:
        offsets.append(offset)
        return pieces(self, offset)

    monkeypatch.setattr(CheckedPieces, "__call__", recorded)
    done = push(store, remote, "large", registry=RegistryOptions(layout="ollama"), verify=True)
    assert [offset for offset in offsets if offset] == [PART]
    assert done.bytes_resumed == PART
    assert done.bytes_sent + PART + done.bytes_present == done.bytes_verified
    assert read_back(remote)[1][Digest.of(content)] == content
    assert not list(store.folder("remotes").glob("upload-*"))


def test_two_processes_never_go_on_with_one_upload(
    large: tuple[LocalStore, bytes], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = large
    address, blob = RemoteReference.parse(remote), Digest.of(content)
    with PushCache(store, address) as first, PushCache(store, address) as second:
        first.keep_session(blob, UploadSession("http://127.0.0.1/first", PART))
        assert second.session(blob) is None
        second.keep_session(blob, UploadSession("http://127.0.0.1/second", PART))
        second.forget_session(blob)
        assert first.session(blob) == UploadSession("http://127.0.0.1/first", PART)
    with PushCache(store, address) as third:
        assert third.session(blob) == UploadSession("http://127.0.0.1/first", PART)
    push(
        store, remote, "large", registry=RegistryOptions(layout="ollama"), verify=True
    )  # the server does not know it


def test_a_store_that_cannot_be_written_is_pushed(
    origin: LocalStore, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError

    monkeypatch.setattr("blobstore.remotes.transfer_cache.make_folders", refuse)
    monkeypatch.setattr("blobstore.store.notes.write_file", refuse)
    push(origin, remote)
    assert read_back(remote)[0].manifest == origin.read_manifest("org/Dense")


def test_a_large_blob_is_read_and_hashed_once_although_it_is_sent_in_parts(
    large: tuple[LocalStore, bytes], remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, content = large
    read = 0
    original = store.read_pieces

    def counted(digest: Digest, size: int) -> Any:
        nonlocal read
        for piece in original(digest, size):
            read += len(piece)
            yield piece

    monkeypatch.setattr(store, "read_pieces", counted)
    push(store, remote, "large", registry=RegistryOptions(layout="ollama"))
    assert read < len(content) + 1000


# Models that other libraries cannot load from the blobs as they are


def described(remote: str) -> tuple[dict[str, Any], list[str]]:
    """Return ModelPack's config of a pushed model, and the paths of its layers."""
    address = RemoteReference.parse(remote)
    with RegistryClient(address.host) as client:
        manifest = json.loads(client.get_manifest(address.repository, "latest").data)
        digest, size = Digest.parse(manifest["config"]["digest"]), manifest["config"]["size"]
        config = json.loads(b"".join(client.read_blob(address.repository, digest, 0, size)))
    return config["config"], [layer["annotations"][FILE_PATH] for layer in manifest["layers"]]


def test_quantized_blobs_are_not_offered_as_weight_files(tmp_path: Path, remote: str) -> None:
    store = LocalStore(tmp_path / "store")
    folder = write_folder(tmp_path / "source", quantizable_tensors())
    blobstore.create(folder, "small", store=store, quantize=QuantizeOptions("int8"))
    push(store, remote, "small")
    config, paths = described(remote)
    assert config["quantization"] == "int8"
    assert config["precision"] == "bfloat16"
    weights = [path for path in paths if path.endswith(".safetensors")]
    assert weights
    assert all(path.startswith("tensors/") for path in weights)
    assert not any(path.endswith("index.json") for path in paths)


def test_a_gguf_model_of_ollama_is_pushed_in_every_layout(tmp_path: Path, remote: str) -> None:
    store = LocalStore(tmp_path / "store")
    add_gguf_model(store, "gguf")
    for layout in LAYOUTS:
        pushed = push(
            store,
            f"{remote}-{layout}",
            "gguf",
            registry=RegistryOptions(layout=layout),
            verify=True,
            cold=True,
        )
        assert pushed.cold_blobs == 0
        assert read_back(f"{remote}-{layout}")[0].manifest == store.read_manifest("gguf")
    values, paths = described(f"{remote}-oci")
    assert values == {
        "format": "gguf",
        "paramSize": "0.6K",
        "precision": "float32",
        "quantization": "q8_0",
    }
    assert {"model.gguf", "LICENSE"} <= set(paths)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gguf_model_of_ollama_is_pulled_from_every_layout(
    tmp_path: Path, remote: str, layout: Any
) -> None:
    store, other = LocalStore(tmp_path / "store"), LocalStore(tmp_path / "other")
    add_gguf_model(store, "gguf")
    push(store, remote, "gguf", registry=RegistryOptions(layout=layout))
    assert blobstore.pull(remote, "gguf", store=other).layout == layout
    assert other.read_manifest("gguf") == store.read_manifest("gguf")
    assert not blobstore.verify(store=other).faults
    with blobstore.open("gguf", store=other) as model:
        assert model.quantized["token_embd.weight"] == ("q8_0", 32)


def test_a_model_imported_from_ollama_is_pushed_as_ollama_had_it(
    tmp_path: Path, remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ollama, store = LocalStore(tmp_path / "ollama"), LocalStore(tmp_path / "store")
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama.root))
    add_gguf_model(ollama, "gguf", projector=PROJECTOR)
    blobstore.create("ollama://gguf", "gguf", store=store)
    registry = RegistryOptions(layout="ollama")
    pushed = push(store, remote, "gguf", registry=registry, verify=True, cold=True)
    assert pushed.digest == Digest.of(ollama.read_manifest("gguf"))
    model, blobs = read_back(remote)
    assert model.manifest == ollama.read_manifest("gguf")
    assert blobs == {it.digest: ollama.read_blob(*it.id) for it in ollama.resolve("gguf").blobs}
    assert push(store, remote, "gguf", registry=registry).bytes_sent == 0


def test_a_registry_with_tokens_gets_a_model_and_mounts_its_blobs(
    origin: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = base64.b64encode(b"user:password").decode()
    config = tmp_path / "docker"
    config.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(config))
    tokens = TokenServer("user", "password")
    with tokens, token_registry(tmp_path / "registry", tokens) as server:
        remote = f"{server.host}/team/dense"
        (config / "config.json").write_text(json.dumps({"auths": {server.host: {"auth": secret}}}))
        first = push(origin, remote, verify=True)
        second = push(origin, f"{remote}-copy")
        assert (second.bytes_sent, second.bytes_mounted) == (0, first.bytes_sent)
        assert read_back(f"{remote}-copy")[0].manifest == origin.read_manifest("org/Dense")
        (config / "config.json").write_text("{}")
        with pytest.raises(RemoteRefused):
            push(origin, f"{remote}-anonymous")
