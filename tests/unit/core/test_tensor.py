from __future__ import annotations

import copy
import pickle

import pytest

from blobstore.core.tensor import DTYPES, DType, TensorSpec
from tests.support.dtypes import ROWS


def test_the_table_has_the_types_of_the_format_in_the_order_of_the_reference_library() -> None:
    types = sorted(DType, key=lambda dtype: dtype.rank)
    rows = {dtype.value: (dtype.bits, dtype.library_name or "-") for dtype in types}

    assert list(rows.items()) == list(ROWS.items()), "tests/support/dtypes.py states this table too"
    assert dict(zip(ROWS, types, strict=True)) == DTYPES


def test_a_copy_of_a_type_is_the_type() -> None:
    assert all(
        copy.deepcopy(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype for dtype in DType
    )


@pytest.mark.parametrize(
    ("dtype", "shape", "elements", "nbytes"),
    [
        (DType.F32, (), 1, 4),
        (DType.F32, (2, 3), 6, 24),
        (DType.BF16, (0, 5), 0, 0),
        (DType.F4, (2, 3), 6, 3),
        (DType.F6_E2M3, (4,), 4, 3),
        (DType.BOOL, (3,), 3, 3),
        (DType.C64, (2,), 2, 16),
        (DType.U8, (2**31, 2**31), 2**62, 2**62),
    ],
)
def test_counts_elements_and_bytes(
    dtype: DType, shape: tuple[int, ...], elements: int, nbytes: int
) -> None:
    spec = TensorSpec("a", dtype, shape)
    assert spec.elements == elements
    assert spec.nbytes == nbytes


def test_specs_compare_by_value() -> None:
    assert TensorSpec("a", DType.U8, (1,)) == TensorSpec("a", DType.U8, (1,))
    assert len({TensorSpec("a", DType.U8, (1,)), TensorSpec("a", DType.I8, (1,))}) == 2
