"""GGUF files become blobs, and come back byte for byte."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import blobstore
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    DamagedSource,
    UnsupportedSource,
)
from blobstore.folders.original import plan_original
from blobstore.gguf.types import TYPES
from blobstore.manifests import media_types
from blobstore.manifests.source_record import Gap, SourceRecord
from blobstore.models.contents import ModelContents
from blobstore.models.source_layers import read_source_record
from blobstore.operations.create.create import create
from blobstore.operations.describe.info import model_info
from blobstore.operations.describe.show import describe_model
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization.formats import GGUF_TYPES
from blobstore.store.local import LocalStore
from tests.readers.gguf_models import read_files
from tests.support.gguf_files import TEXT, U32, Tensor, gguf_file, text
from tests.support.models import blob

ARCHITECTURE = ("general.architecture", TEXT, text("llama"))


def tensor(name: str, number: int, rows: int = 2, blocks: int = 2) -> Tensor:
    """Return a tensor of random blocks of a type."""
    kind = TYPES[number]
    data = np.random.default_rng(number).bytes(rows * blocks * kind.size)
    return name, number, (blocks * kind.weights, rows), data


def write(path: Path, data: bytes) -> Path:
    """Write a file, and return its path."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def exported(store: LocalStore, name: str, folder: Path) -> Mapping[str, bytes]:
    """Return the files that an export of a model writes."""
    export_model(name, folder, store=store)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("number", TYPES)
def test_a_tensor_of_every_type_comes_back(
    tmp_path: Path, store: LocalStore, out: Path, number: int
) -> None:
    name, _, shape, data = tensor("blk.0.x", number)
    content = gguf_file([ARCHITECTURE], [(name, number, shape, data)])
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    assert exported(store, "x", out) == {"x.gguf": content}
    assert verify_models(["x"], store=store).faults == ()
    (found,) = describe_model("x", store=store).tensors
    assert (found.name, found.shape) == (name, (2, shape[0]))
    kind = TYPES[number]
    if kind.weights == 1:
        assert (found.type, found.is_quantized) == (kind.name, False)
    else:
        assert (found.type, found.group_size) == (GGUF_TYPES[kind.name].name, kind.weights)
        with blobstore.open("x", store=store) as model:
            assert model[name].tobytes() == data
            assert model[name].shape == (2, 2 * kind.size)


def test_a_name_of_the_store_never_means_another_layout() -> None:
    """The store has types of these names, with other bytes."""
    assert GGUF_TYPES["MXFP4"].name == "gguf_mxfp4"
    assert GGUF_TYPES["NVFP4"].name == "gguf_nvfp4"
    assert GGUF_TYPES["Q4_K"].name == "q4_k"


def test_a_type_that_is_not_known_stays_opaque(
    tmp_path: Path, store: LocalStore, out: Path
) -> None:
    content = gguf_file([ARCHITECTURE], [("a", 142, (7, 3), b"x" * 64), tensor("b", 0)])
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    assert exported(store, "x", out) == {"x.gguf": content}
    found = {one.name: one for one in describe_model("x", store=store).tensors}
    assert (found["a"].type, found["a"].shape) == ("U8", (64,))


def test_padding_and_bytes_at_the_end_come_back(
    tmp_path: Path, store: LocalStore, out: Path
) -> None:
    tensors = [("a", 24, (3,), b"abc"), ("b", 24, (3,), b"def")]
    content = bytearray(gguf_file([ARCHITECTURE], tensors))
    at = content.index(b"abc")
    content[at + 3 : at + 32] = b"p" * 29
    for number, end in enumerate((b"", b"a tail", bytes(100_000))):
        whole = bytes(content) + end
        create(write(tmp_path / "x.gguf", whole), "x", store=store)
        assert exported(store, "x", out / str(number)) == {"x.gguf": whole}
    without_padding = bytes(content[: content.index(b"def") + 3])
    create(write(tmp_path / "x.gguf", without_padding), "y", store=store)
    assert exported(store, "y", out / "y") == {"x.gguf": without_padding}


def test_more_bytes_at_the_end_than_a_layer_holds_are_refused(
    tmp_path: Path, store: LocalStore
) -> None:
    content = gguf_file([ARCHITECTURE], [tensor("a", 0)]) + bytes(16 * 2**20 + 1)
    path = write(tmp_path / "x.gguf", content)
    with pytest.raises(
        UnsupportedSource, match="16777233 bytes follow the last tensor at byte 144"
    ):
        create(path, "x", store=store)


def test_more_bytes_between_tensors_than_a_layer_holds_are_refused(
    tmp_path: Path, store: LocalStore
) -> None:
    wide = 1 << 20
    alignment = ("general.alignment", U32, struct.pack("<I", wide))
    tensors = [(f"t{number}", 24, (3,), b"abc") for number in range(18)]
    content = gguf_file([ARCHITECTURE, alignment], tensors, alignment=wide)
    padded = content.replace(b"abc" + bytes(wide - 3), b"abc" + b"p" * (wide - 3))
    path = write(tmp_path / "x.gguf", padded)
    with pytest.raises(UnsupportedSource, match="more than 16 MiB between its tensors, up to byte"):
        create(path, "x", store=store)
    assert not store.has_model("x")


@pytest.mark.parametrize("alignment", [8, 32, 4096])
def test_files_of_any_alignment_come_back(
    tmp_path: Path, store: LocalStore, out: Path, alignment: int
) -> None:
    values = [ARCHITECTURE, ("general.alignment", U32, struct.pack("<I", alignment))]
    tensors = [("s", 0, (), b"1234"), tensor("a", 2), ("c", 26, (1,), b"5678"), tensor("b", 8)]
    content = gguf_file(values, tensors, alignment=alignment)
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    assert exported(store, "x", out) == {"x.gguf": content}


def test_a_vocabulary_without_tensors_comes_back(
    tmp_path: Path, store: LocalStore, out: Path
) -> None:
    content = gguf_file([ARCHITECTURE, ("tokenizer.ggml.model", TEXT, text("gpt2"))])
    create(write(tmp_path / "vocab.gguf", content), "x", store=store)
    assert exported(store, "x", out) == {"vocab.gguf": content}
    assert describe_model("x", store=store).architecture == "llama"


def part(number: int, count: int, total: int, *tensors: Tensor) -> bytes:
    """Return a part of a split file."""
    values = [
        ("split.no", 2, struct.pack("<H", number)),
        ("split.count", 2, struct.pack("<H", count)),
        ("split.tensors.count", 5, struct.pack("<i", total)),
    ]
    return gguf_file([ARCHITECTURE, *values] if not number else values, tensors)


def test_all_parts_of_a_split_file_are_one_model(
    tmp_path: Path, store: LocalStore, out: Path
) -> None:
    folder = tmp_path / "split"
    files = {
        "m-00001-of-00002.gguf": part(0, 2, 2, tensor("a", 8)),
        "m-00002-of-00002.gguf": part(1, 2, 2, tensor("b", 12)),
    }
    for name, content in files.items():
        write(folder / name, content)
    with pytest.raises(DamagedSource, match="is one of 2 parts of a model, and part 2 is not read"):
        create(folder / "m-00001-of-00002.gguf", "x", store=store)
    create(folder, "x", store=store)
    assert exported(store, "x", out) == files
    write(folder / "m-00002-of-00002.gguf", part(1, 2, 2, tensor("b", 12), tensor("c", 12)))
    with pytest.raises(DamagedSource, match="have 2 tensors, and they have 3"):
        create(folder, "x", store=store)


def test_a_second_reader_finds_the_files_in_a_store(tmp_path: Path, store: LocalStore) -> None:
    folder = tmp_path / "split"
    padded = bytearray(part(0, 2, 4, *(tensor(name, 8) for name in "abc")))
    padded[-1:] = b"a tail"
    files = {
        "m-00001-of-00002.gguf": bytes(padded),
        "m-00002-of-00002.gguf": part(1, 2, 4, ("d", 142, (3,), b"x" * 40)),
    }
    for name, content in files.items():
        write(folder / name, content)
    create(folder, "x", store=store)
    assert read_files(store.root, store.manifest_path("x").read_bytes()) == files


def test_a_projector_is_imported_with_its_model(
    tmp_path: Path, store: LocalStore, out: Path
) -> None:
    folder = tmp_path / "vision"
    files = {
        "m-Q8_0.gguf": gguf_file([ARCHITECTURE], [tensor("a", 8)]),
        "mmproj-F16.gguf": gguf_file(
            [("general.architecture", TEXT, text("clip"))], [tensor("v", 1)]
        ),
        "README.md": b"---\nlicense: mit\n---\n",
    }
    for name, content in files.items():
        write(folder / name, content)
    create(folder, "x", store=store)
    assert exported(store, "x", out) == files
    assert describe_model("x", store=store).architecture == "llama"


def test_a_header_says_what_a_config_would(tmp_path: Path, store: LocalStore) -> None:
    values = [
        ARCHITECTURE,
        ("general.license", TEXT, text("apache-2.0")),
        ("general.base_model.count", U32, struct.pack("<I", 1)),
        ("general.base_model.0.repo_url", TEXT, text("https://huggingface.co/org/base")),
    ]
    create(write(tmp_path / "x.gguf", gguf_file(values, [tensor("a", 8)])), "x", store=store)
    info = model_info("x", store=store)
    assert info.description.architecture == info.description.model_type == "llama"
    assert (info.license, info.bases) == ("apache-2.0", ("org/base",))


def test_equal_tensors_of_two_files_are_one_blob(tmp_path: Path, store: LocalStore) -> None:
    norm = tensor("output_norm.weight", 0)
    for name, number in (("a", 8), ("b", 12)):
        content = gguf_file([ARCHITECTURE], [norm, tensor("blk.0.ffn_up.weight", number)])
        create(write(tmp_path / f"{name}.gguf", content), name, store=store)
    blobs = [
        {layer.digest for layer in store.resolve(name).layers_of(media_types.TENSOR)}
        for name in "ab"
    ]
    assert len(blobs[0] & blobs[1]) == 1


@pytest.mark.parametrize("number", [0, 1, 30], ids=["F32", "F16", "BF16"])
def test_equal_tensors_of_a_safetensors_file_are_one_blob(
    tmp_path: Path, store: LocalStore, number: int
) -> None:
    one = tensor("output_norm.weight", number)
    create(write(tmp_path / "a.gguf", gguf_file([ARCHITECTURE], [one])), "a", store=store)
    same = blob((one[0], TYPES[number].name, tuple(one[2][::-1]), one[3]))
    create(write(tmp_path / "b.safetensors", same), "b", store=store)
    (layer,) = store.resolve("a").layers_of(media_types.TENSOR)
    assert store.resolve("b").layers_of(media_types.TENSOR) == (layer,)


def test_a_frozen_model_comes_back(tmp_path: Path, store: LocalStore, out: Path) -> None:
    content = gguf_file([ARCHITECTURE], [tensor("a", 14, 64, 8), tensor("n", 0, 4, 256)])
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    freeze_models(["x"], store=store)
    assert exported(store, "x", out) == {"x.gguf": content}


def test_a_folder_of_links_has_the_file(tmp_path: Path, store: LocalStore, out: Path) -> None:
    content = gguf_file([ARCHITECTURE], [tensor("a", 8), tensor("b", 0)])
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    link_model("x", out, store=store)
    assert (out / "x.gguf").read_bytes() == content


def test_values_are_those_of_the_blocks(tmp_path: Path, store: LocalStore, out: Path) -> None:
    scale, codes = np.float16(0.5).tobytes(), bytes(range(32))
    content = gguf_file([ARCHITECTURE], [("a", 8, (32, 1), scale + codes)])
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    expected = (np.arange(32, dtype=np.float32) / 2).reshape(1, 32)
    for framework in ("numpy", "torch"):
        with blobstore.open("x", store=store, framework=framework, dequantize=True) as model:
            assert np.array_equal(np.asarray(model["a"]), expected)
            assert np.array_equal(np.asarray(model.get_slice("a")[0, 3:9]), expected[0, 3:9])
    with pytest.raises(BlobstoreError, match="which no folder of safetensors files holds"):
        export_model("x", out, store=store, single=True)
    export_model("x", out, store=store, dequantize=True)
    found = blobstore.safetensors.numpy.load_file(out / "model.safetensors")
    assert np.array_equal(found["a"], expected)


def test_quantized_blocks_are_not_quantized_again(tmp_path: Path, store: LocalStore) -> None:
    content = gguf_file([ARCHITECTURE], [tensor("a", 8)])
    path = write(tmp_path / "x.gguf", content)
    with pytest.raises(UnsupportedSource, match="tensor 'a' is already quantized to q8_0"):
        create(path, "x", store=store, quantize=QuantizeOptions("int4"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file._replace(start=file.start[:-1]), "159 bytes of a header of 160"),
        (lambda file: file._replace(size=file.size - 1), "lacks the|no gap|ends at byte"),
        (lambda file: file._replace(size=2**62), "it lacks the"),
        (lambda file: file._replace(gaps=(Gap(3, b"x"),)), "it lacks the|has no gap"),
        (lambda file: file._replace(gaps=(*file.gaps, Gap(2**62, b"x"))), "has no gap"),
    ],
)
def test_a_forged_record_writes_no_file(
    tmp_path: Path, store: LocalStore, out: Path, change: object, message: str
) -> None:
    content = gguf_file([ARCHITECTURE], [tensor("a", 8), tensor("b", 12)]) + b"tail"
    create(write(tmp_path / "x.gguf", content), "x", store=store)
    record = read_source_record(store, store.resolve("x"))
    assert record is not None
    assert SourceRecord.from_bytes(record.to_bytes()) == record
    (file,) = record.files
    forged = SourceRecord(kind=record.kind, files=(change(file),))  # type: ignore[operator]
    with pytest.raises(BlobDamaged, match=message):
        plan_original(ModelContents(store, store.resolve("x"), record=forged))
