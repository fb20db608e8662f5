from __future__ import annotations

import pytest

from blobstore.core.tensor import DTYPES, DType, TensorSpec

NAMES = """
BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ
I16 U16 F16 BF16 I32 U32 F32 C64 F64 I64 U64
"""
SIZES = [8, 4, 6, 6, *[8] * 7, *[16] * 4, *[32] * 3, *[64] * 4]
BITS = dict(zip(NAMES.split(), SIZES, strict=True))


def test_the_table_has_the_types_of_the_format() -> None:
    assert {name: dtype.bits for name, dtype in DTYPES.items()} == BITS


def test_types_are_ranked_in_the_order_of_the_reference_library() -> None:
    assert [dtype.value for dtype in sorted(DType, key=lambda dtype: dtype.rank)] == list(BITS)


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
