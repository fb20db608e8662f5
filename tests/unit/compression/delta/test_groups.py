from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blobstore.compression.delta.groups import (
    Classes,
    choose_classes,
    classes_of,
    gather,
    group,
    has_classes,
    indexes_of,
    scatter,
)
from blobstore.core.tensor import DType

Array = np.ndarray[Any, Any]
_WIDTHS = {DType.F8_E4M3: "<u1", DType.BF16: "<u2", DType.F16: "<u2", DType.F32: "<u4"}


@pytest.mark.parametrize("dtype", _WIDTHS)
@pytest.mark.parametrize("classes", [Classes(0, 2), Classes(5, 7), Classes(1, 15), Classes(3, 16)])
def test_brings_each_class_together(dtype: DType, classes: Classes) -> None:
    base = np.frombuffer(np.random.default_rng(0).bytes(8000), _WIDTHS[dtype])
    groups = group(base, dtype, classes)
    stream = np.empty_like(base)
    gather(base, groups, stream)
    found = classes_of(stream, dtype, classes).copy()
    assert groups.sizes == np.bincount(found, minlength=classes.many).tolist()
    assert np.array_equal(found, np.sort(classes_of(base, dtype, classes)))
    assert np.array_equal(np.sort(stream), np.sort(base))


@pytest.mark.parametrize("dtype", _WIDTHS)
@pytest.mark.parametrize("many", [2, 3, 16])
def test_scatter_undoes_gather(dtype: DType, many: int) -> None:
    base = np.frombuffer(np.random.default_rng(0).bytes(80_000), _WIDTHS[dtype])
    groups = group(base, dtype, choose_classes(base, dtype, many))
    elements, stream, back = np.arange(len(base)).astype(base.dtype), base.copy(), base.copy()
    gather(elements, groups, stream)
    scatter(stream, groups, back)
    assert np.array_equal(back, elements)


@pytest.mark.parametrize("many", [2, 16])
@pytest.mark.parametrize("step", [1, 7, 999])
def test_indexes_say_what_gather_takes(many: int, step: int) -> None:
    base = np.frombuffer(np.random.default_rng(0).bytes(8000), np.uint16)
    groups = group(base, DType.BF16, choose_classes(base, DType.BF16, many))
    elements, stream = np.arange(len(base), dtype=np.uint16), base.copy()
    gather(elements, groups, stream)
    ranks = np.arange(0, len(base), step)
    assert np.array_equal(indexes_of(ranks, groups), stream[ranks])
    odd = np.array([len(base)])
    assert indexes_of(odd, groups).tolist() == [len(base)]
    assert indexes_of(odd[:0], groups).tolist() == []


def test_classes_are_exponents_and_the_ends_hold_all_beyond() -> None:
    powers = 2.0 ** np.arange(-6, 6)
    bits = (powers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    found = classes_of(np.concatenate([bits, bits | 0x8000]), DType.BF16, Classes(127 - 2, 5))
    assert found.tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4] * 2


def test_choice_ignores_a_few_large_numbers() -> None:
    base = np.full(100_000, 0x3F80, np.uint16)
    base[:300] = 0x7F80
    assert choose_classes(base, DType.BF16, 6) == Classes(127 - 5, 6)


def test_choice_has_one_class_for_zeros() -> None:
    assert choose_classes(np.zeros(9000, np.uint16), DType.F16, 6) == Classes(0, 1)


def test_integers_have_no_classes() -> None:
    assert [
        dtype for dtype in (DType.U8, DType.I16, DType.U32, DType.F64) if has_classes(dtype)
    ] == []
