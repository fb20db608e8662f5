"""Round trips of all transforms, for any bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression import transforms
from blobstore.compression.delta.codec import FAST, SMALL
from blobstore.compression.transforms import (
    BYTES_2,
    BYTES_4,
    BYTES_8,
    IDENTITY,
    WIDTHS,
    Transform,
    delta_transform,
    transform_of,
    transforms_for,
    width_of,
)
from blobstore.core.tensor import DType
from tests.support.cold import noise, weights

SOLO = [transform for number in range(32) if (transform := transforms._BY_NUMBER.get(number))]
TYPED = {4: DType.BF16, 5: DType.BF16, 9: DType.F8_E4M3}


def split(
    transform: Transform, chunk: bytes, base: bytes | None = None
) -> list[np.ndarray[Any, Any]] | None:
    """Return copies of the planes, checked against the sizes of the transform."""
    start = None if base is None else np.frombuffer(base, np.uint8)
    planes = transform.encode(np.frombuffer(chunk, np.uint8), start)
    if planes is None:
        return None
    sizes = transform.sizes(len(chunk) // transform.width)
    assert len(planes) == len(sizes)
    for plane, size in zip(planes, sizes, strict=True):
        assert len(plane) == size if size >= 0 else len(plane) <= -size
    return [plane.copy() for plane in planes]


def merged(
    transform: Transform, planes: list[np.ndarray[Any, Any]], size: int, base: bytes | None = None
) -> bytes:
    out = np.full(size, 0xA5, np.uint8)
    transform.decode(planes, out, None if base is None else np.frombuffer(base, np.uint8))
    return out.tobytes()


def like_weights(transform: Transform, count: int) -> bytes:
    return weights(TYPED.get(transform.number, DType.F32), count * transform.width)[
        : count * transform.width
    ]


@pytest.mark.parametrize("count", [2, 14, 1000, 70_002])
@pytest.mark.parametrize("transform", SOLO, ids=lambda transform: transform.number)
def test_weights_survive_a_round_trip(transform: Transform, count: int) -> None:
    chunk = like_weights(transform, count)
    planes = split(transform, chunk)
    assert planes is not None
    assert merged(transform, planes, len(chunk)) == chunk


@pytest.mark.parametrize("transform", SOLO, ids=lambda transform: transform.number)
def test_all_upper_bit_patterns_survive_a_round_trip(transform: Transform) -> None:
    count = 1 << min(16, 8 * transform.width)
    patterns = np.arange(count, dtype=f"<u{min(transform.width, 2)}")
    chunk = np.frombuffer(noise(count * transform.width), np.uint8).copy()
    elements = chunk.reshape(count, transform.width)
    elements[:, -min(transform.width, 2) :] = patterns.view(np.uint8).reshape(count, -1)

    planes = split(transform, chunk.tobytes())

    if planes is None:  # the exponents do not fit a window of sixteen
        assert transform.number in {5, 7, 10}
    else:
        assert merged(transform, planes, len(chunk)) == chunk.tobytes()


@pytest.mark.slow
@given(st.integers(1, 40), st.data())
def test_any_elements_survive_a_round_trip(count: int, data: st.DataObject) -> None:
    transform = data.draw(st.sampled_from(SOLO))
    size = count * transform.width
    chunk = data.draw(st.binary(min_size=size, max_size=size))
    planes = split(transform, chunk)
    if planes is not None:
        assert merged(transform, planes, size) == chunk
    if transform.number not in {5, 7, 9, 10} and planes is None:
        pytest.fail("only pairs may be inapplicable")


@pytest.mark.parametrize("number", [5, 7, 9, 10])
def test_pairs_are_not_applicable_to_an_odd_number(number: int) -> None:
    transform = transforms._BY_NUMBER[number]
    assert split(transform, like_weights(transform, 1000)) is not None
    assert transform.encode(np.frombuffer(like_weights(transform, 1001), np.uint8), None) is None
    assert transform.sizes(1001) == ()


@pytest.mark.parametrize("transform", SOLO, ids=lambda transform: transform.number)
def test_planes_may_be_unaligned(transform: Transform) -> None:
    chunk = like_weights(transform, 500)
    planes = split(transform, chunk)
    assert planes is not None
    odd = [np.frombuffer(b"x" + plane.tobytes(), np.uint8)[1:] for plane in planes]
    assert merged(transform, odd, len(chunk)) == chunk


@pytest.mark.slow
@given(st.data())
def test_any_planes_can_be_decoded(data: st.DataObject) -> None:
    transform = data.draw(st.sampled_from(SOLO))
    count = 2 * data.draw(st.integers(1, 20))
    planes = [
        np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
        for size in transform.sizes(count)
        if size >= 0
    ]
    if transform.sizes(count)[0] < 0:
        planes.insert(0, np.array([data.draw(st.integers(0, 255))], np.uint8))

    assert len(merged(transform, planes, count * transform.width)) == count * transform.width


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_transforms_have_the_width_of_their_type(dtype: DType) -> None:
    kinds = transforms_for(dtype)
    assert width_of(dtype) in WIDTHS
    assert {transform.width for kind in kinds for transform in kind} <= {width_of(dtype)}
    assert delta_transform(dtype, SMALL).width == width_of(dtype)
    assert all(
        transform_of(transform.number, transform.width) is transform
        for kind in kinds
        for transform in kind
    )


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_deltas_of_every_type_survive_a_round_trip(dtype: DType) -> None:
    base = weights(dtype, 6000)
    chunk = bytearray(base)
    chunk[::64] = noise(len(chunk[::64]))
    transform = delta_transform(dtype, FAST)
    planes = split(transform, bytes(chunk), base)
    assert planes is not None
    assert len(planes[0]) < len(chunk) // 4
    assert merged(transform, planes, len(chunk), base) == chunk


def test_deltas_need_a_base() -> None:
    transform = delta_transform(DType.BF16, FAST)
    assert transform.needs_base
    assert transform.encode(np.zeros(64, np.uint8), None) is None
    assert not any(transform.needs_base for transform in SOLO)


@pytest.mark.parametrize(("number", "width"), [(0, 3), (1, 4), (4, 4), (31, 2), (41, 1), (255, 2)])
def test_unknown_numbers_and_widths_have_no_transform(number: int, width: int) -> None:
    assert transform_of(number, width) is None


def test_untyped_bytes_have_width_1() -> None:
    assert width_of(None) == 1
    assert [transform.number for kind in transforms_for(None) for transform in kind] == [0]
    assert delta_transform(None, FAST).number == delta_transform(DType.U8, FAST).number


def test_the_lowest_byte_is_the_first_plane() -> None:
    planes = BYTES_4.encode(np.frombuffer(b"abcdefgh", np.uint8), None)
    assert planes is not None
    assert [plane.tobytes() for plane in planes] == [b"ae", b"bf", b"cg", b"dh"]


@pytest.mark.parametrize("transform", [BYTES_2, BYTES_4, BYTES_8])
def test_bytewise_transforms_have_one_plane_per_byte(transform: Transform) -> None:
    assert transform.sizes(100) == (100,) * transform.width


def test_the_identity_has_one_plane() -> None:
    transform = IDENTITY[4]
    chunk = np.arange(16, dtype=np.uint8)
    out = np.empty(16, np.uint8)
    planes = transform.encode(chunk, None)
    assert planes is not None
    assert transform.sizes(4) == (16,)
    transform.decode(planes, out, None)
    assert out.tolist() == chunk.tolist()
