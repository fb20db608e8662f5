"""The files of a source come back byte for byte, and a forged record of them is damage."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged, Damaged, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.source_record import RecordedFile, SourceRecord
from blobstore.models.source_layers import read_source_record, read_stacks
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.operations.create.create import create
from blobstore.operations.describe.show import describe_model
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning import import_options as record_module
from blobstore.sources.base import SourceOptions
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path, flip
from tests.support.folders import contents
from tests.support.options import grouped
from tests.support.pack_quantized import packed_config, packed_weight
from tests.unit.operations.export.folders import (
    NAME,
    add_layers,
    raw_tensors,
    remove_layers,
)

DATA = Path(__file__).parents[2] / "data" / "ollama" / "hf"
Tensors = Mapping[str, tuple[str, list[int], bytes]]


def weights(names: str, size: int = 64) -> Tensors:
    """Return F32 vectors of different bytes; ``names`` are separated by spaces."""
    return {
        name: ("F32", [size // 4], bytes((number * 7 + i) % 251 for i in range(size)))
        for number, name in enumerate(names.split())
    }


def file_of(
    tensors: Tensors, metadata: Mapping[str, str] | None = None, *, padding: int = 0, **json_: Any
) -> bytes:
    """Return a safetensors file with the tensors in the order given, whatever its header looks like."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        span = [offset, offset + len(data)]
        header[name] = {"shape": shape, "data_offsets": span, "dtype": dtype}
        offset += len(data)
    text = json.dumps(header, **json_).encode() + b" " * padding
    data = b"".join(data for _, _, data in tensors.values())
    return len(text).to_bytes(8, "little") + text + data


def index_of(**files: str) -> bytes:
    """Return an index with unusual spaces; values are names of tensors, separated by spaces."""
    names = {name: f"{file}.safetensors" for file, held in files.items() for name in held.split()}
    return json.dumps({"weight_map": names, "metadata": {"total_size": 5}}, indent=3).encode()


def zeros(**shapes: tuple[str, int, list[int]]) -> Tensors:
    """Return tensors of zeros by their names, each of a type, the bits of an element, and a shape."""
    return {
        name: (dtype, shape, bytes(bits * math.prod(shape) // 8))
        for name, (dtype, bits, shape) in shapes.items()
    }


def minimax() -> Tensors:
    """Return a layer of MiniMax M2: experts of 8-bit floats, and a gate and a bias of 32 bits."""
    block = "model.layers.0.block_sparse_moe"
    names = [f"{block}.experts.{index}.{part}" for index in range(2) for part in ("w1", "w2", "w3")]
    return {
        **zeros(**{f"{name}.weight": ("F8_E4M3", 8, [256, 128]) for name in names}),
        **zeros(**{f"{name}.weight_scale_inv": ("F32", 32, [2, 1]) for name in names}),
        **zeros(
            **{
                f"{block}.e_score_correction_bias": ("F32", 32, [2]),
                f"{block}.gate.weight": ("F32", 32, [2, 128]),
            }
        ),
    }


def mixed_gpt_oss() -> Tensors:
    """Return experts of mxfp4 and a projection of int8, as MLX packs them."""
    experts, query = "model.layers.0.mlp.experts.gate_proj", "model.layers.0.self_attn.q_proj"
    return zeros(
        **{
            f"{experts}.weight": ("U32", 32, [2, 64, 8]),
            f"{experts}.scales": ("U8", 8, [2, 64, 2]),
            f"{query}.weight": ("U32", 32, [64, 16]),
            f"{query}.scales": ("BF16", 16, [64, 1]),
            f"{query}.biases": ("BF16", 16, [64, 1]),
        }
    )


def shared_keys() -> Tensors:
    """Return layers of a fine-tune of Gemma 3n: the second uses the keys and values of the first."""
    first, second = (f"model.language_model.layers.{index}.self_attn." for index in range(2))
    return weights(
        " ".join([*(f"{first}{it}_proj.weight" for it in "qkvo"), f"{second}q_proj.weight"])
    )


def scaled(name: str, groups: int = 4) -> Tensors:
    """Return a weight of compressed-tensors NVFP4 with its quantization parameters and an input scale."""
    return {
        f"{name}.weight_packed": ("U8", [4, groups * 8], bytes(range(4 * groups * 8))),
        f"{name}.weight_scale": ("F8_E4M3", [4, groups], bytes(range(56, 56 + 4 * groups))),
        # 1 / (1 / x) is not x for this value.
        f"{name}.weight_global_scale": ("F32", [1], b"\x29\x5c\x0f\x41"),
        f"{name}.input_global_scale": ("F32", [1], b"\x01\x02\x03\x40"),
    }


EXPERT = "model.layers.0.mlp.experts"
EXPERTS = weights(" ".join(f"{EXPERT}.{i}.up_proj.weight" for i in range(12)))
LORA = {"format": "pt", "lora": "rank 8"}
SOURCES: dict[str, dict[str, bytes]] = {
    "a single file": {"model.safetensors": file_of(weights("b a c"), {"format": "pt"})},
    "an indented header with padding": {
        "model.safetensors": file_of(weights("z a é"), padding=13, indent=1, ensure_ascii=False)
    },
    "shards and an index": {
        "model-00001-of-00002.safetensors": file_of(weights("a b"), {"format": "pt"}),
        "model-00002-of-00002.safetensors": file_of(weights("x y", 32)),
        "model.safetensors.index.json": index_of(
            **{"model-00001-of-00002": "b a", "model-00002-of-00002": "x y"}
        ),
    },
    "an index of no tensors": {
        "model.safetensors": file_of(weights("a b")),
        "model.safetensors.index.json": b'{"weight_map": {} }',
    },
    "two indexes of the same shards": {
        "model-00001-of-00001.safetensors": file_of(weights("a b")),
        "model.safetensors.index.json": index_of(**{"model-00001-of-00001": "b a"}),
        "model.safetensors.index.v2.json": index_of(**{"model-00001-of-00001": "a b"}),
        "other.safetensors.index.json": b"not JSON",
    },
    "an index of other files": {
        "model.safetensors": file_of(weights("a b")),
        "diffusion_pytorch_model.safetensors.index.json": index_of(lost="a b"),
        "empty.safetensors.index.json": b"{}",
        "pytorch_model.bin.index.json": b'{"weight_map": {"a": "gone.bin"}}',
        "training_args.pt.json": b"{}",
    },
    "an adapter": {
        "adapter_model.safetensors": file_of(weights("a.lora_A.weight a.lora_B.weight"), LORA),
        "adapter_config.json": b'{"r": 8}',
    },
    "experts": {"model.safetensors": file_of(EXPERTS)},
    "no elements": {
        "model.safetensors": file_of(
            {"e": ("F32", [0, 4], b""), **weights("a"), "f": ("I8", [0], b"")}
        )
    },
    "a pipeline": {
        "model_index.json": b'{"unet": ["diffusers", "UNet"], "text": ["transformers", "T5"]}',
        "unet/diffusion_pytorch_model.safetensors": file_of(weights("x"), {"format": "pt"}),
        "unet/config.json": b'{"_diffusers_version": "1"}',
        "unet/other.safetensors.index.json": index_of(diffusion_pytorch_model="x"),
        "text/model.safetensors": file_of(weights("x y", 32)),
    },
    "packed weights and input scales": {
        "model.safetensors": file_of({**scaled("q"), **weights("norm"), **scaled("k")}),
        "config.json": json.dumps(
            {"quantization_config": {"quant_method": "compressed-tensors"}}
        ).encode(),
    },
    "floats of 4, 6 and 8 bits": {
        "model.safetensors": file_of(
            zeros(
                a=("F4", 4, [4, 6]),
                b=("F6_E2M3", 6, [8]),
                c=("F6_E3M2", 6, [2, 4]),
                d=("F8_E8M0", 8, [3]),
            )
        )
    },
    "experts of MiniMax M2": {
        "model.safetensors": file_of(minimax()),
        "config.json": b'{"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}',
    },
    "gpt-oss of MLX with two types": {
        "model.safetensors": file_of(mixed_gpt_oss(), {"format": "mlx"}),
        "config.json": json.dumps(
            {
                "quantization": {
                    "group_size": 32,
                    "bits": 4,
                    "mode": "mxfp4",
                    "model.layers.0.self_attn.q_proj": {"group_size": 64, "bits": 8},
                }
            }
        ).encode(),
    },
    "layers that share keys and values": {
        "model.safetensors": file_of(shared_keys()),
        "config.json": b'{"text_config": {"num_hidden_layers": 2, "num_kv_shared_layers": 1}}',
    },
    "symmetric integers": {
        "model.safetensors": file_of(
            {
                **packed_weight("q").tensors,
                **weights("norm"),
                **packed_weight(f"{EXPERT}.0.up_proj", shape_type="I32").tensors,
                **packed_weight(f"{EXPERT}.1.up_proj", shape_type="I32").tensors,
                **packed_weight("k", bits=8, group=64, scale="F16").tensors,
            }
        ),
        "config.json": json.dumps(
            packed_config({}, {"num_bits": 8, "strategy": "channel"})
        ).encode(),
    },
}


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a folder with the files of one of the sources."""
    folder = tmp_path / "source"
    for name, data in SOURCES[request.param].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def single(tmp_path: Path, name: str = "model.safetensors", tensors: str = "a b") -> Path:
    path = tmp_path / "source" / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file_of(weights(tensors), {"format": "pt"}))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_every_file_comes_back(
    source: Path, experts: Any, is_frozen: bool, store: LocalStore, tmp_path: Path
) -> None:
    expected = contents(source)
    create(source, NAME, store=store, experts=experts)
    shutil.rmtree(source)
    if is_frozen:
        freeze_models([NAME], store=store)
    collect_garbage(store=store, older_than=0, force=True)
    exported = export_model(NAME, tmp_path / "out", store=store)
    assert exported.is_original
    assert contents(tmp_path / "out") == expected
    assert exported.bytes_written == sum(map(len, expected.values()))
    assert verify_models(store=store).faults == ()


def test_experts_of_minimax_keep_their_types(store: LocalStore, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(minimax()))
    create(tmp_path, NAME, store=store)
    types = {
        row.name.rpartition("moe.")[2]: (row.type, row.group_size)
        for row in describe_model(NAME, store=store).tensors
    }
    assert types == {
        **{
            f"experts.{index}.w{part}.weight": ("fp8", 128)
            for index in range(2)
            for part in (1, 2, 3)
        },
        "gate.weight": ("F32", 0),
        "e_score_correction_bias": ("F32", 0),
    }


def altered(data: bytes) -> bytes:
    """Return a safetensors file with the same header and slightly different tensors."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[:end] + bytes(byte ^ (place % 9 == 0) for place, byte in enumerate(data[end:]))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["packed", "stacked"])
@pytest.mark.parametrize("model", ["moe", "ct-nvfp4"])
def test_files_come_back_from_deltas_in_another_store(
    model: str, experts: Any, store: LocalStore, tmp_path: Path
) -> None:
    create(DATA / model, "base", store=store, experts=experts)
    source = shutil.copytree(DATA / model, tmp_path / "source")
    for path in source.glob("*.safetensors"):
        path.write_bytes(altered(path.read_bytes()))
    create(source, NAME, store=store, experts=experts)
    frozen = freeze_models(["base", NAME], store=store, level="small")
    assert frozen.bases
    pack_models(["base", NAME], tmp_path / "both.bsar", store=store)
    second = LocalStore(tmp_path / "second")
    unpack_archive(tmp_path / "both.bsar", store=second)
    remove_models(["base"], store=second)
    collect_garbage(store=second, older_than=0)
    for number, it in enumerate((store, second)):
        out = tmp_path / f"out{number}"
        assert export_model(NAME, out, store=it).is_original
        assert contents(out) == contents(source)
    assert verify_models(store=second).faults == ()


@pytest.mark.parametrize("model", ["dense", "moe", "odd", "mlx-mode", "ct-nvfp4"])
@pytest.mark.parametrize("experts", ["packed", "stacked"])
def test_the_golden_folders_come_back(
    model: str, experts: Any, store: LocalStore, tmp_path: Path
) -> None:
    create(DATA / model, NAME, store=store, experts=experts)
    assert export_model(NAME, tmp_path / "out", store=store).is_original
    assert contents(tmp_path / "out") == contents(DATA / model)


@pytest.mark.parametrize(
    "name", ["my weights (v2).safetensors", "модель.safetensors", "-x.safetensors"]
)
def test_a_single_file_keeps_its_name(name: str, store: LocalStore, tmp_path: Path) -> None:
    path = single(tmp_path, name)
    create(path, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    assert contents(tmp_path / "out") == {name: path.read_bytes()}


def test_a_name_that_a_terminal_would_obey_is_not_kept(store: LocalStore, tmp_path: Path) -> None:
    created = create(single(tmp_path, "a\x1b[2J.safetensors"), NAME, store=store)
    (notice,) = created.notices
    assert notice == (
        "export will write new weight files: 'a\\x1b[2J.safetensors' has a backslash or characters "
        "that cannot be printed"
    )
    assert not export_model(NAME, tmp_path / "out", store=store).is_original
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


def test_equal_sources_have_equal_manifests(store: LocalStore, tmp_path: Path) -> None:
    first = single(tmp_path).parent
    second = shutil.copytree(first, tmp_path / "elsewhere")
    os.utime(second / "model.safetensors", (0, 0))
    create(first, "a", store=store)
    create(second, "b", store=store)
    assert store.read_manifest("a") == store.read_manifest("b")


def test_an_exported_folder_makes_the_same_manifest(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path).parent, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store)
    create(tmp_path / "out", "again", store=store)
    assert store.read_manifest("again") == store.read_manifest(NAME)


@pytest.mark.parametrize("options", [{"quantize": "int4"}, {"quantize": "int8", "group_size": 32}])
def test_converted_tensors_are_exported_to_new_files(
    options: Any, store: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {"model.layers.0.mlp.up_proj.weight": ("F32", [64, 64], bytes(4 * 64 * 64))}
    (folder / "weird name.safetensors").write_bytes(file_of(tensors))
    create(folder, NAME, store=store, **grouped(options))
    record = read_source_record(store, store.resolve(NAME))
    assert record is not None
    assert record.is_converted
    assert record.options == options
    assert not export_model(NAME, tmp_path / "out", store=store).is_original
    assert "model.safetensors" in contents(tmp_path / "out")


def test_tensors_that_the_index_does_not_name_are_not_exported(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = single(tmp_path).parent
    (folder / "model.safetensors.index.json").write_bytes(index_of(model="a"))
    create(folder, NAME, store=store, source_options=SourceOptions(ignore_unindexed=True))
    assert not export_model(NAME, tmp_path / "out", store=store).is_original


def test_an_index_of_weights_that_are_left_out_is_left_out(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = single(tmp_path).parent
    (folder / "model.fp16.safetensors").write_bytes(file_of(weights("a b", 32)))
    index = folder / "model.fp16.safetensors.index.json"
    index.write_bytes(index_of(**{"model.fp16": "a b"}))
    created = create(
        folder, NAME, store=store, source_options=SourceOptions(weights="model.safetensors")
    )
    assert f"left out: '{index}'; choose other weights with --weights" in created.notices
    assert export_model(NAME, tmp_path / "out", store=store).is_original
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


def test_an_index_that_is_kept_comes_back_once(store: LocalStore, tmp_path: Path) -> None:
    folder = single(tmp_path).parent
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": {}}')
    expected = contents(folder)
    create(folder, NAME, store=store, source_options=SourceOptions(keep=("*.json",)))
    assert [layer.name for layer in store.resolve(NAME).layers_of(media_types.FILE)] == []
    export_model(NAME, tmp_path / "out", store=store)
    assert contents(tmp_path / "out") == expected


def test_an_index_that_cannot_be_written_is_left_out(store: LocalStore, tmp_path: Path) -> None:
    folder = single(tmp_path).parent
    (folder / "other.safetensors.index.json").mkdir()
    (folder / "a\x1b[2J.safetensors.index.json").write_bytes(b"{}")
    created = create(folder, NAME, store=store)
    unusable = [it for it in created.notices if it.endswith("not a file that an export can write")]
    assert len(unusable) == 2
    assert export_model(NAME, tmp_path / "out", store=store).is_original
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


def test_an_index_of_checkpoints_that_are_left_out_is_left_out(
    store: LocalStore, tmp_path: Path
) -> None:
    folder = single(tmp_path).parent
    for name in ("pytorch_model.bin.index.json", "pytorch_model.bin"):
        (folder / name).write_bytes(b"{}")
    created = create(folder, NAME, store=store)
    assert any("pytorch_model.bin.index.json" in notice for notice in created.notices)
    export_model(NAME, tmp_path / "out", store=store)
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


@pytest.mark.slow
def test_a_header_of_the_largest_size_comes_back(store: LocalStore, tmp_path: Path) -> None:
    path = single(tmp_path)
    short = file_of(weights("a b"))
    path.write_bytes(file_of(weights("a b"), padding=100_000_000 + 8 + 128 - len(short)))
    assert int.from_bytes(path.read_bytes()[:8], "little") == 100_000_000
    assert create(path, NAME, store=store).notices == ()
    assert verify_models(store=store).faults == ()
    export_model(NAME, tmp_path / "out", store=store)
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("options", [{}, {"quantize": "int4"}])
def test_headers_that_are_too_large_are_not_recorded(
    options: Any, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "MAX_NEW_SIZE", 1000)
    folder = tmp_path / "source"
    folder.mkdir()
    tensors = {"a.weight": ("F32", [64, 64], bytes(4 * 64 * 64))}
    (folder / "model.safetensors").write_bytes(file_of(tensors, padding=1000))
    (folder / "model.safetensors.index.json").write_bytes(index_of(model="a.weight"))
    created = create(folder, NAME, store=store, **grouped(options))
    expected = "export will write new weight files: the headers and indexes of the weight files are over 0 MiB"
    assert created.notices == (() if options else (expected,))
    assert verify_models(store=store).faults == ()
    assert not export_model(NAME, tmp_path / "out", store=store).is_original
    assert set(contents(tmp_path / "out")) - {"config.json"} == {"model.safetensors"}


def test_scales_that_are_too_large_are_not_recorded(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_module, "_MAX_LEFT_OUT", 1)
    saved(store, tmp_path, "packed weights and input scales")
    assert not export_model(NAME, tmp_path / "out", store=store).is_original
    assert verify_models(store=store).faults == ()


@pytest.mark.parametrize("options", [{"single": True}, {"shard_size": 1000}, {"dequantize": True}])
def test_another_layout_can_be_chosen(options: Any, store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path, "odd.safetensors"), NAME, store=store)
    assert not export_model(NAME, tmp_path / "out", store=store, **options).is_original
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


def test_a_single_file_has_no_shard_size(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path), NAME, store=store)
    with pytest.raises(UsageError, match="--single or --shards"):
        export_model(NAME, tmp_path / "out", store=store, single=True, shard_size=5)


def test_a_model_of_an_earlier_version_is_exported_as_before(
    store: LocalStore, tmp_path: Path
) -> None:
    create(single(tmp_path, "odd.safetensors"), NAME, store=store)
    remove_layers(store, media_types.SOURCE)
    assert not export_model(NAME, tmp_path / "out", store=store).is_original
    assert list(contents(tmp_path / "out")) == ["model.safetensors"]


# Digests of whole files


def record_digest(store: LocalStore, digest: Digest) -> None:
    """Record a digest for all weight files of model ``m``, as an import from the Hub does."""
    change(store, lambda it: replace(it, files=tuple(f._replace(sha256=digest) for f in it.files)))


def change(store: LocalStore, edit: Callable[[SourceRecord], SourceRecord]) -> None:
    """Replace the record of model ``m``."""
    record = read_source_record(store, store.resolve(NAME))
    assert record is not None
    remove_layers(store, media_types.SOURCE)
    add_layers(store, (media_types.SOURCE, "", edit(record).to_bytes()))


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("kind", ["a single file", "packed weights and input scales", "experts"])
def test_files_are_compared_with_the_digests_of_the_hub(
    kind: str, is_frozen: bool, store: LocalStore, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, data in SOURCES[kind].items():
        (folder / name).write_bytes(data)
    create(folder, NAME, store=store)
    data = SOURCES[kind]["model.safetensors"]
    record_digest(store, Digest(hashlib.sha256(data).hexdigest()))
    if is_frozen:
        freeze_models([NAME], store=store)
    export_model(NAME, tmp_path / "out", store=store)
    assert contents(tmp_path / "out") == SOURCES[kind]


def test_a_file_with_another_digest_is_damage(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path), NAME, store=store)
    record_digest(store, Digest.of(b"other"))
    with pytest.raises(BlobDamaged, match="has digest sha256:.*although all blobs are intact"):
        export_model(NAME, tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("is_known", [False, True])
def test_a_damaged_blob_is_named(is_known: bool, store: LocalStore, tmp_path: Path) -> None:
    path = single(tmp_path)
    create(path, NAME, store=store)
    if is_known:
        record_digest(store, Digest.of(path.read_bytes()))
    flip(blob_path(store, "b"))
    with pytest.raises(BlobDamaged, match=r"layer 'b': blob .* is damaged"):
        export_model(NAME, tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()


# Forged records


def renamed(name: str) -> Callable[[RecordedFile], RecordedFile]:
    return lambda file: file._replace(name=name)


def with_header(data: bytes, size: int | None = None) -> Callable[[RecordedFile], RecordedFile]:
    """Return an edit that replaces the header by that of a file, of ``size`` bytes."""
    end = 8 + int.from_bytes(data[:8], "little")
    return lambda file: file._replace(start=data[:end], size=len(data) if size is None else size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (renamed("../../evil.safetensors"), "must not be the name of a file"),
        (renamed("/evil.safetensors"), "must not be the name of a file"),
        (renamed("config.json"), "two files would both be 'config.json'"),
        (renamed("sub/model.safetensors"), "no blob has the 64 bytes of tensor 'sub/a'"),
        (with_header(file_of(weights("a b c"))), "no blob has the 64 bytes of tensor 'c'"),
        (with_header(file_of(weights("a b", 32))), "no blob has the 32 bytes of tensor 'a'"),
        (with_header(file_of(weights("a b")), 10**15), "trailing bytes"),
        (with_header(file_of(weights("a b")), 200), "cut short"),
        (lambda file: file._replace(start=file.start[:-1]), "bytes of a header of"),
        (lambda file: file._replace(start=b""), "too short"),
        (lambda file: file._replace(start=b"\xff" * 8), "over the limit"),
        (lambda file: file._replace(start=file.start + b"x"), "bytes of a header of"),
        (lambda file: file._replace(start=file.start.replace(b'"a"', b'"b"')), "twice|repeated"),
    ],
)
def test_a_forged_record_is_damage(
    edit: Callable[[RecordedFile], RecordedFile], message: str, store: LocalStore, tmp_path: Path
) -> None:
    path = single(tmp_path)
    (path.parent / "config.json").write_bytes(b"{}")
    create(path.parent, NAME, store=store)
    change(store, lambda record: replace(record, files=tuple(map(edit, record.files))))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(Damaged, match=message):
        export_model(NAME, tmp_path / "out", store=store)
    (fault,) = verify_models(store=store).faults
    assert fault.layer == media_types.SOURCE
    assert {p for p in tmp_path.rglob("*") if store.root not in p.parents} <= set(before)


def saved(store: LocalStore, tmp_path: Path, kind: str, **options: Any) -> None:
    """Import one of the sources as model ``m``."""
    folder = tmp_path / "source"
    for name, data in SOURCES[kind].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    create(folder, NAME, store=store, **grouped(options))


def assert_damaged(store: LocalStore, tmp_path: Path, message: str) -> None:
    """Check that ``export`` and ``verify`` report the record of model ``m``."""
    with pytest.raises(BlobDamaged, match=message):
        export_model(NAME, tmp_path / "out", store=store)
    assert not (tmp_path / "out").exists()
    (fault,) = verify_models(store=store).faults
    assert fault.layer == media_types.SOURCE
    assert re.search(message, fault.message)


@pytest.mark.parametrize(
    ("kind", "stored_names", "name"),
    [
        ("a single file", {"a": "b", "b": "a"}, "b"),
        (
            "experts",
            {f"{EXPERT}.0.up_proj.weight": f"{EXPERT}.1.up_proj.weight"},
            "0.up_proj.weight",
        ),
        ("packed weights and input scales", {"q.weight_packed": "k.weight"}, "q.weight_packed"),
        ("packed weights and input scales", {"q.weight_scale": "k.weight.scale"}, "q.weight_scale"),
        ("packed weights and input scales", {"norm": "k.weight"}, "norm"),
    ],
)
def test_a_record_cannot_exchange_tensors(
    kind: str, stored_names: dict[str, str], name: str, store: LocalStore, tmp_path: Path
) -> None:
    saved(store, tmp_path, kind)
    both = stored_names | {new: old for old, new in stored_names.items()}
    change(store, lambda it: replace(it, stored_names={**it.stored_names, **both}))
    assert_damaged(store, tmp_path, f"no blob has the [0-9]+ bytes of tensor '[^']*{name}'")


@pytest.mark.parametrize("changed", [("I32", [16]), ("F16", [32]), ("F32", [4, 4]), ("U8", [64])])
def test_a_record_cannot_change_types_and_shapes(
    changed: tuple[str, list[int]], store: LocalStore, tmp_path: Path
) -> None:
    create(single(tmp_path), NAME, store=store)
    tensors = {name: (*changed, data) for name, (_, _, data) in weights("a b").items()}
    edit = with_header(file_of(tensors))
    change(store, lambda record: replace(record, files=tuple(map(edit, record.files))))
    shown = re.escape(f"{changed[0]} of shape {changed[1]}")
    assert_damaged(store, tmp_path, f"no blob has the 64 bytes of tensor 'a', {shown}")


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ({"q.weight_global_scale": b"\0\0\x80?"}, "'q.weight_global_scale', which a blob has too"),
        ({"q.weight_global_scale": b"\0"}, "'q.weight_global_scale', which a blob has too"),
        ({"norm": bytes(64)}, "'norm', which a blob has too"),
        ({"q.input_global_scale": b""}, "'q.input_global_scale', which imports store"),
    ],
)
def test_a_record_cannot_hold_other_values_than_the_blobs(
    left_out: dict[str, bytes], message: str, store: LocalStore, tmp_path: Path
) -> None:
    saved(store, tmp_path, "packed weights and input scales")
    change(store, lambda it: replace(it, left_out={**it.left_out, **left_out}))
    assert_damaged(store, tmp_path, message)


@pytest.mark.parametrize("shape", [(6, 128), (12, 32), (64, 6), (6, 32)])
def test_a_record_cannot_hold_another_shape_of_a_packed_weight(
    shape: tuple[int, int], store: LocalStore, tmp_path: Path
) -> None:
    saved(store, tmp_path, "symmetric integers")
    lengths = b"".join(length.to_bytes(8, "little") for length in shape)
    change(store, lambda it: replace(it, left_out={**it.left_out, "q.weight_shape": lengths}))
    assert_damaged(store, tmp_path, "'q.weight_shape', which imports store")


def test_a_record_cannot_hold_the_shape_of_no_packed_weight(
    store: LocalStore, tmp_path: Path
) -> None:
    saved(store, tmp_path, "symmetric integers")
    with_shape = {**packed_weight("q").tensors, "norm.weight_shape": ("I64", [2], bytes(16))}
    edit = with_header(file_of(with_shape))
    left_out = {"norm.weight_shape": bytes(16)}
    change(
        store,
        lambda it: replace(
            it, files=tuple(map(edit, it.files)), left_out={**it.left_out, **left_out}
        ),
    )
    assert_damaged(store, tmp_path, "'norm.weight_shape', which imports store")


def test_a_damaged_global_scale_is_a_fault_of_its_blob(store: LocalStore, tmp_path: Path) -> None:
    saved(store, tmp_path, "packed weights and input scales")
    flip(blob_path(store, "q.weight"), -1)
    with pytest.raises(BlobDamaged, match="layer 'q.weight': blob .*damaged"):
        export_model(NAME, tmp_path / "out", store=store)


def test_a_record_cannot_add_tensors(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path), NAME, store=store)
    edit = with_header(file_of(weights("a b c")))
    change(
        store,
        lambda it: replace(it, files=tuple(map(edit, it.files)), left_out={"c": bytes(64)}),
    )
    assert_damaged(store, tmp_path, "'c', which imports store")


def test_a_record_cannot_hide_a_tensor_behind_a_scale(store: LocalStore, tmp_path: Path) -> None:
    saved(store, tmp_path, "packed weights and input scales")
    tensors = {**scaled("q"), **scaled("k")}
    edit = with_header(file_of(tensors))
    change(
        store,
        lambda it: replace(
            it,
            files=tuple(map(edit, it.files)),
            stored_names={**it.stored_names, "q.input_global_scale": "norm"},
        ),
    )
    assert_damaged(store, tmp_path, "'q.input_global_scale', which a blob has too")


@pytest.mark.parametrize(
    "edit",
    [
        lambda names: names[::-1],
        lambda names: [names[0]] * len(names),
        lambda names: [name.replace("experts.1.", "other.1.") for name in names],
        lambda names: [name.replace("experts.1.", "experts.x.") for name in names],
    ],
)
def test_a_list_of_stacks_cannot_exchange_experts(
    edit: Callable[[list[str]], list[str]], store: LocalStore, tmp_path: Path
) -> None:
    saved(store, tmp_path, "experts", experts="stacked")
    manifest = store.resolve(NAME)
    ((name, sources),) = read_stacks(store, manifest).items()
    record = read_source_record(store, manifest)
    assert record is not None
    forged = json.dumps({name: edit(sources)}).encode()
    remove_layers(store, media_types.STACKS)
    add_layers(store, (media_types.STACKS, "", forged), (media_types.SOURCE, "", record.to_bytes()))
    with pytest.raises(BlobDamaged, match="not its experts in order"):
        export_model(NAME, tmp_path / "out", store=store)
    (fault,) = verify_models(store=store).faults
    assert "not its experts in order" in fault.message


def test_a_tensor_that_two_files_claim_is_damage(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path), NAME, store=store)
    change(
        store,
        lambda record: replace(
            record, files=(*record.files, record.files[0]._replace(name="other.safetensors"))
        ),
    )
    with pytest.raises(BlobDamaged, match="'other.safetensors': no blob has"):
        export_model(NAME, tmp_path / "out", store=store)


def test_a_tensor_that_the_record_and_a_blob_hold_is_damage(
    store: LocalStore, tmp_path: Path
) -> None:
    create(single(tmp_path), NAME, store=store)
    change(store, lambda record: replace(record, left_out={"a": bytes(64)}))
    with pytest.raises(BlobDamaged, match="it holds tensor 'a', which a blob has too"):
        export_model(NAME, tmp_path / "out", store=store)


def test_a_second_record_is_damage(store: LocalStore, tmp_path: Path) -> None:
    create(single(tmp_path), NAME, store=store)
    add_layers(store, *((media_types.SOURCE, "", data) for data in (b"{}", b"{ }")))
    with pytest.raises(BlobDamaged, match="2 source layers"):
        export_model(NAME, tmp_path / "out", store=store)


def scaled_fp8() -> Tensors:
    return {
        "a.weight": ("F8_E4M3", [4, 4], bytes(range(40, 56))),
        "a.scale_weight": ("F32", [], struct.pack("<f", 0.25)),
        "a.scale_input": ("F32", [], struct.pack("<f", 3)),
        "scaled_fp8": ("F8_E4M3", [0], b""),
    }


def deepseek_v4() -> Tensors:
    return {
        "layers.0.attn.wq_a.weight": ("F8_E4M3", [128, 128], bytes([56]) * 128 * 128),
        "layers.0.attn.wq_a.scale": ("F8_E8M0", [1, 1], bytes([120])),
        "layers.0.ffn.experts.0.w1.weight": ("I8", [64, 64], bytes(range(256)) * 16),
        "layers.0.ffn.experts.0.w1.scale": ("F8_E8M0", [64, 4], bytes([121]) * 256),
    }


def blocks_of_rows() -> Tensors:
    """As musubi-tuner writes them: [rows, blocks, 1]."""
    return {
        "a.weight": ("F8_E4M3", [2, 6], bytes(range(40, 52))),
        "a.scale_weight": ("F32", [2, 2, 1], struct.pack("<4f", 0.25, 3, 0.1, 7)),
    }


V4 = {
    "expert_dtype": "fp4",
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
MARKER = b'{"format": "float8_e4m3fn"}'
NAMED_AFTER_MODULES: dict[str, tuple[Tensors, Any]] = {
    "marked by ComfyUI": (
        {**scaled_fp8(), "a.comfy_quant": ("U8", [len(MARKER)], MARKER)},
        {},
    ),
    "ComfyUI": (scaled_fp8(), {}),
    "musubi-tuner": (blocks_of_rows(), {}),
    "DeepSeek V4": (deepseek_v4(), V4),
}


@pytest.mark.parametrize("kind", NAMED_AFTER_MODULES)
def test_scales_that_are_named_after_modules_keep_their_names(
    kind: str, tmp_path: Path, store: LocalStore
) -> None:
    tensors, config = NAMED_AFTER_MODULES[kind]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes(file_of(tensors, {"format": "pt"}))
    create(source, NAME, store=store)
    with blobstore.open(NAME, store=store) as model:
        assert model.quantized
    export_model(NAME, tmp_path / "same", store=store)
    assert contents(tmp_path / "same") == contents(source)
    for folder in ("shards", "links"):
        if folder == "links":
            link_model(NAME, tmp_path / folder, store=store)
        else:
            export_model(NAME, tmp_path / folder, store=store, shard_size=1)
        assert raw_tensors(tmp_path / folder) == raw_tensors(source)
        assert contents(tmp_path / folder)["config.json"] == contents(source)["config.json"]


def test_values_of_scales_that_are_named_after_modules(tmp_path: Path, store: LocalStore) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(scaled_fp8()))
    create(path, NAME, store=store)
    codes = np.arange(40, 56, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = (codes * np.float32(0.25)).reshape(4, 4)
    with blobstore.open(NAME, store=store, dequantize=True) as model:
        assert model["a.weight"].astype(np.float32).tolist() == expected.tolist()
    create(path, NAME, store=store, decode=True)
    with blobstore.open(NAME, store=store) as model:
        assert model["a.weight"].astype(np.float32).tolist() == expected.tolist()


@pytest.mark.parametrize("framework", ["numpy", "torch", "mlx"])
def test_values_of_blocks_of_rows(framework: Any, tmp_path: Path, store: LocalStore) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(blocks_of_rows()))
    create(path, NAME, store=store)
    codes = np.arange(40, 52, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    scales = np.array([[0.25], [3], [0.1], [7]], np.float32)
    expected = (codes.reshape(4, 3) * scales).reshape(2, 6)
    with blobstore.open(NAME, store=store, framework=framework) as model:
        assert model.dequantized("a.weight", "float32").tolist() == expected.tolist()
    plain = expected.astype(ml_dtypes.bfloat16).astype(np.float32)
    with blobstore.open(NAME, store=store, framework=framework, dequantize=True) as model:
        for index in ((slice(1, 2), slice(2, 5)), (0, 5), slice(None)):
            assert model.get_slice("a.weight")[index].tolist() == plain[index].tolist()
    create(path, NAME, store=store, decode=True)
    with blobstore.open(NAME, store=store) as model:
        assert model["a.weight"].astype(np.float32).tolist() == plain.tolist()


def test_a_dequantized_folder_has_no_markers(tmp_path: Path, store: LocalStore) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(NAMED_AFTER_MODULES["marked by ComfyUI"][0]))
    create(path, NAME, store=store)
    export_model(NAME, tmp_path / "out", store=store, dequantize=True)
    assert set(raw_tensors(tmp_path / "out")) == {"a.weight"}


def test_values_of_the_experts_of_deepseek_v4(tmp_path: Path, store: LocalStore) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(V4))
    (source / "model.safetensors").write_bytes(file_of(deepseek_v4()))
    create(source, NAME, store=store)
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    packed = np.frombuffer(bytes(range(256)) * 16, np.uint8).reshape(64, 64)
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(64, 128)
    expected = np.where(codes > 7, -1, 1) * grid[codes & 7] * np.float32(2.0 ** (121 - 127))
    with blobstore.open(NAME, store=store, dequantize=True) as model:
        found = model["layers.0.ffn.experts.0.w1.weight"].astype(np.float32)
    assert found.tolist() == expected.tolist()
    export_model(NAME, tmp_path / "out", store=store, dequantize=True)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {}
