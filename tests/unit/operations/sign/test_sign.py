from __future__ import annotations

import json
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, BlobstoreError, ModelNotFound, NotFound, UsageError
from blobstore.folders.digests import Layout
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.source_record import SourceRecord
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.planning.plan import QuantizeOptions
from blobstore.signatures.cosign import parse_signature
from blobstore.signatures.signature import Signature
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.frozen import flip
from tests.support.models import (
    add_blob,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    with_layers,
    write_folder,
)
from tests.support.signing import KeyFiles, key_files, public_key

FILES = {".gitattributes": b"*.safetensors lfs\n", "tokenizer.json": b"{}"}


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin")
    write_folder(folder / "dense", dense_tensors(), shards=2, files=FILES)
    write_folder(folder / "moe", moe_tensors())
    write_folder(folder / "quantized", quantizable_tensors())
    return folder


@pytest.fixture
def store(origin: Path, tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    create(origin / "dense", "dense", store=store)
    return store


def signatures(store: LocalStore, name: str = "dense") -> dict[str, Signature]:
    digest = Digest.of(store.read_manifest(name))
    return {one.kind: one for one in map(parse_signature, store.signatures(digest))}


def digests_of(folder: Path) -> dict[str, Digest]:
    """Return the digests of the files of a folder, but of those that signatures leave out."""
    return {
        path.relative_to(folder).as_posix(): Digest.of(path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".gitattributes"
    }


def with_digests(store: LocalStore, name: str, folder: Path) -> None:
    """Give the record of a model's source the digests of its files, as an import from the Hub does."""
    manifest = store.resolve(name)
    record = read_source_record(store, manifest)
    assert record is not None
    files = tuple(
        file._replace(sha256=Digest.of((folder / file.name).read_bytes()))
        if file.format == "safetensors"
        else file
        for file in record.files
    )
    content = SourceRecord(
        kind="hub",
        repository="team/dense",
        commit="0" * 40,
        files=files,
        options=record.options,
        stored_names=record.stored_names,
        left_out=record.left_out,
    ).to_bytes()
    digest, size = add_blob(store, content)
    layers = [
        layer._replace(digest=digest, size=size)
        if layer.media_type == media_types.SOURCE
        else layer
        for layer in manifest.layers
    ]
    store.names.publish(replace_any(name), with_layers(store, manifest, layers))


def test_signs_the_manifest_in_both_forms(store: LocalStore, key: KeyFiles) -> None:
    signed = blobstore.sign("dense", key.private, store=store)

    found = signatures(store)
    assert found.keys() == {"oms", "cosign"}
    assert signed.digest == Digest.of(store.read_manifest("dense"))
    for one in found.values():
        assert one.manifest == signed.digest
        assert one.is_by(public_key(key))
    assert signed.key == public_key(key).fingerprint


@pytest.mark.parametrize("layout", ["export", "link"])
@pytest.mark.parametrize(
    ("name", "quantize"), [("dense", None), ("moe", None), ("quantized", "int8")]
)
def test_lists_the_files_that_an_export_writes(
    origin: Path, tmp_path: Path, key: KeyFiles, name: str, quantize: str | None, layout: Layout
) -> None:
    store = LocalStore(tmp_path / "store")
    create(origin / name, name, store=store, quantize=QuantizeOptions(quantize))
    folder = tmp_path / "folder"
    if layout == "export":
        export_model(name, folder, store=store)
    else:
        link_model(name, folder, store=store)

    signed = blobstore.sign(name, key.private, store=store, layout=layout)

    files = signatures(store, name)["oms"].files
    assert files == digests_of(folder)
    assert signed.files == len(files)


def test_reads_no_weight_if_the_record_has_the_digests_of_the_files(
    store: LocalStore, origin: Path, key: KeyFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_digests(store, "dense", origin / "dense")
    for layer in store.resolve("dense").layers_of(media_types.TENSOR):
        Path(store.blob_path(layer.digest)).unlink()

    signed = blobstore.sign("dense", key.private, store=store)

    assert (signed.hashed, signed.bytes_hashed) == (0, 0)
    assert signatures(store)["oms"].files == digests_of(origin / "dense")


def test_says_how_much_had_to_be_read_if_it_has_not(
    store: LocalStore, origin: Path, key: KeyFiles
) -> None:
    signed = blobstore.sign("dense", key.private, store=store)

    sizes = [path.stat().st_size for path in (origin / "dense").glob("*.safetensors")]
    assert (signed.hashed, signed.bytes_hashed) == (2, sum(sizes))
    assert blobstore.sign("dense", key.private, store=store, layout="link").hashed == 0


def test_signs_the_manifest_alone_if_the_model_has_no_folder(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    digest, size = add_blob(store, b"GGUF")
    manifest = store.resolve("dense")
    layers = [Descriptor(media_types.MODEL, digest, size)]
    store.names.publish(replace_any("gguf"), with_layers(store, manifest, layers))

    signed = blobstore.sign("gguf", key.private, store=store)

    assert (signed.files, signed.hashed) == (0, 0)
    assert signatures(store, "gguf").keys() == {"cosign"}
    with pytest.raises(BlobstoreError, match="weights in a GGUF file"):
        blobstore.sign("gguf", key.private, store=store, out=tmp_path / "x.sig")


def test_does_not_sign_weights_that_are_damaged(store: LocalStore, key: KeyFiles) -> None:
    layer = store.resolve("dense").layers_of(media_types.TENSOR)[0]
    flip(store.blob_path(layer.digest), -1)

    with pytest.raises(BlobDamaged):
        blobstore.sign("dense", key.private, store=store)
    assert signatures(store) == {}


def test_signing_again_adds_nothing(store: LocalStore, key: KeyFiles, tmp_path: Path) -> None:
    blobstore.sign("dense", key.private, store=store, out=tmp_path / "one")
    digest = Digest.of(store.read_manifest("dense"))
    before = list(store.signatures(digest))

    blobstore.sign("dense", key.private, store=store, out=tmp_path / "two")

    assert list(store.signatures(digest)) == before
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    blobstore.sign("dense", key_files(tmp_path, "second").private, store=store)
    assert len(list(store.signatures(digest))) == 4


def test_writes_the_bundle_to_a_new_file_alone(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    out = tmp_path / "model.sig"

    signed = blobstore.sign("dense", key.private, store=store, out=out)

    assert signed.out == out
    assert parse_signature(out.read_bytes()).files == signatures(store)["oms"].files
    with pytest.raises(BlobstoreError, match="exists already"):
        blobstore.sign("dense", key.private, store=store, out=key.private)
    assert b"PRIVATE KEY" in key.private.read_bytes()
    blobstore.sign("dense", key.private, store=store, out=out, force=True)
    with pytest.raises(BlobstoreError, match="cannot write"):
        blobstore.sign("dense", key.private, store=store, out=tmp_path / "none" / "model.sig")


def test_the_bundle_has_the_name_by_which_the_model_was_signed(
    store: LocalStore, key: KeyFiles
) -> None:
    blobstore.copy("dense", "team/other:v1", store=store)
    blobstore.sign("team/other:v1", key.private, store=store)
    assert signatures(store)["oms"].name == "team/other:v1"


def test_reports_what_cannot_be_signed(store: LocalStore, key: KeyFiles, tmp_path: Path) -> None:
    encrypted = key_files(tmp_path, "encrypted", passphrase=b"x").private
    with pytest.raises(ModelNotFound):
        blobstore.sign("none", key.private, store=store)
    with pytest.raises(NotFound):
        blobstore.sign("dense", tmp_path / "none", store=store)
    with pytest.raises(UsageError, match="encrypted"):
        blobstore.sign("dense", encrypted, store=store)
    with pytest.raises(UsageError, match="layout"):
        blobstore.sign("dense", key.private, store=store, layout="ollama")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="private key"):
        blobstore.sign("dense", key.public, store=store)
    blobstore.sign("dense", encrypted, store=store, passphrase=lambda: b"x")


def test_the_bundle_is_one_line_of_json_without_paths_of_this_machine(
    store: LocalStore, key: KeyFiles, tmp_path: Path
) -> None:
    blobstore.sign("dense", key.private, store=store, out=tmp_path / "x.sig")
    text = (tmp_path / "x.sig").read_text()
    assert text.count("\n") == 1
    assert str(tmp_path) not in text
    assert json.loads(text)["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
