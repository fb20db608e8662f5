"""Models of an Ollama folder that are imported by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    DamagedSource,
    InvalidReference,
    ModelNotFound,
    SourceNotFound,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.operations.create.create import create
from blobstore.operations.create.create_all import create_all
from blobstore.store.local import LocalStore
from tests.support.models import dense_tensors, write_folder
from tests.support.ollama_store import ADAPTER, GGUF_FILE, PROJECTOR, add_gguf_model


@pytest.fixture
def ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalStore:
    """The folder of models that Ollama has."""
    folder = tmp_path / "ollama"
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return LocalStore(folder)


def test_a_model_is_split_and_its_files_come_back(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    manifest = add_gguf_model(ollama, "vision:8b", projector=PROJECTOR)
    created = create("ollama://vision:8b", "m", store=store)
    assert created.tensors == 4
    assert len(store.resolve("m").layers_of(media_types.TENSOR)) == 4
    out = tmp_path / "out"
    blobstore.export("m", out, store=store)
    assert {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in out.rglob("*")
        if path.is_file()
    } == {
        "model.gguf": GGUF_FILE,
        "mmproj-model.gguf": PROJECTOR,
        "LICENSE": b"first license",
        "LICENSE-2": b"second license",
        "ollama/config.json": ollama.read_blob(manifest.config.digest, manifest.config.size),
        "ollama/manifest.json": ollama.read_manifest("vision:8b"),
        "ollama/params.json": b'{"stop":["<|end|>"]}\n',
        "ollama/template": b"{{ .Prompt }}",
    }


def test_a_model_that_ollama_has_not_downloaded_is_named(
    ollama: LocalStore, store: LocalStore
) -> None:
    manifest = add_gguf_model(ollama, "vision:8b")
    assert create("ollama://vision:8b", "m", store=store).notices == ()
    blob = Path(ollama.blob_path(manifest.layers[-1].digest))
    blob.chmod(0o600)
    for damage in (lambda: blob.write_bytes(blob.read_bytes()[:-1]), blob.unlink):
        damage()
        with pytest.raises(DamagedSource, match=r"not finished: sha256.*; run 'ollama pull vision"):
            create("ollama://vision:8b", "m", store=store)


def test_a_changed_byte_is_found_by_the_digest_in_the_name(
    ollama: LocalStore, store: LocalStore
) -> None:
    manifest = add_gguf_model(ollama, "vision:8b", projector=PROJECTOR)
    for layer in manifest.layers:
        blob = Path(ollama.blob_path(layer.digest))
        blob.chmod(0o600)
        intact = blob.read_bytes()
        blob.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
        with pytest.raises(
            DamagedSource, match=r"is damaged: .*; remove that file, and run 'ollama"
        ):
            create("ollama://vision:8b", "m", store=store)
        blob.write_bytes(intact)
    assert list(store.references()) == []
    assert create("ollama://vision:8b", "m", store=store).tensors == 4


def test_the_source_is_the_model_of_ollama(ollama: LocalStore, store: LocalStore) -> None:
    name = f"{'h' * 200}.example/{'n' * 70}/m:8b"
    for copy, model in (("short", "vision:8b"), ("long", name)):
        add_gguf_model(ollama, model)
        create(f"ollama://{model}", copy, store=store)
        source = blobstore.info(copy, store=store).source
        assert source is not None
        assert source.kind == f"ollama://{model}"[:255]


@pytest.mark.parametrize(
    ("media_type", "text"),
    [
        (media_types.SYSTEM, b"You are a pirate."),
        ("application/vnd.ollama.image.messages", b'[{"role":"user","content":"Hello"}]'),
        (media_types.LICENSE, b"third license"),
        (media_types.ADAPTER, ADAPTER),
    ],
)
def test_models_that_differ_in_what_surrounds_the_weights_are_two(
    ollama: LocalStore, store: LocalStore, media_type: str, text: bytes
) -> None:
    add_gguf_model(ollama, "plain")
    add_gguf_model(ollama, "tuned", others={media_type: text})
    plain = create("ollama://plain", "plain", store=store)
    tuned = create("ollama://tuned", "tuned", store=store)
    assert plain.digest != tuned.digest
    kept = [file.size for file in store.resolve("tuned").layers if file.digest == Digest.of(text)]
    assert media_type == media_types.ADAPTER or kept == [len(text)]


def test_a_model_is_split_in_the_folder_itself(ollama: LocalStore) -> None:
    add_gguf_model(ollama, "m")
    create("ollama://m", "split", store=ollama)
    found = blobstore.diff("m", "split", store=ollama)
    assert len(found.tensors) == 3
    assert all(tensor.is_same for tensor in found.tensors)


def test_the_folder_of_the_user_is_the_default(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    add_gguf_model(LocalStore(tmp_path / ".ollama" / "models"), "m")
    assert create("ollama://m", "m", store=store, dry_run=True).blobs


def test_all_models_of_the_folder_get_the_names_that_they_have_there(
    ollama: LocalStore, store: LocalStore, tmp_path: Path
) -> None:
    for name in ("vision:8b", "hf.co/org/tiny:Q4"):
        add_gguf_model(ollama, name)
    create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=ollama)

    planned = create_all("ollama://", store=store, dry_run=True)
    made = create_all("ollama://", store=store)

    assert [(model.name, model.source) for model in made] == [
        (name, f"ollama://{name}") for name in ("dense:latest", "hf.co/org/tiny:Q4", "vision:8b")
    ]
    assert [model.source for model in planned] == [model.source for model in made]
    assert "is no model in GGUF files" in str(made[0].error)
    assert sorted(map(str, store.references())) == ["hf.co/org/tiny:Q4", "vision:8b"]
    with pytest.raises(UsageError, match="ollama://vision"):
        create_all("ollama://vision:8b", store=store)


def test_a_folder_without_models_is_an_error(ollama: LocalStore, store: LocalStore) -> None:
    ollama.root.mkdir()
    with pytest.raises(SourceNotFound, match="has no models"):
        create_all("ollama://", store=store)


def test_other_models_are_refused(ollama: LocalStore, store: LocalStore, tmp_path: Path) -> None:
    add_gguf_model(ollama, "m")
    create(write_folder(tmp_path / "dense", dense_tensors()), "dense", store=ollama)
    with pytest.raises(UnsupportedSource, match="dense:latest of .* is no model in GGUF files"):
        create("ollama://dense", "m", store=store)
    with pytest.raises(ModelNotFound, match="other"):
        create("ollama://other", "m", store=store)
    with pytest.raises(InvalidReference):
        create("ollama://../m", "m", store=store)


def test_a_folder_that_is_not_there_is_said(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "none"))
    with pytest.raises(SourceNotFound, match="none'; set OLLAMA_MODELS"):
        create("ollama://m", "m", store=store)


@pytest.mark.parametrize(
    "media_type",
    [
        "application/octet-stream",
        "application/vnd.x/y",
        "x.a/../../../evil",
        "x./etc/evil",
        "x..",
        "x.",
        "x.config",
        "x.manifest",
        "x.manifest.json",
        "x." + "n" * 300,
        "x.a\x1b[2J",
        "x.PARAMS",
    ],
)
def test_a_layer_of_any_type_is_kept_or_refused(
    ollama: LocalStore, store: LocalStore, media_type: str, tmp_path: Path
) -> None:
    add_gguf_model(ollama, "odd", others={media_type: b"bytes of the layer"})
    try:
        create("ollama://odd", "m", store=store)
    except UnsupportedSource as error:
        assert str(error).isprintable()
        return
    layers = store.resolve("m").layers_of(media_types.FILE, media_types.JSON)
    assert b"bytes of the layer" in [store.read_blob(*layer.id) for layer in layers]


def test_layers_get_names_that_no_other_layer_has(ollama: LocalStore, store: LocalStore) -> None:
    types = ["x.a", "y.a", "z.a-2", "x/a", "x.a-3"]
    add_gguf_model(ollama, "odd", others={one: one.encode() for one in types})
    create("ollama://odd", "m", store=store)
    layers = store.resolve("m").layers_of(media_types.FILE, media_types.JSON)
    assert {one.encode() for one in types} <= {store.read_blob(*layer.id) for layer in layers}
