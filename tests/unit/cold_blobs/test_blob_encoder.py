from __future__ import annotations

from typing import Any

import pytest

from blobstore.cold_blobs.blob_encoder import BlobEncoder
from blobstore.compression import estimate
from blobstore.compression.decoder import ColdBlobDecoder
from blobstore.core.digest import BlobId, Digest
from blobstore.errors import BlobMissing
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
from tests.support.frozen import COUNT, layer, mixed_steps, steps, tuned, weights
from tests.support.models import add_blobs, blob


def add(store: LocalStore, data: bytes) -> BlobId:
    add_blobs(store, "m", {"x": data})
    return BlobId(Digest.of(data), len(data))


def encode(encoder: BlobEncoder) -> ColdBlobDecoder:
    written = bytearray()
    reported: list[int] = []
    encoder.write(written.extend, reported.append)
    assert sum(reported) == ColdBlobDecoder(bytes(written)).size
    return ColdBlobDecoder(bytes(written))


def decoded(store: LocalStore, cold: ColdBlobDecoder) -> bytes:
    if cold.table.base is not None:
        cold.give_base(store.base(cold.table.base.digest, cold.table.base.size))
    return b"".join(map(bytes, cold.pieces()))


@pytest.mark.parametrize(
    "data",
    [
        layer("x", weights(1)),
        blob(("x", "BF16", (0,), b""), ("y", "BF16", (COUNT,), weights(1))),
        blob(("x", "BF16", (COUNT,), weights(1)), ("y", "BF16", (COUNT,), weights(1))),
        b"no safetensors file at all" * 1000,
        b"",
    ],
    ids=["one", "empty", "equal", "foreign", "nothing"],
)
def test_any_blob_is_restored(store: LocalStore, data: bytes) -> None:
    cold = encode(BlobEncoder(store, add(store, data), "fast"))
    assert cold.table.digest == Digest.of(data)
    assert decoded(store, cold) == data


def test_a_base_saves_space(store: LocalStore) -> None:
    base = add(store, layer("x", weights(1)))
    mine = layer("x", tuned(10, 1))
    item = add(store, mine)
    alone, delta = BlobEncoder(store, item, "fast"), BlobEncoder(store, item, "fast", base)
    assert (alone.has_base, delta.has_base) == (False, True)
    assert delta.estimate() < 0.8 * alone.estimate()
    cold = encode(delta)
    assert cold.table.base == (base.digest, base.size)
    assert decoded(store, cold) == mine
    without = delta.without_base()
    assert (without.has_base, without.estimate()) == (False, alone.estimate())


def test_tensors_of_a_group_are_compared_by_name(store: LocalStore) -> None:
    base = add(
        store,
        blob(
            ("b", "BF16", (COUNT,), weights(2)),
            ("a", "BF16", (COUNT,), weights(1)),
            ("c", "BF16", (COUNT // 2, 2), weights(3)),
        ),
    )
    mine = blob(
        ("a", "BF16", (COUNT,), tuned(10, 1)),
        ("b", "BF16", (COUNT,), tuned(11, 2)),
        ("c", "BF16", (COUNT,), tuned(12, 3)),
        ("d", "BF16", (0,), b""),
    )
    item = add(store, mine)
    cold = encode(BlobEncoder(store, item, "fast", base))
    begins = [part.base_begin for part in cold.table.parts]
    header = store.read_blob_header(*base)
    assert begins == [
        None,
        header.data_start + header.tensors["a"].begin,
        header.data_start + header.tensors["b"].begin,
        None,  # of another shape
    ]
    assert decoded(store, cold) == mine


def test_a_header_like_that_of_the_base_takes_no_space(store: LocalStore) -> None:
    base = add(store, blob(("x" * 900, "BF16", (COUNT,), weights(1))))
    mine = blob(("x" * 900, "BF16", (COUNT,), tuned(10, 1)))
    cold = encode(BlobEncoder(store, add(store, mine), "fast", base))
    assert cold.table.parts[0].base_begin == 0
    assert cold.table.chunks[0].stored_size < 16
    assert decoded(store, cold) == mine


def test_small_tensors_of_a_step_take_few_bytes(store: LocalStore) -> None:
    one, two = steps(5, 1, 2, 384 * 64)
    base, mine = (
        blob(*((f"{n:02}", "BF16", (384,), data[768 * n : 768 * (n + 1)]) for n in range(64)))
        for data in (one, two)
    )
    differ = sum(a != b for a, b in zip(base, mine, strict=True))
    assert 60 < differ < 1000
    cold = encode(BlobEncoder(store, add(store, mine), "fast", add(store, base)))
    assert len(cold.table.parts) == 1
    assert len(cold.data) < 300 + 2 * differ
    assert decoded(store, cold) == mine


def group(data: bytes) -> bytes:
    """Return a blob of four tensors."""
    size = len(data) // 4
    return blob(
        *((f"{n}", "BF16", (size // 2,), data[size * n : size * (n + 1)]) for n in range(4))
    )


def test_sparse_tensors_share_chunks(store: LocalStore) -> None:
    run = [group(data) for data in steps(5, 1, 2, 1 << 20)]
    base, mine = (add(store, data) for data in run)
    cold = encode(BlobEncoder(store, mine, "fast", base))
    assert [part.size for part in cold.table.parts][1:] == [2 << 20]
    assert decoded(store, cold) == run[1]


def test_dense_tensors_have_chunks_of_their_own(store: LocalStore) -> None:
    base = add(store, group(weights(1, 1 << 18)))
    mine = group(tuned(10, 1, 1 << 18))
    cold = encode(BlobEncoder(store, add(store, mine), "fast", base))
    assert [part.size for part in cold.table.parts][1:] == [1 << 17] * 4
    assert decoded(store, cold) == mine


def test_chunks_lie_at_the_same_places_where_chains_are_made(store: LocalStore) -> None:
    dense, sparse = weights(1, 1 << 20), steps(5, 1, 2, 1 << 20)
    base, tune, one, two = (
        add(store, group(data)) for data in (dense, tuned(10, 1, 1 << 20), *sparse)
    )
    tables = [
        encode(BlobEncoder(store, mine, "fast", theirs, chains=True)).table.parts
        for mine, theirs in [(tune, base), (two, one)]
    ]
    assert [(part.size, part.chunk_size) for part in tables[0]] == [
        (part.size, part.chunk_size) for part in tables[1]
    ]


def test_a_delta_against_a_frozen_sparse_delta_has_chunks_where_that_has_them(
    store: LocalStore,
) -> None:
    run = [group(data) for data in steps(5, 1, 3, 1 << 20)]
    base, one, two = (add(store, data) for data in run)
    add_blobs(store, "base", {"x": run[0]})
    add_blobs(store, "one", {"x": run[1]})
    freeze_models(["one"], store=store, base="base")
    assert store.open_cold(*one).base == base.digest
    encoder = BlobEncoder(store, two, "fast", one, chains=True, in_chain=True)
    cold = encode(encoder)
    cold.give_base(store.base(*one, in_chain=True))
    assert b"".join(map(bytes, cold.pieces())) == run[2]


def test_each_tensor_has_chunks_where_a_base_that_is_partly_sparse_has_them(
    store: LocalStore,
) -> None:
    base, one, two = mixed_steps()
    ids = [add(store, data) for data in (base, one, two)]
    add_blobs(store, "base", {"x": base})
    add_blobs(store, "one", {"x": one})
    freeze_models(["one"], store=store, base="base")
    sizes = [part.size for part in store.open_cold(*ids[1]).container.table.parts[1:]]
    assert sizes == [1 << 19, 1 << 18, 1 << 18]  # the first two share chunks
    cold = encode(BlobEncoder(store, ids[2], "fast", ids[1], chains=True, in_chain=True))
    assert [part.size for part in cold.table.parts[1:]] == sizes
    assert all(part.base_begin is not None for part in cold.table.parts)
    assert len(cold.data) < 0.03 * cold.size
    cold.give_base(store.base(*ids[1], in_chain=True))
    assert b"".join(map(bytes, cold.pieces())) == two


@pytest.mark.parametrize(
    "base",
    [
        b"no safetensors file",
        blob(("x", "F16", (COUNT,), tuned(10, 1))),
        blob(("x", "BF16", (2, COUNT), weights(1) * 2)),
        blob(("y", "BF16", (COUNT,), tuned(10, 1)), ("z", "U8", (1,), b"1")),
    ],
    ids=["foreign", "type", "shape", "names"],
)
def test_a_base_without_similar_tensors_is_not_used(store: LocalStore, base: bytes) -> None:
    item = add(store, layer("x", weights(1)))
    assert not BlobEncoder(store, item, "fast", add(store, base)).has_base


def test_a_missing_base_is_not_used(store: LocalStore) -> None:
    item = add(store, layer("x", weights(1)))
    assert not BlobEncoder(store, item, "fast", BlobId(Digest.of(b"gone"), 4)).has_base


def test_a_missing_blob_is_an_error(store: LocalStore) -> None:
    with pytest.raises(BlobMissing):
        BlobEncoder(store, BlobId(Digest.of(b"gone"), 4), "fast")


def test_freezing_encodes_a_delta_once_and_estimates_nothing(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bool] = []
    real = BlobEncoder.write

    def counted(self: BlobEncoder, *arguments: Any) -> Any:
        written.append(self.has_base)
        return real(self, *arguments)

    monkeypatch.setattr(BlobEncoder, "write", counted)
    monkeypatch.setattr(estimate, "estimate_size", None)
    add_blobs(store, "base", {"x": layer("x", weights(1)), "y": layer("y", weights(2))})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1)), "y": layer("y", tuned(11, 2))})
    freeze_models(["child"], store=store, base="base")
    assert written == [True, True]


def test_a_base_that_saves_little_is_not_used(store: LocalStore) -> None:
    """The first twentieth of the blob is like the base."""
    mine = tuned(10, 1)[: COUNT // 10] + weights(2)[COUNT // 10 :]
    add_blobs(store, "base", {"x": layer("x", weights(1))})
    add_blobs(store, "child", {"x": layer("x", mine)})
    frozen = freeze_models(["child"], store=store, base="base")
    alone = freeze_models(["child"], store=store, find_base=False, dry_run=True)
    assert [item.base for item in frozen.blobs] == [None]
    assert (frozen.fallbacks, len(alone.blobs)) == (0, 1)


def test_an_estimate_is_near_the_compressed_size(store: LocalStore) -> None:
    item = add(store, layer("x", weights(1, 3_000_000)))
    encoder = BlobEncoder(store, item, "fast")
    written = bytearray()
    encoder.write(written.extend, lambda _: None)
    assert abs(encoder.estimate() - len(written)) < 0.01 * len(written)


def encode_against(
    store: LocalStore, mine: bytes, *tensors: tuple[str, str, tuple[int, ...], bytes]
) -> ColdBlobDecoder:
    """Return a blob encoded against another, once it has been decoded."""
    item = add(store, mine)
    cold = encode(BlobEncoder(store, item, "fast", add(store, blob(*tensors))))
    assert decoded(store, cold) == mine
    return cold


def test_finds_a_tensor_under_another_name_and_shape(store: LocalStore) -> None:
    cold = encode_against(
        store,
        blob(("x", "BF16", (COUNT,), weights(1)), ("y", "BF16", (COUNT,), weights(2))),
        ("a", "BF16", (2, COUNT // 2), weights(2)),
        ("b", "I16", (COUNT,), weights(1)),
        ("c", "U8", (2 * COUNT,), weights(3)),
    )
    assert [part.base_begin is None for part in cold.table.parts] == [True, False, False]
    assert cold.table.parts[1].base_begin != cold.table.parts[2].base_begin
    assert stored(cold) < 0.02 * cold.size


def test_prefers_the_tensor_of_the_same_name(store: LocalStore) -> None:
    """Whether both candidates are equal to it or neither is."""
    cold = encode_against(
        store,
        blob(("x", "BF16", (COUNT,), weights(1)), ("y", "BF16", (COUNT,), tuned(10, 2))),
        ("a", "BF16", (COUNT,), weights(1)),
        ("x", "BF16", (COUNT,), weights(1)),
        ("y", "BF16", (COUNT,), weights(2)),
    )
    begins = [part.base_begin for part in cold.table.parts[1:]]
    assert cold.table.base is not None
    header = store.read_blob_header(*cold.table.base)
    assert begins == [header.data_start + header.tensors[name].begin for name in ("x", "y")]


def test_prefers_an_equal_tensor_to_a_different_one_of_the_same_name(
    store: LocalStore,
) -> None:
    cold = encode_against(
        store,
        blob(("x", "BF16", (COUNT,), weights(1)), ("y", "BF16", (COUNT,), weights(2))),
        ("x", "BF16", (COUNT,), weights(2)),
        ("y", "BF16", (COUNT,), weights(1)),
    )
    assert stored(cold) < 0.02 * cold.size


def test_finds_the_slices_of_a_stack_one_by_one(store: LocalStore) -> None:
    parts = [weights(seed) for seed in range(4)]
    shape = (200, COUNT // 200)
    stack = blob(("stack", "BF16", (4, *shape), b"".join(parts)))
    packed = [(str(number), "BF16", shape, part) for number, part in enumerate(parts)]
    cold = encode_against(store, stack, *packed[::-1])
    assert [part.size for part in cold.table.parts[1:]] == [2 * COUNT] * 4
    assert stored(cold) < 0.02 * cold.size
    cold = encode_against(store, blob(*packed), ("stack", "BF16", (4, *shape), b"".join(parts)))
    assert stored(cold) < 0.02 * cold.size
    cold = encode_against(store, stack, packed[1], packed[3])
    assert [part.base_begin is None for part in cold.table.parts[1:]] == [True, False] * 2


def test_constant_samples_do_not_make_tensors_equal(store: LocalStore) -> None:
    mine = blob(("x", "BF16", (COUNT,), bytes(2 * COUNT)))
    base = blob(("y", "BF16", (COUNT,), bytes(2 * COUNT)), ("z", "U8", (1,), b"1"))
    assert not BlobEncoder(store, add(store, mine), "fast", add(store, base)).has_base


def stored(cold: ColdBlobDecoder) -> int:
    """Return the bytes of all planes."""
    return sum(plane.size for chunk in cold.table.chunks for plane in chunk.planes)
