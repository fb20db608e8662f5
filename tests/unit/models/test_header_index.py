from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged
from blobstore.manifests.reference import Reference
from blobstore.models.header_index import load_index, write_index
from blobstore.store.local import LocalStore
from tests.support.models import add_blobs, blob, dense_tensors, moe_tensors, write_folder

WEIGHT = ("w", "U32", (2, 4), bytes(32))
SCALE = ("w.scale", "BF16", (2, 1), bytes(4))
BIAS = ("w.bias", "BF16", (2, 1), bytes(4))


@pytest.fixture
def store(store: LocalStore, tmp_path: Path) -> LocalStore:
    tensors = dense_tensors() | moe_tensors()
    blobstore.create(write_folder(tmp_path / "model", tensors), "tiny", store=store)
    return store


def manifest(store: LocalStore) -> bytes:
    return store.read_manifest(Reference.parse("tiny"))


def index_file(store: LocalStore) -> Path:
    return Path(store.folder("headers") / Digest.of(manifest(store)).hex)


def test_the_index_equals_the_headers(store: LocalStore) -> None:
    from_index = load_index(store, manifest(store))
    index_file(store).unlink()
    from_headers = load_index(store, manifest(store))
    assert (from_index.is_cached, from_headers.is_cached) == (True, False)
    assert from_index.blobs == from_headers.blobs
    assert {
        name: (dtype, tuple(shape), blob, begin)
        for name, (dtype, shape, blob, begin) in from_index.entries.items()
    } == from_headers.entries
    assert set(from_index.entries) == {*dense_tensors(), *moe_tensors()}


def test_every_location_is_that_of_the_tensor_in_its_blob(store: LocalStore) -> None:
    index = load_index(store, manifest(store))
    for name, array in (dense_tensors() | moe_tensors()).items():
        spec, slot, begin = index.location(name)
        assert spec == index.spec(name)
        assert index.nbytes(name) == array.nbytes
        assert spec.shape == array.shape
        digest, _ = index.blobs[slot]
        blob = Path(store.blob_path(digest)).read_bytes()
        assert blob[begin : begin + array.nbytes] == array.tobytes()


def test_writing_an_index_does_not_recreate_a_removed_store(store: LocalStore) -> None:
    data = manifest(store)
    index = load_index(store, data)
    shutil.rmtree(store.root)
    write_index(store, data, index)
    assert not store.root.exists()


def test_an_unproven_manifest_gets_no_index(store: LocalStore) -> None:
    index_file(store).unlink()
    Path(store.blob_path(store.resolve(Reference.parse("tiny")).config.digest)).unlink()
    index = load_index(store, manifest(store))
    assert not index.is_proven
    write_index(store, manifest(store), index)
    assert not index_file(store).exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "[",
        "[" * 100_000,
        "null",
        "{}",
        "[[], [], []]",
        "[{}, null, {}]",
        '[{}, [["/../../../../../../../../etc/passwd", 1]], {}]',
        '[{}, [["DIGEST", "1"]], {}]',
        '[{}, [["DIGEST", -1]], {}]',
        '[{"t": null}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32"]}, [["DIGEST", 8]], {}]',
        '[{}, [["' + "../" * 21 + 'x", 8]], {}]',
        '[{"t": ["F33", [1], 0, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", 1, 0, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [1.0], 0, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [-1, -1], 0, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [1], 1, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [1], -1, 0]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [1], 0, -4]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [1], 0, 5]}, [["DIGEST", 8]], {}]',
        '[{"t": ["F32", [3], 0, 0]}, [["DIGEST", 8]], {}]',
        '[{}, [["DIGEST", 8]], {"t": ["int4", 32]}]',
        '[{"t": ["U32", [1], 0, 0]}, [["DIGEST", 8]], {"t": ["int4", "32"]}]',
        '[{"t": ["U32", [1], 0, 0]}, [["DIGEST", 8]], {"t": [4, 32]}]',
        '[{"t": ["U32", [1], 0, 0]}, [["DIGEST", 8]], {"t": ["fp8", 0, 128]}]',
        '[{"t": ["U32", [1], 0, 0]}, [["DIGEST", 8]], {"t": ["fp8", 0, "tensor", "x"]}]',
    ],
)
def test_a_malformed_index_is_ignored_despite_its_checksum(store: LocalStore, text: str) -> None:
    key = Digest.of(manifest(store))
    data = text.replace("DIGEST", key.hex).encode()
    checksum = Digest.of(f"3 {key}\n".encode() + data)
    index_file(store).write_bytes(f"{checksum}\n".encode() + data)
    index = load_index(store, manifest(store))
    assert set(index.entries) == {*dense_tensors(), *moe_tensors()}
    assert not index.is_cached


def test_a_store_that_cannot_be_written_needs_no_index(store: LocalStore) -> None:
    index_file(store).unlink()
    store.folder("headers").rmdir()
    store.folder("headers").write_text("in the way")
    index = load_index(store, manifest(store))
    write_index(store, manifest(store), index)
    assert set(index.entries) >= set(dense_tensors())


def test_the_index_is_json_after_a_checksum_line_that_includes_the_manifest(
    store: LocalStore,
) -> None:
    first, _, rest = index_file(store).read_bytes().partition(b"\n")
    summed = f"3 {Digest.of(manifest(store))}\n".encode() + rest
    assert first.decode() == str(Digest.of(summed))
    tensors, blobs, quantized = json.loads(rest)
    assert quantized == {}
    assert tensors["scalar"][:2] == ["U8", []]
    assert all(len(spelled) == 64 for spelled, _ in blobs)


def test_a_quantized_weight_is_indexed_with_its_qparams_by_runtime_name(tmp_path: Path) -> None:
    quantized = blob(WEIGHT, SCALE, BIAS, quant_type="int4", group_size="32")
    plain = blob(("data", "U8", (1,), b"x"))
    store = LocalStore(tmp_path)
    add_blobs(store, "tiny", {"x": plain, "w": quantized})
    index = load_index(store, manifest(store))
    assert list(index.entries) == ["x", "w", "w_scale", "w_qbias"]
    assert [slot for _, _, slot, _ in index.entries.values()] == [0, 1, 1, 1]
    assert index.quantized == {"w": ("int4", 32)}


def test_8_bit_floats_and_their_scales_are_indexed_under_their_own_names(tmp_path: Path) -> None:
    weight, scale = ("w", "F8_E4M3", (2, 4), bytes(8)), ("w_scale_inv", "F32", (1, 2), bytes(8))
    store = LocalStore(tmp_path)
    add_blobs(store, "tiny", {"w": blob(weight, scale, quant_type="fp8", block_size="2x2")})
    fresh = load_index(store, manifest(store))
    assert list(fresh.entries) == ["w", "w_scale_inv"]
    assert fresh.quantized == {"w": ("fp8", 2, "2x2")}
    write_index(store, manifest(store), fresh)
    cached = load_index(store, manifest(store))
    assert cached.is_cached
    assert {name: tuple(known) for name, known in cached.quantized.items()} == fresh.quantized


@pytest.mark.parametrize(
    ("blobs", "message"),
    [
        (
            {"a": blob(("t", "U8", (1,), b"1")), "b": blob(("t", "U8", (1,), b"2"))},
            "tensor 't' is in two layers, 'a' and 'b'",
        ),
        (
            {"w": blob(WEIGHT, SCALE), "s": blob(("w_scale", "U8", (1,), b"x"))},
            "two tensors of the model would both be called 'w_scale'",
        ),
        (
            {"w": blob(WEIGHT, SCALE, BIAS, quant_type="int8")},
            "layer 'w': tensor 'w': int8 cannot have",
        ),
        ({"n": b"no header"}, "layer 'n': blob '.*': header"),
    ],
    ids=["one name", "one runtime name", "contradiction", "no header"],
)
def test_an_error_names_tensor_or_layer(
    tmp_path: Path, blobs: Mapping[str, bytes], message: str
) -> None:
    store = LocalStore(tmp_path)
    add_blobs(store, "tiny", blobs)
    with pytest.raises(BlobDamaged, match=f"^{message}"):
        load_index(store, manifest(store))
