from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blobstore.compression.delta.planes import Form, Histogram, choose, decode, encode, planes_of
from blobstore.compression.entropy import Coder
from blobstore.errors import ColdDamaged

Array = np.ndarray[Any, Any]


def normal(size: int, spread: float, dtype: str = "<i2") -> Array:
    return np.rint(np.random.default_rng(0).normal(0, spread, size)).astype(dtype)


def histogram(stream: Array, sizes: list[int]) -> Histogram:
    """Return the histogram of a third of the differences."""
    classes = np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes)
    return Histogram.of(stream[::3], classes[::3], len(sizes), len(stream) / len(stream[::3]))


def chosen(stream: Array, sizes: list[int]) -> list[tuple[int, int]]:
    """Return the number of classes and the form of each segment."""
    return choose(histogram(stream, sizes).costs(), stream.itemsize)


def back(differences: Array, form: int, sizes: list[int] | None = None) -> int:
    """Check that a run in ``form`` comes back, and return the bytes of its planes."""
    segment = encode(differences, sizes or [len(differences)], form, (Coder.HUFFMAN,))
    assert planes_of(segment.form) == len(segment.planes)
    out = np.empty_like(differences)
    planes = iter([(plane.method, memoryview(plane.data)) for plane in segment.planes])
    decode(segment.form, planes, np.frombuffer(segment.escaped, differences.dtype), out)
    assert np.array_equal(out, differences)
    return sum(plane.size for plane in segment.planes)


@pytest.mark.parametrize("dtype", ["<i1", "<i2", "<i4", "<i8"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 4099])
@pytest.mark.parametrize("form", [Form.CRUMBS, Form.NIBBLES, Form.ESCAPED, Form.BYTES])
def test_every_form_holds_any_differences(dtype: str, size: int, form: Form) -> None:
    limits = np.iinfo(dtype)
    ends = np.array([limits.min, limits.max, -128, 127, -8, 7, -2, 1, 0], dtype)
    back(np.tile(ends, size)[:size], form)


@pytest.mark.parametrize(
    ("spread", "form"),
    [(0.15, Form.CRUMBS), (1.5, Form.NIBBLES), (25, Form.ESCAPED), (2000, Form.BYTES + 1)],
)
def test_the_form_suits_the_spread(spread: float, form: int) -> None:
    assert chosen(normal(1 << 15, spread), [1 << 15]) == [(1, form)]


def test_equal_elements_have_no_planes() -> None:
    assert back(np.zeros(100, np.int16), Form.ZERO) == 0


def test_neighbouring_classes_of_one_form_are_one_segment() -> None:
    sizes = [1 << 14] * 5
    spreads = (3000, 2000, 1.5, 1.2, 0.15)
    stream = np.concatenate(
        [normal(size, spread) for size, spread in zip(sizes, spreads, strict=True)]
    )
    assert chosen(stream, sizes) == [(2, Form.BYTES + 1), (2, Form.NIBBLES), (1, Form.CRUMBS)]


def test_a_small_class_takes_the_form_of_its_neighbour() -> None:
    stream = np.concatenate([normal(1 << 15, 1.5), normal(40, 0.3), np.zeros(0, np.int16)])
    assert chosen(stream, [1 << 15, 40, 0]) == [(3, Form.NIBBLES)]


@pytest.mark.parametrize("form", [Form.NIBBLES, Form.ESCAPED])
def test_classes_have_codes_of_their_own(form: Form) -> None:
    parts = [normal(30_000, 0.4), normal(30_000, 1.0), normal(30_000, 4.0)]
    stream = np.concatenate(parts)
    together = back(stream, form)
    apart = back(stream, form, [30_000] * 3)
    assert apart < 0.95 * together


@pytest.mark.parametrize("spread", [0.4, 2, 30, 3000])
def test_estimates_the_encoded_bits(spread: float) -> None:
    stream = normal(1 << 16, spread)
    ((_, form),) = chosen(stream, [len(stream)])
    segment = encode(stream, [len(stream)], form, (Coder.HUFFMAN,))
    stored = sum(plane.size for plane in segment.planes) + len(segment.escaped)
    bits = histogram(stream, [len(stream)]).costs().min()
    assert bits == pytest.approx(8 * stored, rel=0.05)


def test_the_histogram_of_all_classes_is_that_of_one() -> None:
    stream, sizes = normal(9000, 30), [4000, 5000]
    apart, together = histogram(stream, sizes), histogram(stream, [9000])
    assert np.array_equal(apart.merged().costs(), together.costs())


def test_what_the_sample_missed_is_kept() -> None:
    stream = np.zeros(1 << 17, np.int16)
    stream[12_345] = 9
    ((_, form),) = chosen(stream, [len(stream)])
    back(stream, form)


def test_runs_are_coded_as_runs_where_that_is_tried() -> None:
    stream = np.zeros(1 << 16, np.int16)
    stream[:: 1 << 10] = 1
    sizes = [
        sum(plane.size for plane in encode(stream, [len(stream)], Form.CRUMBS, coders).planes)
        for coders in ((Coder.HUFFMAN,), (Coder.HUFFMAN, Coder.ZSTD))
    ]
    assert sizes[1] < sizes[0] / 2


def test_unknown_forms_are_refused() -> None:
    assert [planes_of(form) for form in range(12)] == [0, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ColdDamaged, match="unknown form 12"):
        planes_of(12)
