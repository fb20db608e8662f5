from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

import blobstore
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType, TensorSpec
from blobstore.errors import BlobDamaged, BlobstoreError, InvalidManifest, UsageError
from blobstore.folders import writer
from blobstore.folders.writer import HashedBlob
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.planning.grouping import ExpertForm
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS
from blobstore.safetensors.header import encode_header
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip
from tests.support.folders import contents
from tests.support.frozen import put, weights
from tests.support.models import (
    Arrays,
    dense_tensors,
    moe_tensors,
    quantizable_tensors,
    write_folder,
)
from tests.support.pack_quantized import packed_weight, write_packed
from tests.support.published import write_published
from tests.unit.operations.export.folders import (
    FORMS,
    NAME,
    add_layers,
    assert_holds,
    raw_tensors,
    remove_layers,
)

DATA = Path(__file__).parents[3] / "data" / "ollama" / "hf"


# Contents


def test_tensors_are_exported_bit_for_bit(dense: Path, store: LocalStore, out: Path) -> None:
    exported = export_model("m", out, store=store)
    file = out / "model.safetensors"
    assert raw_tensors(file) == raw_tensors(dense)
    assert exported.tensors == len(dense_tensors())
    assert exported.shards == 1
    # The safetensors library and transformers accept the file.
    with safe_open(file, framework="numpy") as opened:
        assert opened.metadata() == {"format": "pt"}
        for name, array in dense_tensors().items():
            np.testing.assert_array_equal(opened.get_tensor(name), array, strict=True)


def test_exports_rare_types_and_names(store: LocalStore, out: Path) -> None:
    create(DATA / "odd", NAME, store=store)
    export_model(NAME, out, store=store)
    assert raw_tensors(out / "model.safetensors") == raw_tensors(DATA / "odd" / "model.safetensors")


@pytest.mark.parametrize("experts", FORMS)
def test_exports_the_experts_of_the_source(
    experts: ExpertForm, store: LocalStore, tmp_path: Path, out: Path
) -> None:
    folder = write_folder(tmp_path / "moe", moe_tensors())
    create(folder, NAME, store=store, experts=experts)
    export_model(NAME, out, store=store)
    assert raw_tensors(out / "model.safetensors") == raw_tensors(folder / "model.safetensors")


def test_small_files_are_exported_unchanged(store: LocalStore, tmp_path: Path, out: Path) -> None:
    files = {
        "config.json": b'{ "spaces" :1}',
        "tokenizer.json": b'{"broken": ',
        "merges.txt": b"a b\n",
        "LICENSE": b"",
        "additional_chat_templates/tool.jinja": b"{{ x }}",
    }
    create(write_folder(tmp_path / "source", dense_tensors(), files=files), NAME, store=store)
    exported = export_model(NAME, out, store=store)
    found = contents(out)
    assert {name: found[name] for name in files} == files
    assert exported.files == len(found) == len(files) + 1
    assert exported.bytes_written == sum(map(len, found.values()))


def test_leaves_out_the_layers_that_only_ollama_uses(
    dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (media_types.TEMPLATE, "", b"{{ .Prompt }}"))
    assert export_model(NAME, out, store=store).folder == out
    assert_holds(out, {"config.json", "model.safetensors"})


def test_a_tensor_that_its_blob_calls_data_has_the_name_of_the_layer(
    dense: Path, store: LocalStore, out: Path
) -> None:
    blob = encode_header([TensorSpec("data", DType.U8, (2,))]) + b"ab"
    add_layers(store, *((media_types.TENSOR, name, blob) for name in ("old.b", "old.a")))
    export_model(NAME, out, store=store, single=True)
    found = raw_tensors(out)
    assert found["old.a"] == found["old.b"] == ("U8", [2], b"ab")
    assert "data" not in found


def test_quantized_tensors_are_exported_as_stored_with_mlx_names(
    dense: Path, store: LocalStore, out: Path
) -> None:
    specs = [
        TensorSpec("x.weight", DType.U32, (1, 4)),
        TensorSpec("x.weight.scale", DType.BF16, (1, 1)),
        TensorSpec("x.weight.bias", DType.BF16, (1, 1)),
    ]
    header = encode_header(specs, {"quant_type": "int4", "group_size": "32"})
    add_layers(store, (media_types.TENSOR, "x.weight", header + bytes(range(20))))
    export_model(NAME, out, store=store, single=True)
    found = raw_tensors(out)
    assert found["x.weight"] == ("U32", [1, 4], bytes(range(16)))
    assert found["x.scales"] == ("BF16", [1, 1], bytes(range(16, 18)))
    assert found["x.biases"] == ("BF16", [1, 1], bytes(range(18, 20)))
    config = json.loads((out / "config.json").read_text())
    expected = {"group_size": 32, "bits": 4, "mode": "affine"}
    assert config["quantization"] == config["quantization_config"] == expected


def test_reads_the_tensors_of_a_foreign_blob_in_any_order(
    dense: Path, store: LocalStore, out: Path
) -> None:
    parts = [("x.scale", DType.F16), ("x.bias", DType.F16), ("x", DType.U32)]
    header = encode_header([TensorSpec(name, dtype, (1,)) for name, dtype in parts])
    add_layers(store, (media_types.TENSOR, "x", header + bytes(range(8))))
    export_model(NAME, out, store=store, single=True)
    data = {name: found for name, (*_, found) in raw_tensors(out).items() if name.startswith("x")}
    assert data == {"x.scales": b"\0\1", "x.biases": b"\2\3", "x": b"\4\5\6\7"}


# Shards


def test_splits_weights_larger_than_the_shard_size(
    dense: Path, store: LocalStore, out: Path
) -> None:
    exported = export_model(NAME, out, store=store, shard_size=200)
    index = json.loads((out / "model.safetensors.index.json").read_bytes())
    shards = sorted(out.glob("*.safetensors"))
    assert [shard.name for shard in shards] == [
        f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)
    ]
    assert exported.shards == 3
    tensors = {shard.name: raw_tensors(shard) for shard in shards}
    assert index["weight_map"] == {name: shard for shard, own in tensors.items() for name in own}
    assert list(index["weight_map"]) == sorted(dense_tensors())
    # Filled in the order of the names.
    assert list(index["weight_map"].values()) == sorted(index["weight_map"].values())
    sizes = [sum(len(data) for *_, data in own.values()) for own in tensors.values()]
    assert all(size <= 200 for size in sizes)
    assert index["metadata"] == {"total_size": sum(sizes)}
    assert raw_tensors(out) == raw_tensors(dense)


@pytest.mark.parametrize(
    ("sizes", "shard_size", "files"),
    [
        ({"a": 11, "b": 1, "c": 100, "d": 0, "e": 10}, 10, [["a"], ["b"], ["c"], ["d", "e"]]),
        ({"a": 11, "b": 100}, 110, [["a"], ["b"]]),
        ({"a": 11, "b": 100}, 111, [["a", "b"]]),
    ],
)
def test_fills_shards_in_the_order_of_names(
    sizes: dict[str, int],
    shard_size: int,
    files: list[list[str]],
    store: LocalStore,
    tmp_path: Path,
    out: Path,
) -> None:
    tensors: Arrays = {name: np.zeros(size, np.uint8) for name, size in sizes.items()}
    create(write_folder(tmp_path / "source", tensors), NAME, store=store)
    export_model(NAME, out, store=store, shard_size=shard_size)
    shards = sorted(out.glob("*.safetensors"))
    assert [sorted(raw_tensors(shard)) for shard in shards] == files
    assert (out / "model.safetensors").exists() == (len(files) == 1)
    assert (out / "model.safetensors.index.json").exists() == (len(files) > 1)


def test_writes_the_same_bytes_every_time(store: LocalStore, tmp_path: Path) -> None:
    exports = []
    for experts, shards in zip(FORMS, (1, 3), strict=True):
        folder = write_folder(tmp_path / experts, moe_tensors(), shards=shards)
        create(folder, experts, store=store, experts=experts)
        export_model(experts, tmp_path / f"out-{experts}", store=store, shard_size=500)
        exports.append(contents(tmp_path / f"out-{experts}"))
    assert exports[0] == exports[1]


def test_an_exported_folder_of_other_shards_makes_the_same_layers_again(
    stacked: Path, store: LocalStore, out: Path
) -> None:
    export_model(NAME, out, store=store, shard_size=500)
    create(out, "again", store=store, experts="stacked")
    (*again, source), (*layers, other) = store.resolve("again").layers, store.resolve(NAME).layers
    assert again == layers
    assert source.media_type == other.media_type == media_types.SOURCE


# Components


def test_components_of_a_pipeline_are_where_diffusers_looks_for_them(
    store: LocalStore, tmp_path: Path, out: Path
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
        tensors: Arrays = {"w": np.full(3, number, np.uint8), "v/w": np.full(2, number, np.int64)}
        write_folder(source / name, tensors, stem=stem, files={"config.json": config})
    (source / "scheduler").mkdir()
    (source / "scheduler" / "scheduler_config.json").write_text("{}")
    listed |= {
        "scheduler": ["diffusers", "PNDMScheduler"],
        "_class_name": "SD",
        "image": [None, None],
    }
    (source / "model_index.json").write_text(json.dumps(listed))
    create(source, NAME, store=store)
    export_model(NAME, out, store=store)
    expected, found = contents(source), contents(out)
    assert found.keys() == expected.keys()
    for file in expected:
        if file.endswith(".safetensors"):
            assert raw_tensors(out / file) == raw_tensors(source / file)
        else:
            assert found[file] == expected[file]


def test_each_component_has_its_own_index(store: LocalStore, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "source"
    tensors = {"a": np.zeros(8, np.uint8), "b": np.ones(8, np.uint8)}
    write_folder(source / "unet", tensors, stem="diffusion_pytorch_model")
    (source / "model_index.json").write_text('{"unet": ["diffusers", "UNet"]}')
    create(source, NAME, store=store)
    export_model(NAME, out, store=store, shard_size=8)
    unet = out / "unet"
    index = json.loads((unet / "diffusion_pytorch_model.safetensors.index.json").read_bytes())
    assert index["weight_map"] == {
        "a": "diffusion_pytorch_model-00001-of-00002.safetensors",
        "b": "diffusion_pytorch_model-00002-of-00002.safetensors",
    }
    assert all((unet / file).is_file() for file in index["weight_map"].values())


def test_modules_of_sentence_transformers_have_their_own_folders(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    modules = [
        {"idx": 0, "path": "", "type": "Transformer"},
        {"idx": 1, "path": "2_Dense", "type": "Dense"},
        {"idx": 2, "path": "3_Normalize", "type": "Normalize"},
    ]
    files = {"modules.json": json.dumps(modules).encode()}
    source = write_folder(tmp_path / "source", dense_tensors(), files=files)
    write_folder(source / "2_Dense", {"linear.weight": np.ones(3, np.float32)})
    create(source, NAME, store=store)
    export_model(NAME, out, store=store)
    for file in ("model.safetensors", "2_Dense/model.safetensors"):
        assert raw_tensors(out / file) == raw_tensors(source / file)


def test_the_weights_of_a_single_diffusers_model_have_its_file_name(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    files = {"config.json": b'{"_class_name": "UNet", "_diffusers_version": "0.30"}'}
    stem = "diffusion_pytorch_model"
    source = write_folder(tmp_path / "source", dense_tensors(), stem=stem, files=files)
    create(source, NAME, store=store)
    export_model(NAME, out, store=store)
    file = f"{stem}.safetensors"
    assert raw_tensors(out / file) == raw_tensors(source / file)


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        *(b"not json", b"[" * 100_000, b"[]", b"7", b'{"path": "to"}'),
        *(b'{"path": ["diffusers"]}', b'{"path": [null, null]}'),
        b'{"..": ["diffusers", "X"], "a/b": ["diffusers", "X"]}',
        b'[{"path": 7}, {"path": ".."}, {"path": "path/to"}, 7, {}]',
    ],
)
@pytest.mark.parametrize("name", ["model_index.json", "modules.json"])
def test_a_slash_in_a_name_alone_does_not_make_a_component(
    name: str, content: bytes, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (media_types.JSON, name, content))
    export_model(NAME, out, store=store)
    assert raw_tensors(out / "model.safetensors") == raw_tensors(dense / "model.safetensors")


# The folder


def test_writes_to_an_empty_folder(dense: Path, store: LocalStore, out: Path) -> None:
    out.mkdir()
    assert export_model(NAME, out, store=store).folder == out
    assert (out / "model.safetensors").is_file()
    assert_holds(out.parent, {"source", "out", "store"})


def test_makes_missing_parents(dense: Path, store: LocalStore, out: Path) -> None:
    export_model(NAME, str(out / "a" / "b"), store=store)
    assert (out / "a" / "b" / "config.json").is_file()


def test_follows_a_link_to_an_empty_folder(
    dense: Path, store: LocalStore, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "real").mkdir()
    out.symlink_to("real")
    assert export_model(NAME, out, store=store).folder == tmp_path / "real"
    assert (out / "model.safetensors").is_file()


def test_files_have_the_usual_mode(dense: Path, store: LocalStore, out: Path) -> None:
    old = os.umask(0o027)
    try:
        export_model(NAME, out, store=store)
    finally:
        os.umask(old)
    assert out.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o640}


def test_rejects_a_shard_size_below_one(dense: Path, store: LocalStore, out: Path) -> None:
    with pytest.raises(UsageError, match="at least 1 byte, got 0"):
        export_model(NAME, out, store=store, shard_size=0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "two files would both be 'model.safetensors'"),
        ("model.safetensors/x.json", "'model.safetensors' would be both a file and a folder"),
        ("model-00002-of-00003.safetensors", "'model-00002-of-00003.safetensors'"),
    ],
)
def test_rejects_a_file_with_the_name_of_a_weight_file(
    name: str, message: str, dense: Path, store: LocalStore, out: Path
) -> None:
    add_layers(store, (media_types.FILE, name, b"{}"))
    size = 200 if "-of-" in name else 10**9
    with pytest.raises(InvalidManifest, match=message):
        export_model(NAME, out, store=store, shard_size=size)
    assert_holds(out.parent, {"source", "store"})


# Damage and interruption


def first_data_byte(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("layer", ["model.embed_tokens.weight", "model.layers.0.mlp.experts"])
@pytest.mark.parametrize("place", [lambda _: -1, first_data_byte], ids=["last", "first"])
@pytest.mark.parametrize("experts", FORMS)
def test_finds_one_changed_byte(
    layer: str,
    place: Callable[[Path], int],
    experts: ExpertForm,
    store: LocalStore,
    tmp_path: Path,
    out: Path,
) -> None:
    source = write_folder(tmp_path / "source", dense_tensors() | moe_tensors())
    create(source, NAME, store=store, experts=experts)
    blob = blob_path(store, layer)
    flip(blob, place(blob))
    with pytest.raises(BlobDamaged, match=f"model m:latest: layer '{layer}': blob .*damaged"):
        export_model(NAME, out, store=store)
    assert_holds(tmp_path, {"source", "store"})


def test_finds_a_header_that_was_changed_into_another_valid_one(
    dense: Path, store: LocalStore, out: Path
) -> None:
    blob = blob_path(store, "model.embed_tokens.weight")
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"[8,4]", b"[4,8]", 1))
    with pytest.raises(BlobDamaged, match=r"layer 'model\.embed_tokens\.weight': .* have digest"):
        export_model(NAME, out, store=store)
    assert_holds(out.parent, {"source", "store"})


def test_finds_a_blob_that_shrinks_while_it_is_read(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    tensors = {"w": np.zeros(5 * 2**20, np.uint8)}
    create(write_folder(tmp_path / "source", tensors), NAME, store=store)
    blob = blob_path(store, "w")
    blob.chmod(0o644)

    def shrink(_what: str, _done: int, _total: int) -> None:
        os.truncate(blob, 3 * 2**20)

    with pytest.raises(BlobDamaged, match=r"ended at byte 3145728, .* bytes too early"):
        export_model(NAME, out, store=store, progress=shrink)
    assert_holds(tmp_path, {"source", "store"})


def test_reports_the_place_at_which_a_blob_cannot_be_read(
    tmp_path: Path, store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)  # reading a folder fails
    monkeypatch.setattr(store._hot, "open", lambda *_: descriptor)
    with pytest.raises(BlobDamaged, match="cannot be read at byte 0: Is a directory"):
        list(HashedBlob(store.read_pieces(Digest.of(b""), 8)).read(8))


def test_pieces_are_cut_where_tensors_end() -> None:
    reader = HashedBlob(memoryview(piece) for piece in (b"abc", b"defg", b"h"))
    read = [b"".join(map(bytes, reader.read(size))) for size in (0, 2, 4, 1)]
    assert read == [b"", b"ab", b"cdef", b"g"]
    with pytest.raises(BlobDamaged, match="ended at byte 8, 1 bytes too early"):
        list(reader.read(2))
    assert reader.digester.digest() == Digest.of(b"abcdefgh")


def test_a_frozen_model_is_exported_in_pieces(
    store: LocalStore, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "frozen", {"x": 1, "y": 2})
    freeze_models(["frozen"], store=store)
    # A file in memory would need the space of a complete blob.
    monkeypatch.setattr(os, "memfd_create", None)
    export_model("frozen", out, store=store)
    arrays = load_file(out / "model.safetensors")
    found = {name: array.tobytes() for name, array in arrays.items()}
    assert found == {"x": weights(1), "y": weights(2)}


def test_never_replaces_files_that_appear_during_the_export(
    dense: Path, store: LocalStore, out: Path
) -> None:
    def appear(_what: str, _done: int, _total: int) -> None:
        out.mkdir(exist_ok=True)
        (out / "mine").write_text("mine")

    with pytest.raises(BlobstoreError, match="cannot write"):
        export_model(NAME, out, store=store, progress=appear)
    assert_holds(out.parent, {"source", "out", "store"})
    assert_holds(out, {"mine"})


def test_reports_progress_up_to_the_total(stacked: Path, store: LocalStore, out: Path) -> None:
    reports: list[tuple[int, int]] = []
    export_model(
        NAME, out, store=store, progress=lambda _, done, total: reports.append((done, total))
    )
    size = sum(array.nbytes for array in load_file(stacked / "model.safetensors").values())
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (size, size)


# Quantized models

PACKED = quantizable_tensors()
LAYER = "model.layers.0"


def create_quantized(
    store: LocalStore, experts: ExpertForm, name: str = "int4", model: str = "m"
) -> None:
    source = write_folder(store.root.parent / "model", PACKED)
    create(source, model, store=store, quantize=QuantizeOptions(name), experts=experts)


@pytest.mark.parametrize("experts", FORMS)
def test_quantized_weights_are_exported_in_the_layout_of_mlx(
    store: LocalStore, out: Path, experts: ExpertForm
) -> None:
    create_quantized(store, experts)
    export_model(NAME, out, store=store)
    found = raw_tensors(out / "model.safetensors")
    up = f"{LAYER}.mlp.switch_mlp.up_proj"
    assert {name.rpartition(".")[2]: value[:2] for name, value in found.items() if up in name} == {
        "weight": ("U32", [12, 64, 16]),
        "scales": ("BF16", [12, 64, 4]),
        "biases": ("BF16", [12, 64, 4]),
    }
    experts_up = [PACKED[f"{LAYER}.mlp.experts.{number}.up_proj.weight"] for number in range(12)]
    packed = [reference.quantize(array, FORMATS["int4"], 32).weight for array in experts_up]
    assert found[f"{up}.weight"][2] == b"".join(array.tobytes() for array in packed)
    assert found["model.embed_tokens.weight"][:2] == ("BF16", [64, 128])
    config = json.loads((out / "config.json").read_text())
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


def test_both_forms_of_experts_give_the_same_export(store: LocalStore, tmp_path: Path) -> None:
    for form in FORMS:
        create_quantized(store, form, model=form)
        export_model(form, tmp_path / f"out-{form}", store=store, shard_size=60_000)
    packed, stacked = (contents(tmp_path / f"out-{form}") for form in FORMS)
    assert len(packed) > 4
    assert packed == stacked


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
@pytest.mark.parametrize("experts", FORMS)
def test_exports_quantized_weights_dequantized(
    store: LocalStore, out: Path, experts: ExpertForm, name: str
) -> None:
    create_quantized(store, experts, name)
    exported = export_model(NAME, out, store=store, dequantize=True, shard_size=70_000)
    assert exported.shards > 1
    found = raw_tensors(out)
    assert found.keys() == PACKED.keys()
    create_quantized(store, "packed", name, model="one")
    with blobstore.open("one", store=store, dequantize=True) as model:
        for tensor, (dtype, shape, data) in found.items():
            assert (dtype, tuple(shape)) == ("BF16", PACKED[tensor].shape)
            assert data == model[tensor].tobytes(), tensor
    assert (out / "config.json").read_bytes() == b'{"model_type": "tiny"}\n'


@pytest.mark.parametrize("dequantize", [False, True])
def test_rejects_a_quantized_stack_of_another_count(
    store: LocalStore, out: Path, *, dequantize: bool
) -> None:
    create_quantized(store, "stacked")
    remove_layers(store, media_types.STACKS)
    stacks = {
        f"{LAYER}.mlp.experts.{projection}.weight": [
            f"{projection}.{number}" for number in range(11)
        ]
        for projection in ("up_proj", "down_proj")
    }
    add_layers(store, (media_types.STACKS, "", json.dumps(stacks).encode()))
    with pytest.raises(BlobDamaged, match=r"\[12, .* is listed as a stack of length 11"):
        export_model(NAME, out, store=store, dequantize=dequantize)


def test_removes_the_config_of_another_scheme_from_decoded_weights(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    tensors: Any = {
        "a.weight": np.ones((128, 128), ml_dtypes.float8_e4m3fn),
        "a.weight_scale_inv": np.full((1, 1), 2, np.float32),
    }
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config = json.dumps({"model_type": "m", "quantization_config": scheme}).encode()
    source = write_folder(tmp_path / "model", tensors, files={"config.json": config})
    create(source, NAME, store=store, decode=True)
    export_model(NAME, out, store=store)
    assert json.loads((out / "config.json").read_text()) == {"model_type": "m"}
    twos = np.full((128, 128), 2, ml_dtypes.bfloat16).tobytes()
    assert raw_tensors(out / "model.safetensors") == {"a.weight": ("BF16", [128, 128], twos)}


def modelopt_folder(folder: Path) -> Path:
    """Write a model that ModelOpt has quantized to nvfp4 and fp8."""
    random = np.random.default_rng(0)
    tensors: Any = {"norm.weight": np.ones(8, np.float32)}
    for expert in range(2):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj"
        scale = random.integers(0, 127, (8, 4), np.uint8).view(ml_dtypes.float8_e4m3fn)
        tensors |= {
            f"{name}.weight": random.integers(0, 256, (8, 32), np.uint8),
            f"{name}.weight_scale": scale,
            f"{name}.weight_scale_2": np.array(0.3, np.float32),
            f"{name}.input_scale": np.array(0.7, np.float32),
        }
    tensors["q.weight"] = np.ones((8, 8), ml_dtypes.float8_e4m3fn)
    tensors["q.weight_scale"] = np.array(0.5, np.float32)
    config = json.dumps({"quantization_config": {"quant_method": "modelopt"}}).encode()
    return write_folder(folder, tensors, files={"config.json": config})


@pytest.mark.parametrize("maker", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("write", [partial(export_model, single=True), link_model])
def test_weights_with_global_scales_keep_the_names_of_their_source(
    store: LocalStore, tmp_path: Path, out: Path, maker: str, write: Any
) -> None:
    is_modelopt = maker == "modelopt"
    folder = modelopt_folder(tmp_path / "source") if is_modelopt else DATA / "ct-nvfp4"
    create(folder, NAME, store=store)
    written = write(NAME, out, store=store)
    source = raw_tensors(folder / "model.safetensors")
    assert raw_tensors(out) == source  # the scales of activations, too
    assert written.tensors == len(source)
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_weights_with_global_scales_are_exported_dequantized(store: LocalStore, out: Path) -> None:
    create(DATA / "ct-nvfp4", NAME, store=store)
    export_model(NAME, out, store=store, dequantize=True)
    found = raw_tensors(out / "model.safetensors")
    assert {dtype for dtype, _, _ in found.values()} == {"BF16"}
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_finds_damage_before_it_dequantizes(store: LocalStore, out: Path) -> None:
    create_quantized(store, "packed")
    flip(blob_path(store, "lm_head.weight"))
    with pytest.raises(BlobDamaged, match=r"layer 'lm_head\.weight': blob '.*' is damaged"):
        export_model(NAME, out, store=store, dequantize=True)
    assert not out.exists()


def test_a_weight_of_unknown_quantization_can_only_be_exported_packed(
    dense: Path, store: LocalStore, out: Path
) -> None:
    specs = [
        TensorSpec("x.weight", DType.U32, (1, 4)),
        TensorSpec("x.weight.scale", DType.F16, (1, 1)),
    ]
    add_layers(store, (media_types.TENSOR, "x.weight", encode_header(specs) + bytes(18)))
    with pytest.raises(BlobstoreError, match=r"tensor 'x\.weight' is quantized, but its blob does"):
        export_model(NAME, out, store=store, dequantize=True)
    export_model(NAME, out, store=store)


def test_the_export_of_a_single_file_has_the_types_of_its_weights(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    source = write_folder(tmp_path / "model", {"a.weight": PACKED["lm_head.weight"]})
    create(source / "model.safetensors", NAME, store=store, quantize=QuantizeOptions("int8"))
    export_model(NAME, out, store=store)
    described = {"group_size": 64, "bits": 8, "mode": "affine"}
    config = json.loads((out / "config.json").read_text())
    assert config == {"quantization": described, "quantization_config": described}
    create(out, "again", store=store)
    again = store.resolve(Reference.parse("again"))
    kind = media_types.TENSOR
    assert store.resolve(NAME).layers_of(kind) == again.layers_of(kind)


def test_a_single_file_of_plain_weights_is_exported_without_a_config(
    dense: Path, store: LocalStore, out: Path
) -> None:
    create(dense / "model.safetensors", NAME, store=store)
    export_model(NAME, out, store=store)
    assert_holds(out, {"model.safetensors"})


@pytest.mark.parametrize("config", [b"[1]", b'{"a":', b"null"])
def test_rejects_quantized_weights_with_a_config_that_cannot_describe_them(
    config: bytes, store: LocalStore, tmp_path: Path, out: Path
) -> None:
    source = write_folder(tmp_path / "model", PACKED)
    (source / "config.json").unlink()  # create refuses such a config, earlier versions did not
    create(source, NAME, store=store, quantize=QuantizeOptions("int4"))
    add_layers(store, (media_types.JSON, "config.json", config))
    with pytest.raises(BlobstoreError, match=r"'config\.json' is not a JSON object.*dequantized"):
        export_model(NAME, out, store=store)
    export_model(NAME, out, store=store, dequantize=True)
    assert (out / "config.json").read_bytes() == config


@pytest.mark.parametrize("kind", ["nvfp4", "none"])
def test_experts_of_several_types_can_be_imported_from_their_export(
    kind: str, store: LocalStore, tmp_path: Path, out: Path
) -> None:
    source = write_folder(tmp_path / "model", PACKED)
    overrides = [f"*.experts.11.up_proj.weight={kind}"]
    create(source, NAME, store=store, quantize=QuantizeOptions("int4", overrides=overrides))
    export_model(NAME, out, store=store)
    create(out, "again", store=store)
    with (
        blobstore.open("m", store=store, dequantize=True) as ours,
        blobstore.open("again", store=store, dequantize=True) as again,
    ):
        for number in range(12):
            name = f"{LAYER}.mlp.experts.{number}.up_proj.weight"
            assert np.array_equal(ours[name], again[name]), name
        joined = f"{LAYER}.mlp.switch_mlp.down_proj.weight"
        down = ours[f"{LAYER}.mlp.experts.11.down_proj.weight"]
        assert np.array_equal(again[joined][11], down)


@pytest.mark.parametrize("jobs", [1, 3])
def test_uses_at_most_as_many_threads_as_jobs(
    dense: Path, store: LocalStore, out: Path, jobs: int
) -> None:
    threads: set[int] = set()
    export_model(
        NAME, out, store=store, jobs=jobs, progress=lambda *_: threads.add(threading.get_ident())
    )
    assert 1 <= len(threads) <= jobs
    assert raw_tensors(out / "model.safetensors") == raw_tensors(dense / "model.safetensors")


@pytest.mark.parametrize("write", [export_model, link_model])
def test_a_model_that_is_removed_during_its_export_is_exported_completely(
    dense: Path,
    store: LocalStore,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., object],
) -> None:
    create(dense, NAME, store=store)
    before = {blob.name for blob in store.folder("blobs").iterdir()}
    really_open = writer.atomic_folder

    def late(target: Path, **options: Any) -> contextlib.AbstractContextManager[Path]:
        remove_models([NAME], store=store)
        collect_garbage(store=store, older_than=0)
        return really_open(target, **options)

    monkeypatch.setattr(writer, "atomic_folder", late)
    write(NAME, out, store=store)
    assert {blob.name for blob in store.folder("blobs").iterdir()} == before
    assert not store.read_leases().digests


@pytest.mark.parametrize("write", [export_model, link_model])
def test_every_file_and_folder_is_durable_before_the_folder_gets_its_name(
    store: LocalStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., object],
) -> None:
    files = {"modules.json": b'[{"path": "1_Pooling"}]', "1_Pooling/config.json": b"{}"}
    create(write_folder(tmp_path / "nested", dense_tensors(), files=files), NAME, store=store)
    out = tmp_path / "new" / "deep" / "out"
    really_sync = os.fsync
    before: dict[int, int] = {}
    after: dict[int, int] = {}

    def sync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        (after if out.exists() else before)[status.st_ino] = status.st_size
        really_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    write(NAME, out, store=store)
    paths = [path for path in (out, *out.rglob("*")) if not path.is_symlink()]
    assert out / "1_Pooling" / "config.json" in paths
    paths += [out.parent, out.parent.parent, tmp_path]
    assert {path.stat().st_ino for path in paths} <= before.keys()
    statuses = [path.stat() for path in paths if path.is_file()]
    assert all(before[status.st_ino] == status.st_size for status in statuses)
    assert after.keys() == {out.parent.stat().st_ino}


@pytest.mark.parametrize("shard_size", [None, 1000])
def test_what_is_kept_as_published_keeps_its_config(
    shard_size: int | None, tmp_path: Path, store: LocalStore
) -> None:
    source = write_published(tmp_path / "source", "awq")
    create(source, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store, shard_size=shard_size)
    assert raw_tensors(tmp_path / "out") == raw_tensors(source)
    assert contents(tmp_path / "out")["config.json"] == contents(source)["config.json"]
    with pytest.raises(
        BlobstoreError, match=r"weights \(awq\) are kept as published and cannot be"
    ):
        export_model(NAME, tmp_path / "plain", store=store, dequantize=True)
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("write", [partial(export_model, single=True), link_model])
def test_symmetric_integers_keep_the_names_of_their_source(
    store: LocalStore, tmp_path: Path, out: Path, write: Any
) -> None:
    tensors = {
        **packed_weight("q").tensors,
        **packed_weight("model.layers.0.mlp.experts.0.up_proj", shape_type="I32").tensors,
    }
    folder = write_packed(tmp_path / "source", tensors)
    create(folder, NAME, store=store)
    write(NAME, out, store=store)
    assert raw_tensors(out) == raw_tensors(folder / "model.safetensors")
    assert (out / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_symmetric_integers_of_a_pytorch_file_get_the_tensors_of_compressed_tensors(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    tensors = packed_weight("q").tensors
    folder = write_packed(tmp_path / "source", tensors)
    state = safetensors.torch.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")
    create(folder, NAME, store=store)
    export_model(NAME, out, store=store)
    found = raw_tensors(out / "model.safetensors")
    assert {name: found[name] for name in tensors} == tensors


def test_symmetric_integers_are_exported_dequantized(
    store: LocalStore, tmp_path: Path, out: Path
) -> None:
    packed = packed_weight("q", scale="F16")
    create(write_packed(tmp_path / "source", packed.tensors), NAME, store=store)
    export_model(NAME, out, store=store, dequantize=True)
    found = raw_tensors(out / "model.safetensors")
    assert set(found) == {"q.weight", "model.norm.weight"}
    assert found["q.weight"] == ("F16", [6, 64], packed.values.tobytes())
    assert json.loads((out / "config.json").read_text()) == {}
