"""Documents of arriving models are parsed only if there is memory for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core import limits, strict_json
from blobstore.core.limits import Crowded, Memory
from blobstore.errors import DamagedSource
from blobstore.serve import import_memory
from blobstore.serve.import_memory import ImportMemory
from tests.support.descriptors import open_files
from tests.support.gguf_files import gguf_file

INDEX = b'{"weight_map":{"a":"b.safetensors"}}'
COST = 2 * strict_json.memory_of(INDEX)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Memory for three indexes, of which a model may have two."""
    memory = Memory(3 * COST)
    monkeypatch.setattr(limits, "IMPORTS", memory)
    monkeypatch.setattr(limits, "IMPORT", 2 * COST)
    return memory


@pytest.fixture
def indexes(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{number}.json" for number in range(3)]
    for path in paths:
        path.write_bytes(INDEX)
    return paths


def test_a_document_is_held_once_until_the_model_is_imported(
    memory: Memory, indexes: list[Path]
) -> None:
    with ImportMemory() as held:
        for _ in range(5):
            held.hold(indexes[0])
        held.hold(indexes[1])
        assert memory.taken == 2 * COST
    assert memory.taken == 0
    with held:
        held.hold(indexes[0])
        assert memory.taken == COST


def test_a_model_with_too_many_documents_is_not_parsed(memory: Memory, indexes: list[Path]) -> None:
    held = ImportMemory()
    held.hold(indexes[0])
    held.hold(indexes[1])
    with pytest.raises(DamagedSource, match=r"2\.json.* it would take more than"):
        held.hold(indexes[2])
    assert memory.taken == 2 * COST


def test_a_model_is_refused_while_others_take_the_memory(indexes: list[Path]) -> None:
    first, second = ImportMemory(), ImportMemory()
    for path in indexes[:2]:
        first.hold(path)
    second.hold(indexes[0])
    with pytest.raises(Crowded):
        second.hold(indexes[1])
    first.release()
    second.hold(indexes[1])


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(tensors=[("weight", 0, (8,), bytes(32))]))
    return path


def test_headers_of_weight_files_are_held_and_not_their_tensors(
    memory: Memory, tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "IMPORT", 10_000)
    memory.most = 10_000
    header = b'{"a":{"dtype":"U8","shape":[20000],"data_offsets":[0,20000]}}'
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(20_000))
    held = ImportMemory()
    held.hold(path)
    assert memory.taken == strict_json.memory_of(header)
    held.hold(gguf)
    assert not open_files(path.parent)
    assert memory.taken > strict_json.memory_of(header) + import_memory._PER_TENSOR


def test_a_longer_header_of_gguf_is_not_read(
    memory: Memory, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.most = 10_000
    monkeypatch.setattr(limits, "IMPORT", 10_000)
    monkeypatch.setattr(import_memory, "_MAX_GGUF", 40)
    with pytest.raises(DamagedSource, match="in its header"):
        ImportMemory().hold(gguf)
    assert memory.taken == 0


def test_a_file_without_a_header_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"short")
    with pytest.raises(DamagedSource, match="too short"):
        ImportMemory().hold(path)


def test_blobs_are_held_with_the_documents(
    memory: Memory, indexes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.most = 2 * import_memory._PER_BLOB + COST
    monkeypatch.setattr(limits, "IMPORT", memory.most)
    with ImportMemory() as held:
        held.hold(indexes[0])
        with pytest.raises(DamagedSource, match="3 blobs: it would take more than"):
            held.hold_blobs(3)
        held.hold_blobs(2)
        assert memory.taken == memory.most
        with pytest.raises(Crowded):
            ImportMemory().hold_blobs(1)
    assert memory.taken == 0
