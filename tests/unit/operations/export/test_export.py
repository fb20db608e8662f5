from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    BlobstoreError,
    InvalidHeader,
    InvalidManifest,
    UsageError,
)
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.writer import _BlobReader
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.quantization import numpy as reference
from blobstore.quantization.formats import FORMATS
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from tests.support.frozen import put, weights
from tests.support.models import (
    Arrays,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    with_layers,
    write_folder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from blobstore.operations.create.blobs import ExpertForm

ODD = Path(__file__).parents[3] / "data" / "ollama" / "hf" / "odd"
NAME = Reference.parse("m")


@pytest.fixture
def stacked(tmp_path: Path, store: LocalStore) -> Path:
    """Create model ``m`` with stacked experts; return the source folder."""
    folder = write_folder(tmp_path / "moe", moe_tensors())
    create(folder, NAME, store=store, experts="stacked")
    return folder


def raw_tensors(*files: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of all tensors, read without either library's types."""
    found = {}
    for file in files:
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                content = data[start + begin : start + end]
                found[name] = (entry["dtype"], entry["shape"], content)
    return found


def publish_with(store: LocalStore, layers: Iterable[tuple[str, str, bytes]]) -> None:
    """Add layers (media type, name, content) to the manifest of model ``m``."""
    added = []
    with store.ingest() as ingest:
        for media_type, name, content in layers:
            item = ingest.add(len(content), partial(list, [content]))
            added.append(
                Descriptor(media_type=media_type, digest=item.digest, size=item.size, name=name)
            )
        ingest.publish()
    manifest = store.resolve(NAME)
    store.publish(NAME, with_layers(store, manifest, (*manifest.layers, *added)))


def without(store: LocalStore, *kinds: str) -> None:
    """Take the layers of these media types out of model ``m``."""
    manifest = store.resolve(NAME)
    layers = [layer for layer in manifest.layers if layer.media_type not in kinds]
    store.publish(NAME, with_layers(store, manifest, layers))


def blob_of(store: LocalStore, name: str) -> Path:
    layers = store.resolve(NAME).layers
    return Path(store.blob_path(next(layer for layer in layers if layer.name == name).digest))


def overwrite(path: Path, offset: int, data: bytes) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


def assert_nothing_left(folder: Path, *known: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(known)


# What comes back


def test_gives_back_every_tensor_bit_for_bit(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    exported = export_model("m", tmp_path / "out", store=store)
    file = tmp_path / "out" / "model.safetensors"
    assert raw_tensors(file) == raw_tensors(dense / "model.safetensors")
    assert exported.tensors == len(dense_tensors())
    assert exported.shards == 1


def test_gives_back_types_and_names_that_few_models_have(store: LocalStore, tmp_path: Path) -> None:
    create(ODD, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    expected = raw_tensors(ODD / "model.safetensors")
    assert raw_tensors(tmp_path / "out" / "model.safetensors") == expected


def test_writes_files_that_the_safetensors_library_and_transformers_accept(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_model(NAME, tmp_path / "out", store=store)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
        for name, array in dense_tensors().items():
            np.testing.assert_array_equal(file.get_tensor(name), array, strict=True)


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_gives_back_the_experts_of_both_forms(
    experts: ExpertForm, store: LocalStore, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "moe", moe_tensors())
    create(folder, NAME, store=store, experts=experts)
    export_model(NAME, tmp_path / "out", store=store)
    expected = raw_tensors(folder / "model.safetensors")
    assert raw_tensors(tmp_path / "out" / "model.safetensors") == expected


def test_gives_back_the_small_files_byte_for_byte(store: LocalStore, tmp_path: Path) -> None:
    files = {
        "config.json": b'{"broken": ',
        "tokenizer.json": b"{}",
        "merges.txt": b"a b\n",
        "LICENSE": b"",
        "additional_chat_templates/tool.jinja": b"{{ x }}",
    }
    create(write_folder(tmp_path / "source", dense_tensors(), files=files), NAME, store=store)
    exported = export_model(NAME, tmp_path / "out", store=store)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in files} == files
    everything = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert exported.files == len(everything) == len(files) + 1
    assert exported.bytes_written == sum(path.stat().st_size for path in everything)


def test_leaves_out_the_layers_that_only_ollama_uses(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.TEMPLATE, "", b"{{ .Prompt }}")])
    exported = export_model(NAME, tmp_path / "out", store=store)
    assert sorted(path.name for path in exported.folder.iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_names_tensors_by_their_layer_where_the_blob_calls_them_data(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    blob = encode_header([TensorSpec("data", DType.U8, (2,))]) + b"ab"
    publish_with(store, [(media_types.TENSOR, name, blob) for name in ("old.b", "old.a")])
    export_model(NAME, tmp_path / "out", store=store)
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    assert found["old.a"] == found["old.b"] == ("U8", [2], b"ab")
    assert "data" not in found


def test_exports_quantized_tensors_as_stored_under_the_names_of_mlx(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    specs = [
        TensorSpec("x.weight", DType.U32, (1, 4)),
        TensorSpec("x.weight.scale", DType.BF16, (1, 1)),
        TensorSpec("x.weight.bias", DType.BF16, (1, 1)),
    ]
    header = encode_header(specs, {"quant_type": "int4", "group_size": "32"})
    publish_with(store, [(media_types.TENSOR, "x.weight", header + bytes(range(20)))])
    export_model(NAME, tmp_path / "out", store=store)
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    assert found["x.weight"] == ("U32", [1, 4], bytes(range(16)))
    assert found["x.scales"] == ("BF16", [1, 1], bytes(range(16, 18)))
    assert found["x.biases"] == ("BF16", [1, 1], bytes(range(18, 20)))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    expected = {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config["quantization"] == config["quantization_config"] == expected


def test_reads_tensors_in_whatever_order_a_foreign_blob_has_them(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    specs = [
        TensorSpec("x.scale", DType.F16, (1,)),
        TensorSpec("x.bias", DType.F16, (1,)),
        TensorSpec("x", DType.U32, (1,)),
    ]
    publish_with(store, [(media_types.TENSOR, "x", encode_header(specs) + bytes(range(8)))])
    export_model(NAME, tmp_path / "out", store=store)
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    data = {name: content for name, (*_, content) in found.items() if name.startswith("x")}
    assert data == {"x.scales": b"\0\1", "x.biases": b"\2\3", "x": b"\4\5\6\7"}


# Shards


def test_divides_weights_larger_than_the_shard_size(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    exported = export_model(NAME, tmp_path / "out", store=store, shard_size=200)
    out = tmp_path / "out"
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    shards = sorted(out.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert exported.shards == 3
    contents = {shard.name: raw_tensors(shard) for shard in shards}
    assert index["weight_map"] == {
        name: shard for shard, tensors in contents.items() for name in tensors
    }
    assert list(index["weight_map"]) == sorted(dense_tensors())
    # Filled in the order of the names.
    assert list(index["weight_map"].values()) == sorted(index["weight_map"].values())
    sizes = [sum(len(data) for *_, data in tensors.values()) for tensors in contents.values()]
    assert all(size <= 200 for size in sizes)
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert raw_tensors(*shards) == raw_tensors(dense / "model.safetensors")


def test_gives_a_tensor_over_the_shard_size_a_file_of_its_own(
    store: LocalStore, tmp_path: Path
) -> None:
    tensors: Arrays = {
        "a": np.zeros(11, np.uint8),
        "b": np.zeros(1, np.uint8),
        "c": np.zeros(100, np.uint8),
        "d": np.zeros(0, np.uint8),
        "e": np.zeros(10, np.uint8),
    }
    create(write_folder(tmp_path / "source", tensors), NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store, shard_size=10)
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [sorted(raw_tensors(shard)) for shard in shards] == [["a"], ["b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("size", [111, 110])
def test_divides_only_what_is_over_the_shard_size(
    size: int, store: LocalStore, tmp_path: Path
) -> None:
    tensors: Arrays = {"a": np.zeros(11, np.uint8), "b": np.zeros(100, np.uint8)}
    create(write_folder(tmp_path / "source", tensors), NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store, shard_size=size)
    assert (tmp_path / "out" / "model.safetensors").exists() == (size == 111)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (size == 110)


def test_writes_the_same_bytes_every_time(store: LocalStore, tmp_path: Path) -> None:
    for name, shards, experts in (("a", 1, "packed"), ("b", 3, "stacked")):
        folder = write_folder(tmp_path / name, moe_tensors(), shards=shards)
        create(folder, name, store=store, experts=experts)  # type: ignore[arg-type]
        export_model(name, tmp_path / f"out-{name}", store=store, shard_size=500)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("out-a", "out-b")
    )
    assert first == second


def test_an_exported_folder_makes_the_same_manifest_again(
    stacked: Path, store: LocalStore, tmp_path: Path
) -> None:
    export_model(NAME, tmp_path / "out", store=store, shard_size=500)
    create(tmp_path / "out", "again", store=store, experts="stacked")
    again = store.resolve(Reference.parse("again"))
    assert again.to_bytes() == store.resolve(NAME).to_bytes()


# Components


def test_puts_the_parts_of_a_pipeline_where_diffusers_looks_for_them(
    store: LocalStore, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    parts = {
        "unet": ("diffusers", "diffusion_pytorch_model", b'{"_class_name": "UNet"}'),
        "text_encoder": ("transformers", "model", b'{"model_type": "clip"}'),
        "safety_checker": ("stable_diffusion", "model", b'{"model_type": "clip"}'),
        "projection": ("my_module", "diffusion_pytorch_model", b'{"_diffusers_version": "1"}'),
    }
    listed: dict[str, Any] = {name: [library, "Class"] for name, (library, *_) in parts.items()}
    for number, (name, (_, stem, config)) in enumerate(parts.items()):
        write_folder(
            source / name,
            {"w": np.full(3, number, np.uint8), "v/w": np.full(2, number, np.int64)},
            stem=stem,
            files={"config.json": config},
        )
    (source / "scheduler").mkdir()
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    listed |= {"scheduler": ["diffusers", "PNDM"], "_class_name": "SD", "image": [None, None]}
    (source / "model_index.json").write_text(json.dumps(listed))
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    files = {path.relative_to(source): path for path in source.rglob("*") if path.is_file()}
    exported = {
        path.relative_to(tmp_path / "out"): path
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert exported.keys() == files.keys()
    for file, path in files.items():
        if path.suffix == ".safetensors":
            assert raw_tensors(exported[file]) == raw_tensors(path)
        else:
            assert exported[file].read_bytes() == path.read_bytes()


def test_gives_each_component_an_index_of_its_own(store: LocalStore, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tensors = {"a": np.zeros(8, np.uint8), "b": np.ones(8, np.uint8)}
    write_folder(source / "unet", tensors, stem="diffusion_pytorch_model")
    (source / "model_index.json").write_text('{"unet": ["diffusers", "UNet"]}')
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store, shard_size=8)
    unet = tmp_path / "out" / "unet"
    index = json.loads((unet / "diffusion_pytorch_model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {
        "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    assert all((unet / file).is_file() for file in index["weight_map"].values())


def test_puts_the_modules_of_sentence_transformers_back(store: LocalStore, tmp_path: Path) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "Transformer"},
        {"idx": 1, "path": "2_Dense", "type": "Dense"},
        {"idx": 2, "path": "3_Normalize", "type": "Normalize"},
    ]
    files = {"modules.json": json.dumps(modules).encode()}
    source = write_folder(tmp_path / "source", dense_tensors(), files=files)
    write_folder(source / "2_Dense", {"linear.weight": np.ones(3, np.float32)})
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    for file in ("model.safetensors", "2_Dense/model.safetensors"):
        assert raw_tensors(tmp_path / "out" / file) == raw_tensors(source / file)


def test_calls_the_weights_of_a_lone_diffusers_model_as_diffusers_does(
    store: LocalStore, tmp_path: Path
) -> None:
    files = {"config.json": b'{"_class_name": "UNet", "_diffusers_version": "0.30"}'}
    stem = "diffusion_pytorch_model"
    source = write_folder(tmp_path / "source", dense_tensors(), stem=stem, files=files)
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    file = f"{stem}.safetensors"
    assert raw_tensors(tmp_path / "out" / file) == raw_tensors(source / file)


@pytest.mark.parametrize(
    "content",
    [
        b"not json",
        b"[" * 100_000,
        b"[]",
        b"7",
        b'{"path": "to"}',
        b'{"path": ["diffusers"]}',
        b'{"path": [null, null]}',
        b'{"..": ["diffusers", "X"], "a/b": ["diffusers", "X"]}',
        b'[{"path": 7}, {"path": ".."}, {"path": "path/to"}, 7, {}]',
    ],
)
@pytest.mark.parametrize("name", ["model_index.json", "modules.json"])
def test_keeps_a_slash_in_a_name_that_no_list_calls_a_component(
    name: str, content: bytes, dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.JSON, name, content)])
    export_model(NAME, tmp_path / "out", store=store)
    expected = raw_tensors(dense / "model.safetensors")
    assert raw_tensors(tmp_path / "out" / "model.safetensors") == expected


# Where to


def test_fills_an_empty_folder(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    exported = export_model(NAME, tmp_path / "out", store=store)
    assert exported.folder == tmp_path / "out"
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert_nothing_left(tmp_path, "dense", "out", "store")


def test_makes_missing_parents(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    export_model(NAME, str(tmp_path / "a" / "b"), store=store)
    assert (tmp_path / "a" / "b" / "config.json").is_file()


def test_follows_a_link_to_an_empty_folder(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert export_model(NAME, tmp_path / "link", store=store).folder == tmp_path / "real"
    assert (tmp_path / "link" / "model.safetensors").is_file()


def test_gives_files_the_usual_mode(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        export_model(NAME, tmp_path / "out", store=store)
    finally:
        os.umask(old)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o640}


def test_rejects_a_folder_that_holds_something(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in dense.iterdir()}
    with pytest.raises(BlobstoreError, match=r"'.*/dense' exists already; choose a new"):
        export_model(NAME, dense, store=store)
    assert {path: path.read_bytes() for path in dense.iterdir()} == before


def test_rejects_a_file_in_the_folders_place(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BlobstoreError, match="exists already"):
        export_model(NAME, tmp_path / "out", store=store)
    assert (tmp_path / "out").read_text() == "mine"


def test_rejects_the_working_directory(
    dense: Path, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BlobstoreError, match="working directory"):
        export_model(NAME, ".", store=store)


def test_rejects_a_name_that_no_folder_can_have(dense: Path, store: LocalStore) -> None:
    with pytest.raises(BlobstoreError, match="cannot access"):
        export_model(NAME, "a\0b", store=store)


def test_says_when_the_folder_cannot_be_written(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BlobstoreError, match=r"cannot write '.*/file/out': "):
        export_model(NAME, tmp_path / "file" / "out", store=store)


# What is refused


def test_rejects_a_shard_size_below_one(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 byte, got 0"):
        export_model(NAME, tmp_path / "out", store=store, shard_size=0)


@pytest.mark.parametrize("kind", [media_types.MODEL, media_types.PROJECTOR, media_types.ADAPTER])
def test_rejects_models_with_weights_in_gguf_files(
    kind: str, dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(kind, "", b"GGUF")])
    with pytest.raises(BlobstoreError, match="model m:latest: it has weights in a GGUF file"):
        export_model(NAME, tmp_path / "out", store=store)


def test_rejects_a_model_without_tensors(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    without(store, media_types.TENSOR)
    with pytest.raises(BlobstoreError, match="no tensor layers"):
        export_model(NAME, tmp_path / "out", store=store)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x.json",
        "/etc/x.json",
        "a//b.json",
        "a/",
        "a/b/c/d.json",
        "a\\b.json",
        "a b.json",
        f"{'a' * 251}.json",
        "a\n.json",
        "é.json",
        "a\0b",
        "x.json\n",
    ],
)
@pytest.mark.parametrize("kind", [media_types.JSON, media_types.FILE])
def test_rejects_layers_with_invalid_file_names(
    kind: str, name: str, dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(kind, name, b"{}")])
    with pytest.raises(InvalidManifest, match="is not a file name"):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["model.safetensors.index.json"],
        ["model.safetensors/x.json"],
        ["a", "a/b.json"],
        ["config.json/x"],
    ],
)
def test_rejects_files_that_clash(
    names: list[str], dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.FILE, name, b"{}") for name in names])
    with pytest.raises(InvalidManifest, match=r"would be both a file and a|two files would"):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_rejects_a_file_with_the_name_of_a_shard(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.FILE, "model-00002-of-00003.safetensors", b"{}")])
    with pytest.raises(InvalidManifest, match=r"'model-00002-of-00003.safetensors'"):
        export_model(NAME, tmp_path / "out", store=store, shard_size=200)


def test_rejects_one_file_name_in_two_media_types(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.FILE, "config.json", b"other")])
    with pytest.raises(InvalidManifest, match=r"two files would both be 'config\.json'"):
        export_model(NAME, tmp_path / "out", store=store)


GATE = "model.layers.0.mlp.experts.gate_proj.weight"
NAMES = [f"x.{number}" for number in range(12)]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff", "not valid UTF-8"),
        (b"{", "not valid JSON"),
        (b"[]", "not an object of lists"),
        (b'{"a": "b"}', "not an object of lists"),
        (b'{"a": {}}', "not an object of lists"),
        (b'{"a": [1]}', "not an object of lists"),
        (b'{"a": []}', "not an object of lists"),
        (b'{"a": ["b"]}', "names 'a', which does not exist"),
        ({GATE: NAMES[:-1]}, r"of shape \[12, 6, 4\] is listed as a stack of 11 tensors"),
        ({GATE: [*NAMES, "more"]}, "is listed as a stack of 13 tensors"),
        ({GATE: [*NAMES[:-1], "x.0"]}, "two tensors would both be exported as 'x.0'"),
        (
            {GATE: [*NAMES[:-1], "model.layers.0.mlp.gate.weight"]},
            "both be exported as 'model.layers.0.mlp.gate.weight'",
        ),
    ],
)
def test_rejects_a_list_of_stacked_tensors_that_does_not_fit(
    content: Any, complaint: str, stacked: Path, store: LocalStore, tmp_path: Path
) -> None:
    without(store, media_types.STACKS)
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    publish_with(store, [(media_types.STACKS, "", data)])
    with pytest.raises(BlobDamaged, match=complaint):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "moe", "store")


def test_rejects_a_scalar_that_is_said_to_be_stacked(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    publish_with(store, [(media_types.STACKS, "", b'{"scalar": ["a"]}')])
    with pytest.raises(BlobDamaged, match=r"'scalar' of shape \[\] is listed as a stack of 1"):
        export_model(NAME, tmp_path / "out", store=store)


def test_rejects_to_split_a_tensor_inside_a_byte(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    blob = encode_header([TensorSpec("f", DType.F4, (2, 3))]) + b"abc"
    stacks = (media_types.STACKS, "", b'{"f": ["f.0", "f.1"]}')
    publish_with(store, [(media_types.TENSOR, "f", blob), stacks])
    with pytest.raises(InvalidHeader, match=r"'f\.0': 3 elements of 4 bits are not whole bytes"):
        export_model(NAME, tmp_path / "out", store=store)


# Damage and interruption


def first_data_byte(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("layer", ["model.embed_tokens.weight", "model.layers.0.mlp.experts"])
@pytest.mark.parametrize("place", [lambda _: -1, first_data_byte], ids=["last", "first"])
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_notices_one_changed_byte(
    layer: str,
    place: Callable[[Path], int],
    experts: ExpertForm,
    store: LocalStore,
    tmp_path: Path,
) -> None:
    source = write_folder(tmp_path / "source", dense_tensors() | moe_tensors())
    create(source, NAME, store=store, experts=experts)
    blob = blob_of(store, layer)
    offset = place(blob)
    overwrite(blob, offset, bytes([blob.read_bytes()[offset] ^ 1]))
    with pytest.raises(BlobDamaged, match=f"model m:latest: layer '{layer}': blob .*damaged"):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "source", "store")


def test_notices_a_header_that_was_changed_into_another_good_one(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    blob = blob_of(store, "model.embed_tokens.weight")
    overwrite(blob, blob.read_bytes().index(b"[8,4]"), b"[4,8]")
    with pytest.raises(BlobDamaged, match=r"layer 'model\.embed_tokens\.weight': .* have digest"):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_notices_a_missing_blob(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    blob_of(store, "scalar").unlink()
    with pytest.raises(BlobMissing, match="layer 'scalar'"):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_notices_a_blob_that_was_cut_short(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    blob = blob_of(store, "scalar")
    blob.chmod(0o644)
    os.truncate(blob, blob.stat().st_size - 1)
    with pytest.raises(BlobDamaged, match=r"layer 'scalar'.*expected"):
        export_model(NAME, tmp_path / "out", store=store)


def test_notices_a_damaged_small_file(dense: Path, store: LocalStore, tmp_path: Path) -> None:
    overwrite(blob_of(store, "config.json"), 3, b"X")
    with pytest.raises(BlobDamaged):
        export_model(NAME, tmp_path / "out", store=store)
    assert_nothing_left(tmp_path, "dense", "store")


def test_notices_a_blob_that_shrinks_while_it_is_read(store: LocalStore, tmp_path: Path) -> None:
    tensors = {"w": np.zeros(5 * 2**20, np.uint8)}
    create(write_folder(tmp_path / "source", tensors), NAME, store=store)
    blob = blob_of(store, "w")
    blob.chmod(0o644)

    def shrink(_what: str, _done: int, _total: int) -> None:
        os.truncate(blob, 3 * 2**20)

    with pytest.raises(BlobDamaged, match=r"ended at byte 3145728, .* bytes too early"):
        export_model(NAME, tmp_path / "out", store=store, progress=shrink)
    assert_nothing_left(tmp_path, "source", "store")


def test_says_where_a_blob_cannot_be_read(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # reading a folder fails
    monkeypatch.setattr(store._hot, "open", lambda *_: descriptor)
    with pytest.raises(BlobDamaged, match="cannot be read at byte 0: Is a directory"):
        list(_BlobReader(store.read_pieces(Digest.of(b""), 8)).read(8))


def test_pieces_are_cut_where_tensors_end() -> None:
    reader = _BlobReader(memoryview(piece) for piece in (b"abc", b"defg", b"h"))
    assert [b"".join(map(bytes, reader.read(size))) for size in (0, 2, 4, 1)] == [
        b"",
        b"ab",
        b"cdef",
        b"g",
    ]
    with pytest.raises(BlobDamaged, match="ended at byte 8, 1 bytes too early"):
        list(reader.read(2))
    assert reader.digester.digest() == Digest.of(b"abcdefgh")


def test_a_frozen_model_is_exported_in_pieces(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "frozen", {"x": 1, "y": 2})
    freeze_models(["frozen"], store=store)
    monkeypatch.setattr(os, "memfd_create", None)  # it would need the space of a complete blob
    export_model("frozen", tmp_path / "out", store=store)
    arrays = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: array.tobytes() for name, array in arrays.items()} == {
        "x": weights(1),
        "y": weights(2),
    }


def test_leaves_nothing_behind_when_it_is_interrupted(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    def interrupt(_what: str, _done: int, _total: int) -> None:
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with pytest.raises(KeyboardInterrupt):
        export_model(NAME, tmp_path / "out", store=store, progress=interrupt)
    assert_nothing_left(tmp_path, "dense", "out", "store")
    assert_nothing_left(tmp_path / "out")


def test_never_replaces_files_that_appear_during_the_export(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    def appear(_what: str, _done: int, _total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "mine").write_text("mine")

    with pytest.raises(BlobstoreError, match="cannot write"):
        export_model(NAME, tmp_path / "out", store=store, progress=appear)
    assert_nothing_left(tmp_path, "dense", "out", "store")
    assert_nothing_left(tmp_path / "out", "mine")


def test_reports_progress_up_to_the_total(stacked: Path, store: LocalStore, tmp_path: Path) -> None:
    reports: list[tuple[int, int]] = []
    export_model(
        NAME,
        tmp_path / "out",
        store=store,
        progress=lambda _, done, total: reports.append((done, total)),
    )
    size = sum(array.nbytes for array in load_file(stacked / "model.safetensors").values())
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (size, size)


# Quantized models

PACKED = quantizable_tensors()
LAYER = "model.layers.0"


def quantized_store(tmp_path: Path, experts: ExpertForm, name: str = "int4") -> LocalStore:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "model", PACKED)
    create(source, NAME, store=store, quantize=name, experts=experts)
    return store


@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_quantized_weights_are_exported_in_the_form_of_mlx(
    tmp_path: Path, experts: ExpertForm
) -> None:
    store = quantized_store(tmp_path, experts)
    export_model(NAME, tmp_path / "out", store=store)
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    up = f"{LAYER}.mlp.switch_mlp.up_proj"
    assert {name.rpartition(".")[2]: value[:2] for name, value in found.items() if up in name} == {
        "weight": ("U32", [12, 64, 16]),
        "scales": ("BF16", [12, 64, 4]),
        "biases": ("BF16", [12, 64, 4]),
    }
    item = FORMATS["int4"]
    expected = b"".join(
        reference.quantize(
            PACKED[f"{LAYER}.mlp.experts.{number}.up_proj.weight"], item, 32
        ).weight.tobytes()
        for number in range(12)
    )
    assert found[f"{up}.weight"][2] == expected
    assert found["model.embed_tokens.weight"][:2] == ("BF16", [64, 128])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "tiny"
    described = config["quantization"]
    usual = {key: described[key] for key in ("bits", "group_size", "mode")}
    types = {
        part: described.get(f"{LAYER}.mlp.switch_mlp.{part}_proj", usual) for part in ("up", "down")
    }
    assert types == {
        "up": {"bits": 4, "group_size": 32, "mode": "affine"},
        "down": {"bits": 8, "group_size": 64, "mode": "affine"},
    }
    assert not [name for name in found if ".experts." in name]


def test_both_forms_of_experts_are_exported_alike(tmp_path: Path) -> None:
    forms: list[ExpertForm] = ["packed", "stacked"]
    for form in forms:
        store = quantized_store(tmp_path / form, form)
        export_model(NAME, tmp_path / form / "out", store=store, shard_size=60_000)
    files = sorted(path.name for path in (tmp_path / "packed" / "out").iterdir())
    assert len(files) > 4
    for name in files:
        one, other = (tmp_path / form / "out" / name for form in forms)
        assert one.read_bytes() == other.read_bytes(), name


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_quantized_weights_are_exported_as_plain_numbers(
    tmp_path: Path, experts: ExpertForm, name: str
) -> None:
    store = quantized_store(tmp_path, experts, name)
    exported = export_model(NAME, tmp_path / "out", store=store, dequantize=True, shard_size=70_000)
    assert exported.shards > 1
    found: dict[str, Any] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= raw_tensors(path)
    assert found.keys() == PACKED.keys()
    packed = create(tmp_path / "model", "one", store=store, quantize=name, experts="packed")
    assert packed.tensors == len(PACKED)
    with blobstore.open("one", store=store, dequantize=True) as model:
        for tensor, (dtype, shape, data) in found.items():
            expected = model[tensor]
            assert (dtype, tuple(shape)) == ("BF16", PACKED[tensor].shape)
            assert data == expected.tobytes(), tensor
    assert (tmp_path / "out" / "config.json").read_bytes() == b'{"model_type": "tiny"}\n'


def test_removes_the_config_of_another_scheme_from_decoded_weights(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    tensors: Any = {
        "a.weight": np.ones((128, 128), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_inv": np.full((1, 1), 2, np.float32),
    }
    config = {
        "model_type": "m",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    source = write_folder(
        tmp_path / "model", tensors, files={"config.json": json.dumps(config).encode()}
    )
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "m"}
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    assert found == {
        "a.weight": ("BF16", [128, 128], np.full((128, 128), 2, ml_dtypes.bfloat16).tobytes())
    }


def test_mlx_cannot_hold_a_global_scale(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    source = Path(__file__).parents[3] / "data" / "ollama" / "hf" / "ct-nvfp4"
    create(source, NAME, store=store)
    with pytest.raises(BlobstoreError, match="has a global scale .* export it dequantized"):
        export_model(NAME, tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()
    export_model(NAME, tmp_path / "out", store=store, dequantize=True)
    found = raw_tensors(tmp_path / "out" / "model.safetensors")
    assert {dtype for dtype, _, _ in found.values()} == {"BF16"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def test_damage_is_found_before_numbers_are_computed_from_it(tmp_path: Path) -> None:
    store = quantized_store(tmp_path, "packed")
    (layer,) = [item for item in store.resolve(NAME).layers if item.name == "lm_head.weight"]
    path = Path(store.blob_path(layer.digest))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with pytest.raises(BlobDamaged, match=r"layer 'lm_head\.weight': blob '.*' is damaged"):
        export_model(NAME, tmp_path / "out", store=store, dequantize=True)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_does_not_say_how_it_is_quantized_stays_packed(
    dense: Path, store: LocalStore, tmp_path: Path
) -> None:
    specs = [
        TensorSpec("x.weight", DType.U32, (1, 4)),
        TensorSpec("x.weight.scale", DType.F16, (1, 1)),
    ]
    publish_with(store, [(media_types.TENSOR, "x.weight", encode_header(specs) + bytes(18))])
    with pytest.raises(BlobstoreError, match=r"tensor 'x\.weight' is quantized, but its blob does"):
        export_model(NAME, tmp_path / "out", store=store, dequantize=True)
    export_model(NAME, tmp_path / "out", store=store)


def test_the_export_of_a_single_file_has_the_types_of_its_weights(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "model", {"a.weight": PACKED["lm_head.weight"]})
    create(source / "model.safetensors", NAME, store=store, quantize="int8")
    export_model(NAME, tmp_path / "out", store=store)
    described = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "quantization": described,
        "quantization_config": described,
    }
    create(tmp_path / "out", "again", store=store)
    layers = [
        store.resolve(Reference.parse(name)).layers_of(media_types.TENSOR)
        for name in ("m", "again")
    ]
    assert layers[0] == layers[1]


def test_a_lone_file_of_plain_weights_is_exported_without_a_config(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "model", dense_tensors())
    create(source / "model.safetensors", NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("config", [b"[1]", b'{"a":', b"null"])
def test_rejects_quantized_weights_with_a_config_that_cannot_describe_them(
    config: bytes, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "model", PACKED, files={"config.json": config})
    create(source, NAME, store=store, quantize="int4")
    with pytest.raises(BlobstoreError, match=r"'config\.json' is not a JSON object.*dequantized"):
        export_model(NAME, tmp_path / "out", store=store)
    export_model(NAME, tmp_path / "plain", store=store, dequantize=True)
    assert (tmp_path / "plain" / "config.json").read_bytes() == config


@pytest.mark.parametrize("kind", ["nvfp4", "none"])
def test_experts_of_several_types_are_exported_so_that_they_can_be_imported(
    kind: str, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    source = write_folder(tmp_path / "model", PACKED)
    overrides = [f"*.experts.11.up_proj.weight={kind}"]
    create(source, NAME, store=store, quantize="int4", overrides=overrides)
    export_model(NAME, tmp_path / "out", store=store)
    create(tmp_path / "out", "again", store=store)
    with (
        blobstore.open("m", store=store, dequantize=True) as ours,
        blobstore.open("again", store=store, dequantize=True) as again,
    ):
        for number in range(12):
            name = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
            assert np.array_equal(ours[name], again[name]), name
        joined = "model.layers.0.mlp.switch_mlp.down_proj.weight"
        down = ours["model.layers.0.mlp.experts.11.down_proj.weight"]
        assert np.array_equal(again[joined][11], down)


@pytest.mark.parametrize("jobs", [1, 3])
def test_uses_at_most_as_many_threads_as_jobs(
    dense: Path, store: LocalStore, tmp_path: Path, jobs: int
) -> None:
    threads: set[int] = set()
    export_model(
        NAME,
        tmp_path / "out",
        store=store,
        jobs=jobs,
        progress=lambda *_: threads.add(threading.get_ident()),
    )
    assert 1 <= len(threads) <= jobs
    files = (tmp_path / "out" / "model.safetensors", dense / "model.safetensors")
    assert raw_tensors(files[0]) == raw_tensors(files[1])
