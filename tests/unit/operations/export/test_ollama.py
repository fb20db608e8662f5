"""Models that were imported from Ollama, and are written in its layout."""

from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, NameTaken, UsageError
from blobstore.manifests import media_types
from blobstore.operations.create.create import create
from blobstore.operations.export.ollama import export_to_ollama
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.ollama_store import ADAPTER, PROJECTOR, add_gguf_model

OTHERS = {
    media_types.ADAPTER: ADAPTER,
    media_types.SYSTEM: b"You are a pirate.",
    "application/vnd.ollama.image.messages": b'[{"role":"user","content":"Hello"}]',
    "application/vnd.ollama.image.new": b"of a later version",
}


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The folder of models that Ollama has, with a model that has all kinds of layers."""
    store = LocalStore(tmp_path / "ollama")
    monkeypatch.setenv("OLLAMA_MODELS", str(store.root))
    add_gguf_model(store, "pirate:8b", projector=PROJECTOR, others=OTHERS)
    return store


def test_a_folder_of_ollama_gets_the_manifest_and_all_layers_back(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    create("ollama://pirate:8b", "pirate:8b", store=store)
    blobstore.freeze("pirate:8b", store=store)
    target = LocalStore(tmp_path / "target")
    exported = export_to_ollama("pirate:8b", target.root, store=store)

    manifest = ollama.resolve("pirate:8b")
    assert target.read_manifest("pirate:8b") == ollama.read_manifest("pirate:8b")
    for blob in manifest.blobs:
        assert target.read_blob(*blob.id) == ollama.read_blob(*blob.id)
    assert exported.files == len(manifest.blobs) + 1
    assert exported.bytes_written == sum(blob.size for blob in manifest.blobs)
    assert not blobstore.verify(store=target).faults
    assert export_to_ollama("pirate:8b", target.root, store=store).bytes_written == 0


def test_another_model_of_the_name_is_replaced_only_by_force(
    ollama: LocalStore, store: LocalStore
) -> None:
    create("ollama://pirate:8b", "pirate:8b", store=store)
    mine = ollama.read_manifest("pirate:8b")
    add_gguf_model(ollama, "pirate:8b")
    other = ollama.read_manifest("pirate:8b")
    with pytest.raises(NameTaken):
        export_to_ollama("pirate:8b", ollama.root, store=store)
    assert ollama.read_manifest("pirate:8b") == other
    export_to_ollama("pirate:8b", ollama.root, store=store, force=True)
    assert ollama.read_manifest("pirate:8b") == mine


@pytest.mark.parametrize("exclude", ["LICENSE-2", "mmproj*", "ollama/manifest.json"])
def test_a_model_without_some_of_the_files_is_refused(
    ollama: LocalStore, store: LocalStore, tmp_path: Path, exclude: str
) -> None:
    create("ollama://pirate:8b", "m", store=store, source_options=SourceOptions(exclude=(exclude,)))
    with pytest.raises(UsageError, match="not imported from Ollama with all of its files"):
        export_to_ollama("m", tmp_path / "target", store=store)
    assert not (tmp_path / "target").exists()


def test_a_damaged_model_leaves_nothing_in_the_folder(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    create("ollama://pirate:8b", "m", store=store)
    layer = store.resolve("m").layers_of(media_types.TENSOR)[0]
    path = Path(store.blob_path(layer.digest))
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    target = LocalStore(tmp_path / "target")
    with pytest.raises(BlobDamaged, match="model m:latest: Ollama's layer .* has digest"):
        export_to_ollama("m", target.root, store=store)
    assert not list(target.references())
    assert not [it for it in target.root.rglob("sha256-*") if it.is_file()]


def test_a_forged_manifest_is_no_model_of_ollama(store: LocalStore, tmp_path: Path) -> None:
    folder = tmp_path / "folder" / "ollama"
    folder.mkdir(parents=True)
    (folder.parent / "model.gguf").write_bytes(PROJECTOR)
    layer = f'{{"mediaType":"{media_types.MODEL}/../x","digest":"{Digest.of(b"")}","size":0}}'
    (folder / "manifest.json").write_text(
        f'{{"schemaVersion":2,"mediaType":"{media_types.MANIFEST}","config":{layer},"layers":[{layer}]}}'
    )
    create(folder.parent, "m", store=store, source_options=SourceOptions(keep=("ollama/*",)))
    with pytest.raises(UsageError, match="not imported from Ollama"):
        export_to_ollama("m", tmp_path / "target", store=store)
