"""Layouts of floats and of bytes: whatever the bits, they come back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.compression import transforms as layouts
from blobstore.compression.delta.codec import Effort
from blobstore.compression.transforms import (
    WIDTHS,
    bytewise,
    difference,
    layout_of,
    suitable,
    whole,
    width_of,
)
from blobstore.core.tensor import DType
from tests.support.cold import noise, weights

if TYPE_CHECKING:
    from blobstore.compression.transforms import Transform


SOLO = [layout for number in range(32) if (layout := layouts._BY_NUMBER.get(number))]
TYPED = {4: DType.BF16, 5: DType.BF16, 9: DType.F8_E4M3}


def split(
    layout: Transform, chunk: bytes, base: bytes | None = None
) -> list[np.ndarray[Any, Any]] | None:
    """Return copies of the planes, checked against the sizes that the layout states."""
    start = None if base is None else np.frombuffer(base, np.uint8)
    planes = layout.split(np.frombuffer(chunk, np.uint8), start)
    if planes is None:
        return None
    sizes = layout.sizes(len(chunk) // layout.width)
    assert len(planes) == len(sizes)
    for plane, size in zip(planes, sizes, strict=True):
        assert len(plane) == size if size >= 0 else len(plane) <= -size
    return [plane.copy() for plane in planes]


def merged(
    layout: Transform, planes: list[np.ndarray[Any, Any]], size: int, base: bytes | None = None
) -> bytes:
    out = np.full(size, 0xA5, np.uint8)
    layout.merge(planes, out, None if base is None else np.frombuffer(base, np.uint8))
    return out.tobytes()


def like_weights(layout: Transform, count: int) -> bytes:
    return weights(TYPED.get(layout.number, DType.F32), count * layout.width)[
        : count * layout.width
    ]


@pytest.mark.parametrize("count", [2, 14, 1000, 70_002])
@pytest.mark.parametrize("layout", SOLO, ids=lambda layout: layout.number)
def test_weights_come_back(layout: Transform, count: int) -> None:
    chunk = like_weights(layout, count)
    planes = split(layout, chunk)

    assert planes is not None
    assert merged(layout, planes, len(chunk)) == chunk


@pytest.mark.parametrize("layout", SOLO, ids=lambda layout: layout.number)
def test_every_pattern_of_the_upper_bits_comes_back(layout: Transform) -> None:
    count = 1 << min(16, 8 * layout.width)
    patterns = np.arange(count, dtype=f"<u{min(layout.width, 2)}")
    chunk = np.frombuffer(noise(count * layout.width), np.uint8).copy()
    elements = chunk.reshape(count, layout.width)
    elements[:, -min(layout.width, 2) :] = patterns.view(np.uint8).reshape(count, -1)

    planes = split(layout, chunk.tobytes())

    if planes is None:  # all exponents there are fit no window of sixteen
        assert layout.number in {5, 7, 10}
    else:
        assert merged(layout, planes, len(chunk)) == chunk.tobytes()


@given(st.integers(1, 40), st.data())
def test_any_elements_come_back(count: int, data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(SOLO))
    size = count * layout.width
    chunk = data.draw(st.binary(min_size=size, max_size=size))
    planes = split(layout, chunk)

    if planes is not None:
        assert merged(layout, planes, size) == chunk
    if layout.number not in {5, 7, 9, 10} and planes is None:
        pytest.fail("only pairs may not suit")


@pytest.mark.parametrize("number", [5, 7, 9, 10])
def test_pairs_do_not_suit_an_odd_number(number: int) -> None:
    layout = layouts._BY_NUMBER[number]

    assert split(layout, like_weights(layout, 1000)) is not None
    assert layout.split(np.frombuffer(like_weights(layout, 1001), np.uint8), None) is None
    assert layout.sizes(1001) == ()


@pytest.mark.parametrize("layout", SOLO, ids=lambda layout: layout.number)
def test_planes_may_begin_anywhere(layout: Transform) -> None:
    chunk = like_weights(layout, 500)
    planes = split(layout, chunk)

    assert planes is not None
    odd = [np.frombuffer(b"x" + plane.tobytes(), np.uint8)[1:] for plane in planes]
    assert merged(layout, odd, len(chunk)) == chunk


@given(st.data())
def test_any_planes_make_some_chunk(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(SOLO))
    count = 2 * data.draw(st.integers(1, 20))
    planes = [
        np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
        for size in layout.sizes(count)
        if size >= 0
    ]
    if layout.sizes(count)[0] < 0:
        planes.insert(0, np.array([data.draw(st.integers(0, 255))], np.uint8))

    assert len(merged(layout, planes, count * layout.width)) == count * layout.width


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_a_type_s_layouts_have_its_width(dtype: DType) -> None:
    kinds = suitable(dtype)

    assert width_of(dtype) in WIDTHS
    assert {layout.width for kind in kinds for layout in kind} <= {width_of(dtype)}
    assert difference(dtype, Effort.SMALL).width == width_of(dtype)
    assert all(
        layout_of(layout.number, layout.width) is layout for kind in kinds for layout in kind
    )


@pytest.mark.parametrize("dtype", DType, ids=lambda dtype: dtype.value)
def test_differences_of_every_type_come_back(dtype: DType) -> None:
    base = weights(dtype, 6000)
    chunk = bytearray(base)
    chunk[::64] = noise(len(chunk[::64]))
    layout = difference(dtype, Effort.FAST)

    planes = split(layout, bytes(chunk), base)

    assert planes is not None
    assert len(planes[0]) < len(chunk) // 4
    assert merged(layout, planes, len(chunk), base) == chunk


def test_differences_need_a_base() -> None:
    layout = difference(DType.BF16, Effort.FAST)

    assert layout.needs_base
    assert layout.split(np.zeros(64, np.uint8), None) is None
    assert not any(layout.needs_base for layout in SOLO)


@pytest.mark.parametrize(("number", "width"), [(0, 3), (1, 4), (4, 4), (31, 2), (41, 1), (255, 2)])
def test_there_is_no_layout_of_another_number_or_width(number: int, width: int) -> None:
    assert layout_of(number, width) is None


def test_bytes_without_a_type_are_single() -> None:
    assert width_of(None) == 1
    assert [layout.number for kind in suitable(None) for layout in kind] == [0]
    assert difference(None, Effort.FAST).number == difference(DType.U8, Effort.FAST).number


def test_the_lowest_byte_is_the_first_plane() -> None:
    planes = bytewise(2, 4).split(np.frombuffer(b"abcdefgh", np.uint8), None)

    assert planes is not None
    assert [plane.tobytes() for plane in planes] == [b"ae", b"bf", b"cg", b"dh"]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_has_a_plane_for_each_byte(width: int) -> None:
    assert bytewise(1, width).sizes(100) == (100,) * width


def test_whole_chunks_are_one_plane() -> None:
    layout = whole(0, 4)
    chunk = np.arange(16, dtype=np.uint8)
    out = np.empty(16, np.uint8)

    planes = layout.split(chunk, None)

    assert planes is not None
    assert layout.sizes(4) == (16,)
    layout.merge(planes, out, None)
    assert out.tolist() == chunk.tolist()
