from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from blobstore.errors import DamagedSource
from blobstore.sources.meta import reordered_rows as meta_bytes
from tests.support.meta_models import (
    PARAMS,
    Maker,
    contents,
    expected,
    hf_model,
    raw,
    split,
    to_meta,
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 200, 513, 5000])
@pytest.mark.parametrize("block", [1 << 22, 300, 10])
@pytest.mark.parametrize("shards", [1, 4])
def test_reads_through_a_buffer_of_any_size(
    maker: Maker, size: int, block: int, shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_bytes, "_BLOCK_SIZE", block)
    params = PARAMS | {"n_layers": 1}
    tensors = hf_model(params)
    maker.piece = 7 if size == 200 else 1000
    maker.write(split(to_meta(tensors, params), shards, embedding=1), params)
    source = maker.open()
    buffer = memoryview(bytearray(size))
    for name, tensor in tensors.items():
        data = b""
        for piece in source.read(name, buffer):
            assert 0 < len(piece) <= size
            data += piece
        assert data == raw(tensor)
    source.close()


@pytest.mark.parametrize(("block", "longest"), [(256, 256), (128, 96)])
def test_asks_a_shard_for_no_more_than_a_block_of_reordered_rows(
    maker: Maker, block: int, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meta_bytes, "_BLOCK_SIZE", block)
    maker.write(split(to_meta(hf_model(PARAMS), PARAMS), 2, embedding=1))
    source = maker.open()
    buffer = memoryview(bytearray(1 << 16))
    for name in source.specs:
        if "q_proj" in name or "o_proj" in name or "down" in name or "embed" in name:
            for _ in source.read(name, buffer):
                pass
    assert {shard.longest_read for shard in maker.shards.values()} == {longest}
    source.close()


def test_reads_rows_that_lie_in_order_in_one_go(maker: Maker) -> None:
    source = maker.write([to_meta(hf_model(PARAMS), PARAMS)]).open()
    name = "model.layers.0.self_attn.o_proj.weight"
    for _ in source.read(name, memoryview(bytearray(100))):
        pass
    assert maker.shards["consolidated.00.pth"].longest_read == source.specs[name].nbytes
    source.close()


def test_compares_copies_in_pieces(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meta_bytes, "_COMPARED_SIZE", 5)
    tensors = hf_model(PARAMS)
    source = maker.write(split(to_meta(tensors, PARAMS), 2)).open()
    assert contents(source) == expected(tensors)
    source.close()


def test_reads_from_several_threads_at_once(maker: Maker) -> None:
    tensors = hf_model(PARAMS)
    source = maker.write(split(to_meta(tensors, PARAMS), 4, embedding=1)).open()
    start = threading.Barrier(4)

    def work(_: int) -> dict[str, tuple[Any, bytes]]:
        start.wait()
        return contents(source, 100)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, range(4))) == [expected(tensors)] * 4
    source.close()


@pytest.mark.parametrize("name", ["layers.1.attention.wv.weight", "layers.0.ffn_norm.weight"])
def test_rejects_copies_that_differ(maker: Maker, name: str) -> None:
    params = PARAMS | {"n_kv_heads": 2}
    tensors = to_meta(hf_model(params), params)
    shards = split(tensors, 4)
    for number, shard in enumerate(shards):
        for key in tensors:
            if "wk" in key or "wv" in key:
                shard[key] = tensors[key].chunk(2)[number // 2].clone()
    shards[3][name].view(-1)[-1] += 1
    source = maker.write(shards, params).open()
    renamed = next(ours for ours, joined in (source._joined or {}).items() if joined.source == name)
    first = "02" if "wv" in name else "00"
    with pytest.raises(DamagedSource, match=rf"{name}' differs .*\.{first}\.pth.*\.03\.pth"):
        list(source.read(renamed, memoryview(bytearray(64))))
    source.close()
