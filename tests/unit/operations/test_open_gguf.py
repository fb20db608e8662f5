"""Models in GGUF files, opened where they lie."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    ModelNotFound,
    SourceNotFound,
    UnsupportedDType,
    UsageError,
)
from blobstore.gguf.dequantize import dequantize
from blobstore.gguf.header import InvalidGguf, parse_header
from blobstore.manifests import media_types
from blobstore.objects.source import ObjectSource
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.open import Verify
from blobstore.operations.transfer.push import push_model
from blobstore.store.local import LocalStore
from tests.support.damage import flip
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.ollama_store import F32, GGUF_FILE, Q8_0, add_gguf_model, q8_0

NAMES = ["token_embd.weight", "output_norm.weight", "blk.0.ffn_gate_exps.weight"]
QUANTIZED = [NAMES[0], NAMES[2]]


@pytest.fixture
def store(store: LocalStore) -> LocalStore:
    add_gguf_model(store, "m")
    store.folder("headers").mkdir(parents=True)
    return store


def gguf_path(store: LocalStore) -> Path:
    (layer,) = store.resolve("m").layers_of(media_types.MODEL)
    return Path(store.blob_path(layer.digest))


def stored(content: bytes = GGUF_FILE) -> Mapping[str, bytes]:
    """Return the bytes of the tensors of a file."""
    tensors = parse_header(content, len(content)).tensors.values()
    return {tensor.name: content[tensor.begin : tensor.begin + tensor.size] for tensor in tensors}


def values(name: str) -> Any:
    """Return the weights that a tensor of the file stands for."""
    data = np.frombuffer(stored()[name], np.uint8)
    if name == NAMES[1]:
        return data.view(np.float32)
    shape = (5, 64) if name == NAMES[0] else (2, 3, 32)
    return dequantize("Q8_0", data.reshape(*shape[:-1], -1)).reshape(shape)


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_tensors_are_the_bytes_of_the_file(store: LocalStore, read: Any) -> None:
    with blobstore.open("m", store=store, read=read) as model:
        assert list(model) == NAMES
        assert {name: model[name].tobytes() for name in model} == stored()
        assert model["output_norm.weight"].dtype == np.float32
        assert model["token_embd.weight"].shape == (5, 68)
        assert model["blk.0.ffn_gate_exps.weight"].shape == (2, 3, 34)
        assert model.quantized == dict.fromkeys(QUANTIZED, ("q8_0", 32))
        assert model.parameters == 5 * 64 + 64 + 2 * 3 * 32


def test_all_tensors_are_views_of_one_map(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        arrays = [model[name] for name in NAMES]
        begins = [
            tensor.begin for tensor in parse_header(GGUF_FILE, len(GGUF_FILE)).tensors.values()
        ]
        start = arrays[0].ctypes.data - begins[0]
        assert [array.ctypes.data - start for array in arrays] == begins


@pytest.mark.parametrize("framework", ["numpy", "torch", "mlx"])
def test_look_ups_dequantize(store: LocalStore, framework: Any) -> None:
    pytest.importorskip("mlx.core" if framework == "mlx" else framework)
    with blobstore.open("m", store=store, framework=framework, dequantize=True) as model:
        for name in NAMES:
            assert np.array_equal(np.asarray(model[name]), values(name))
        part = model.get_slice(NAMES[0])[1:4, 5:40]
        assert np.array_equal(np.asarray(part), values(NAMES[0])[1:4, 5:40])
        assert np.array_equal(np.asarray(model.get_slice(NAMES[2])[1]), values(NAMES[2])[1])


def test_blocks_are_sliced_as_they_are_stored(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        part = model.quantized_slice(NAMES[0], (slice(1, 3), slice(32, 64)))
        assert part.keys() == {NAMES[0]}
        assert np.array_equal(part[NAMES[0]], model[NAMES[0]][1:3, 34:])


def test_ranks_and_threads_get_each_tensor_once(store: LocalStore) -> None:
    with blobstore.open("m", store=store) as model:
        shards = [dict(model.iter_tensors(shard=(rank, 2))) for rank in range(2)]
        assert sorted([*shards[0], *shards[1]]) == sorted(NAMES)
        loaded = {name: array.tobytes() for name, array in model.prefetch(threads=2)}
        assert loaded == stored()


def test_a_type_that_is_not_known_is_bytes(store: LocalStore) -> None:
    add_gguf_model(store, "m", gguf_file(tensors=[("x", 99, (4,), bytes(range(64)))]))
    with blobstore.open("m", store=store) as model:
        assert model["x"].tobytes() == bytes(range(64))
        assert model.quantized == {}


def test_a_type_that_is_not_decoded_can_be_read_as_it_is_stored(store: LocalStore) -> None:
    q8_k = 15
    add_gguf_model(store, "m", gguf_file(tensors=[("x", q8_k, (256,), bytes(292))]))
    with blobstore.open("m", store=store) as model:
        assert model["x"].shape == (292,)
        with pytest.raises(UnsupportedDType, match="Q8_K"):
            model.dequantized("x")


def test_projectors_and_names_of_one_tensor_are_read_too(store: LocalStore) -> None:
    projector = gguf_file(tensors=[("data", F32, (2,), bytes(8))])
    add_gguf_model(store, "m", projector=projector)
    with blobstore.open("m", store=store) as model:
        assert list(model) == [*NAMES, "data"]
        assert model["data"].shape == (2,)


def test_two_tensors_of_one_name_are_an_error_that_names_the_layers(store: LocalStore) -> None:
    other = gguf_file(tensors=[(NAMES[0], Q8_0, (32, 1), q8_0(1, 32))])
    add_gguf_model(store, "m", projector=other)
    with pytest.raises(BlobDamaged, match=f"{media_types.MODEL}' and '{media_types.PROJECTOR}"):
        blobstore.open("m", store=store)


def test_the_header_index_says_where_the_tensors_are(store: LocalStore) -> None:
    blobstore.open("m", store=store).close()
    path = next(store.folder("headers").iterdir())
    flip(gguf_path(store), 0)  # nothing parses the header again
    with blobstore.open("m", store=store) as model:
        assert model["output_norm.weight"].tobytes() == stored()["output_norm.weight"]
    path.unlink()
    with pytest.raises(BlobDamaged):
        blobstore.open("m", store=store)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF", "the file ends at byte 4"),
        (GGUF_FILE[:-64], "download the complete file"),
        (b"\0" + GGUF_FILE[1:], "header of .* bytes"),
        (gguf_file(tensors=[("x", F32, (2**59,), b"")]), "the file ends at byte"),
    ],
    ids=["short", "truncated", "other format", "huge"],
)
def test_a_damaged_file_is_an_error_that_names_the_layer(
    store: LocalStore, content: bytes, message: str
) -> None:
    add_gguf_model(store, "m", content)
    with pytest.raises(BlobDamaged, match=rf"m:latest: layer '{media_types.MODEL}': .*{message}"):
        blobstore.open("m", store=store)
    (fault,) = verify_models(["m"], store=store).faults
    assert fault.layer == media_types.MODEL


@pytest.mark.parametrize("level", ["header", "digest", "rehash"])
def test_every_level_accepts_an_intact_file(store: LocalStore, level: Verify) -> None:
    blobstore.open("m", store=store, verify=level).close()
    assert verify_models(["m"], store=store).faults == ()


def test_damaged_weights_are_found_by_hashing(store: LocalStore) -> None:
    flip(gguf_path(store), len(GGUF_FILE) - 1)
    blobstore.open("m", store=store, verify="header").close()
    with pytest.raises(BlobDamaged, match=media_types.MODEL):
        blobstore.open("m", store=store, verify="rehash")
    (fault,) = verify_models(["m"], store=store).faults
    assert fault.layer == media_types.MODEL


def test_a_missing_file_is_an_error_that_names_the_layer(store: LocalStore) -> None:
    blobstore.open("m", store=store).close()
    gguf_path(store).unlink()
    with pytest.raises(BlobMissing, match=f"layer '{media_types.MODEL}'"):
        blobstore.open("m", store=store)


# Object storage


LARGE = gguf_file(
    tensors=[(f"t{number}", Q8_0, (1024, 256), q8_0(256, 1024, number)) for number in range(12)]
)


@pytest.fixture
def address(store: LocalStore, tmp_path: Path) -> str:
    """A model in object storage."""
    add_gguf_model(store, "large", LARGE)
    (tmp_path / "bucket").mkdir()
    push_model("large", f"file://{tmp_path}/bucket", store=store)
    return f"file://{tmp_path}/bucket/large"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each request for the file has asked for."""
    found: list[int] = []
    really_read = ObjectSource.read
    digest = Digest.of(LARGE)

    def count(self: ObjectSource, wanted: Digest, size: int, begin: int, end: int) -> object:
        if wanted == digest:
            found.append(end - begin)
        return really_read(self, wanted, size, begin, end)

    monkeypatch.setattr(ObjectSource, "read", count)
    return found


@pytest.mark.parametrize("dequantizes", [False, True])
def test_a_tensor_in_object_storage_is_read_by_ranges(
    address: str, read: list[int], tmp_path: Path, dequantizes: bool
) -> None:
    expected = stored(LARGE)
    size = len(expected["t0"])
    blocks = np.frombuffer(expected["t3"], np.uint8).reshape(256, -1)
    with blobstore.open(address, store=tmp_path / "other", dequantize=dequantizes) as model:
        assert sum(read) <= 2 << 20
        read.clear()
        assert np.array_equal(model["t3"], dequantize("Q8_0", blocks) if dequantizes else blocks)
        assert sum(read) == size
        read.clear()
        assert model.get_slice("t5")[:2].shape == ((2, 1024) if dequantizes else (2, 1088))
        assert sum(read) <= size // 64
        read.clear()
        assert [name for name, _ in model.prefetch({"t1": None, "t2": None})] == ["t1", "t2"]
        assert sum(read) == 2 * size


def test_a_complete_model_in_object_storage_is_verified_and_kept(
    address: str, read: list[int], tmp_path: Path
) -> None:
    other = LocalStore(tmp_path / "other")
    with blobstore.open(address, store=other) as model:
        found = {name: array.tobytes() for name, array in model.state_dict().items()}
    assert found == stored(LARGE)
    assert other.has(Digest.of(LARGE))
    read.clear()
    with blobstore.open(address, store=other) as model:
        assert model["t3"].tobytes() == stored(LARGE)["t3"]
    assert not read


@pytest.mark.parametrize("size", [1000, 100_000, 3_000_000])
def test_a_header_of_any_length_is_read_from_object_storage(
    store: LocalStore, tmp_path: Path, size: int
) -> None:
    content = gguf_file([("k", TEXT, text("v" * size))], [("x", F32, (64,), bytes(256))])
    add_gguf_model(store, "m", content)
    (tmp_path / "bucket").mkdir()
    push_model("m", f"file://{tmp_path}/bucket", store=store)
    for _ in range(2):  # from the file, and from the cache of headers
        with blobstore.open(
            f"file://{tmp_path}/bucket/m", store=tmp_path / "other", cache="none"
        ) as model:
            assert model["x"].shape == (64,)


def test_a_damaged_header_in_object_storage_names_the_layer(
    store: LocalStore, tmp_path: Path
) -> None:
    content = gguf_file(tensors=[("x", F32, (64,), bytes(256))], version=9)
    add_gguf_model(store, "m", content)
    (tmp_path / "bucket").mkdir()
    with pytest.raises(BlobDamaged, match=r"layer 'application/.*version 9 of GGUF is not read"):
        push_model("m", f"file://{tmp_path}/bucket", store=store)
        blobstore.open(f"file://{tmp_path}/bucket/m", store=tmp_path / "other")


# Files in no store


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "m.gguf"
    path.write_bytes(GGUF_FILE)
    return path


@pytest.mark.parametrize("spelled", ["m.gguf", "./m.gguf", "{}", "link.gguf", Path("m.gguf")])
def test_a_path_opens_the_file(file: Path, store: LocalStore, spelled: str | Path) -> None:
    Path("link.gguf").symlink_to(file)
    path = spelled.format(file) if isinstance(spelled, str) else spelled
    with blobstore.open(path, store=store) as model:
        assert {name: model[name].tobytes() for name in model} == stored()
        assert str(model.reference) == str(path)
        assert (model.config, model.files) == ({}, {})


@pytest.mark.parametrize("read", ["mmap", "pread"])
def test_a_file_has_all_ways_to_read_tensors(file: Path, read: Any) -> None:
    with blobstore.open(file, dequantize=True, read=read, verify="header") as model:
        copy = pickle.loads(pickle.dumps(model))
        for name in NAMES:
            assert np.array_equal(model[name], values(name))
            assert np.array_equal(copy[name], values(name))
        assert np.array_equal(model.get_slice(NAMES[0])[2:], values(NAMES[0])[2:])
        assert dict(model.prefetch()).keys() == set(NAMES)


def test_a_model_of_the_store_wins_over_a_file(file: Path, store: LocalStore) -> None:
    add_gguf_model(store, "m.gguf", gguf_file(tensors=[("of the store", F32, (1,), bytes(4))]))
    with blobstore.open("m.gguf", store=store) as model:
        assert list(model) == ["of the store"]
    with blobstore.open("./m.gguf", store=store) as model:
        assert list(model) == NAMES


def test_opening_a_file_writes_nothing(file: Path, store: LocalStore, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    blobstore.open(file, store=store).close()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, SourceNotFound, "m.gguf' cannot be opened: No such file"),
        (b"PK\3\4", InvalidGguf, "m.gguf' is not a GGUF file"),
        (GGUF_FILE[:-64], BlobDamaged, "m.gguf': .*download the complete file"),
    ],
)
def test_any_other_file_is_an_error_that_names_it(
    file: Path, content: bytes | None, error: type[Exception], message: str
) -> None:
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(error, match=message):
        blobstore.open(file)


def test_names_of_neither_a_model_nor_a_file_are_not_found(store: LocalStore) -> None:
    with pytest.raises(ModelNotFound):
        blobstore.open("none.gguf", store=store)


@pytest.mark.parametrize("level", ["digest", "rehash"])
def test_a_file_has_no_digest_to_verify(file: Path, level: Verify) -> None:
    with pytest.raises(UsageError, match="no digest"):
        blobstore.open(file, verify=level)
