"""Models that other tools have pushed file by file, as modctl and Docker Model Runner lay them out."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, DamagedSource, NameTaken, NotTrusted
from blobstore.operations.transfer.verify_remote import verify_remote
from blobstore.registry.client import RegistryClient
from blobstore.registry.manifest import OCI_MANIFEST, RemoteManifest
from blobstore.registry.reference import RemoteReference
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore
from blobstore.store.names import Names
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.models import dense_tensors, write_folder
from tests.support.ollama_store import F32, GGUF_FILE

PACK = "application/vnd.cncf.model."
DOCKER = "application/vnd.docker.ai."
Layer = tuple[str, str, bytes]
"""Media type, path and content."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {"tokenizer.json": b"{}", "README.md": b"# A model\n"}
    return write_folder(tmp_path / "source", dense_tensors(), shards=2, files=files)


@pytest.fixture
def expected(source: Path, tmp_path: Path) -> bytes:
    """The manifest that create makes of the files."""
    created = LocalStore(tmp_path / "created")
    blobstore.create(source, "model", store=created)
    return created.read_manifest("model")


def offer(remote: str, config_type: str, layers: list[Layer], **extra: Any) -> None:
    """Push an artifact as another tool does."""
    address = RemoteReference.parse(remote)
    config = b'{"config": {"format": "safetensors"}}'

    def described(media_type: str, content: bytes) -> dict[str, Any]:
        digest = Digest.of(content)
        client.upload_blob(
            address.repository, digest, len(content), lambda offset: [content[offset:]]
        )
        return {"mediaType": media_type, "digest": str(digest), "size": len(content)}

    with RegistryClient(address.host) as client:
        value = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            **extra,
            "config": described(config_type, config),
            "layers": [
                described(media_type, content)
                | ({"annotations": {"org.cncf.model.filepath": path}} if path else {})
                for media_type, path, content in layers
            ],
        }
        data = json.dumps(value).encode()
        manifest = RemoteManifest(OCI_MANIFEST, data, Digest.of(data))
        client.put_manifest(address.repository, address.tag, manifest)


def modctl_layers(source: Path) -> list[Layer]:
    kinds = {".safetensors": "weight", ".md": "doc"}
    return [
        (f"{PACK}{kinds.get(path.suffix, 'weight.config')}.v1.raw", path.name, path.read_bytes())
        for path in sorted(source.iterdir())
    ]


def offer_as_modctl(remote: str, source: Path) -> None:
    config_type, artifact_type = f"{PACK}config.v1+json", f"{PACK}manifest.v1+json"
    offer(remote, config_type, modctl_layers(source), artifactType=artifact_type)


def offer_as_docker(remote: str, source: Path) -> None:
    """Push as Docker Model Runner did at first: weights without names, and a tar of the rest."""
    weights = sorted(source.glob("*.safetensors"))
    others = io.BytesIO()
    with tarfile.open(fileobj=others, mode="w") as tar:
        for path in set(source.iterdir()) - set(weights):
            tar.add(path, path.name)
    layers = [(f"{DOCKER}safetensors", "", path.read_bytes()) for path in weights]
    layers.append((f"{DOCKER}vllm.config.tar", "", others.getvalue()))
    offer(remote, f"{DOCKER}model.config.v0.1+json", layers)


def offer_as_docker_files(remote: str, source: Path) -> None:
    layers = [
        (
            f"{DOCKER}{'safetensors' if path.suffix == '.safetensors' else 'model.file'}",
            path.name,
            path.read_bytes(),
        )
        for path in sorted(source.iterdir())
    ]
    offer(remote, f"{DOCKER}model.config.v0.2+json", layers)


@pytest.mark.parametrize("offer_model", [offer_as_modctl, offer_as_docker, offer_as_docker_files])
def test_a_model_of_another_tool_becomes_what_create_makes_of_its_files(
    offer_model: Any, remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    offer_model(remote, source)
    reports: list[int] = []
    pulled = blobstore.pull(
        remote, "model", store=store, progress=lambda _, done, __: reports.append(done)
    )
    assert pulled.layout == "files"
    assert store.read_manifest("model") == expected
    assert reports == sorted(reports)
    assert not blobstore.verify(store=store).faults


def test_gguf_files_become_what_create_makes_of_them(
    remote: str, tmp_path: Path, store: LocalStore
) -> None:
    projector = gguf_file(
        [("general.architecture", TEXT, text("clip"))], [("v.weight", F32, (2,), bytes(8))]
    )
    files = {"model.gguf": GGUF_FILE, "mmproj-model.gguf": projector, "LICENSE": b"MIT\n"}
    layers = [
        (f"{DOCKER}{kind}", "", files[name])
        for kind, name in (
            ("gguf.v3", "model.gguf"),
            ("mmproj", "mmproj-model.gguf"),
            ("license", "LICENSE"),
        )
    ]
    offer(remote, f"{DOCKER}model.config.v0.1+json", layers)
    assert blobstore.pull(remote, "model", store=store).layout == "files"
    blobstore.export("model", tmp_path / "out", store=store)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == files
    with blobstore.open("model", store=store) as model:
        assert "v.weight" in model
        assert model.quantized["token_embd.weight"] == ("q8_0", 32)


def test_a_modelpack_of_a_gguf_file_keeps_its_name(
    remote: str, tmp_path: Path, store: LocalStore
) -> None:
    layers = [(f"{PACK}weight.v1.raw", "tiny-Q8_0.gguf", GGUF_FILE)]
    offer(remote, f"{PACK}config.v1+json", layers, artifactType=f"{PACK}manifest.v1+json")
    blobstore.pull(remote, "model", store=store)
    blobstore.export("model", tmp_path / "out", store=store)
    assert (tmp_path / "out" / "tiny-Q8_0.gguf").read_bytes() == GGUF_FILE


def test_a_request_to_end_the_program_after_the_import_of_files_reports_success(
    remote: str,
    source: Path,
    store: LocalStore,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def publish(*arguments: Any) -> bytes | None:
        former = original(*arguments)
        request.getfixturevalue("requested")
        return former

    original = Names.publish
    offer_as_modctl(remote, source)
    monkeypatch.setattr(Names, "publish", publish)
    assert blobstore.pull(remote, "model", store=store).layout == "files"


def test_files_of_another_tool_can_be_read_back(remote: str, source: Path) -> None:
    offer_as_modctl(remote, source)
    found = verify_remote(remote)
    assert found.faults == ()
    assert found.bytes_read == sum(path.stat().st_size for path in source.iterdir())


def test_a_policy_can_pin_the_manifest_in_the_registry(
    remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    offer_as_modctl(remote, source)
    digest = blobstore.pull(remote, "model", store=store, dry_run=True).digest

    def pin(pinned: Digest) -> None:
        store.policy_path.parent.mkdir(parents=True, exist_ok=True)
        store.policy_path.write_text(
            f'version = 1\n[[rules]]\nmatch = "*"\naction = "enforce"\npins = ["{pinned}"]\n'
        )

    pin(Digest.of(b"another manifest"))
    with pytest.raises(NotTrusted):
        blobstore.pull(remote, "model", store=store)
    assert not store.has_model("model")
    pin(digest)
    blobstore.pull(remote, "model", store=store)
    assert store.read_manifest("model") == expected


def test_nothing_but_the_model_stays(remote: str, source: Path, store: LocalStore) -> None:
    offer_as_modctl(remote, source)
    blobstore.pull(remote, "model", store=store)
    assert list(store.folder("partial").iterdir()) == []
    assert list(store.folder("temporary").iterdir()) == []
    held = {blob.digest.file_name for blob in store.resolve("model").blobs}
    assert {path.name for path in store.folder("blobs").iterdir()} == held


def test_a_frozen_file_of_the_store_is_not_fetched(
    remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    offer_as_modctl(remote, source)
    blobstore.pull(remote, "first", store=store)
    blobstore.freeze("first", store=store)
    again = blobstore.pull(remote, "second", store=store)
    assert again.bytes_present > 0
    assert store.read_manifest("second") == expected


def test_a_failed_import_keeps_what_was_fetched(
    remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    wrong = [*modctl_layers(source), (f"{PACK}weight.config.v1.tar", "", b"no tar" * 200)]
    offer(remote, f"{PACK}config.v1+json", wrong)
    with pytest.raises(DamagedSource):
        blobstore.pull(remote, "model", store=store)
    assert not store.has_model("model")
    offer_as_modctl(f"{remote}-right", source)
    again = blobstore.pull(f"{remote}-right", "model", store=store)
    assert (again.bytes_fetched, store.read_manifest("model")) == (0, expected)


def test_a_name_that_is_taken_needs_force(remote: str, source: Path, store: LocalStore) -> None:
    offer_as_modctl(remote, source)
    blobstore.create(source, "model", store=store)
    with pytest.raises(NameTaken):
        blobstore.pull(remote, "model", store=store)
    blobstore.pull(remote, "model", store=store, force=True)


def test_files_that_were_pulled_before_are_not_fetched_again(
    remote: str, source: Path, store: LocalStore
) -> None:
    offer_as_modctl(remote, source)
    blobstore.pull(remote, "model", store=store)
    for dry_run in (True, False):
        again = blobstore.pull(remote, "model", store=store, dry_run=dry_run)
        assert (again.blobs_fetched, again.bytes_fetched, again.replaced) == (0, 0, False)


def test_files_are_fetched_again_if_a_blob_is_damaged(
    remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    offer_as_modctl(remote, source)
    blobstore.pull(remote, "model", store=store)
    blob = store.resolve("model").layers[0]
    path = Path(store.blob_path(blob.digest))
    path.chmod(0o644)
    path.write_bytes(bytes(blob.size))
    assert blobstore.pull(remote, "model", store=store).blobs_fetched > 0
    assert store.read_manifest("model") == expected
    assert not blobstore.verify(store=store).faults


def test_newer_files_replace_those_that_were_pulled_from_there(
    remote: str, source: Path, expected: bytes, store: LocalStore
) -> None:
    offer_as_modctl(remote, source)
    blobstore.pull(remote, "model", store=store)
    (source / "README.md").write_bytes(b"# A newer model\n")
    offer_as_modctl(remote, source)
    newer = blobstore.pull(remote, "model", store=store)
    assert newer.replaced
    assert "'blobstore restore model:latest' brings that back" in newer.notices[0]
    assert store.read_manifest("model") != expected
    former = blobstore.history("model", store=store)[-1]
    assert former.digest == Digest.of(expected)


def test_a_dry_run_fetches_nothing(remote: str, source: Path, store: LocalStore) -> None:
    offer_as_modctl(remote, source)
    planned = blobstore.pull(remote, "model", store=store, dry_run=True)
    assert planned.bytes_fetched == sum(path.stat().st_size for path in source.iterdir())
    assert not store.has_model("model")


@pytest.mark.parametrize(
    ("layers", "error"),
    [
        ([(f"{DOCKER}gguf.v3", "", b"GGUF")], DamagedSource),
        ([(f"{PACK}weight.v1.raw", "../../escape", b"x")], BlobstoreError),
        ([(f"{PACK}weight.v1.raw", "model.safetensors", b"no weights")], BlobstoreError),
        ([(f"{PACK}doc.v1.raw", "README.md", b"no weights")], BlobstoreError),
    ],
)
def test_what_cannot_be_imported_leaves_no_model(
    layers: list[Layer], error: type[BlobstoreError], remote: str, store: LocalStore
) -> None:
    offer(remote, f"{PACK}config.v1+json", layers)
    with pytest.raises(error):
        blobstore.pull(remote, "model", store=store)
    assert not store.has_model("model")


def test_files_of_another_tool_have_no_id_before_they_are_pulled(
    source: Path, remote: str, tmp_path: Path
) -> None:
    offer_as_modctl(remote, source)
    (entry,) = read_remote_catalog(f"oci://{remote}")
    pulled = blobstore.pull(remote, "model", store=tmp_path / "store")
    assert (entry.digest, entry.registry_digest) == (None, pulled.digest)
