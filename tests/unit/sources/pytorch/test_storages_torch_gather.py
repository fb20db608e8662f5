from __future__ import annotations

from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from blobstore.core.tensor import DType, TensorSpec
from blobstore.sources.pytorch.storages import gathered, swapped
from blobstore.sources.pytorch.tensors import Storage, StridedTensor, _measured
from blobstore.sources.pytorch.zip_entries import ZipEntry
from tests.torch_files import TYPES, of_type, raw

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPES = {name: dtype for dtype, name in TYPES.items()}


def strided(
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: DType = DType.F32,
    *,
    conj: bool = False,
    neg: bool = False,
) -> StridedTensor:
    """Return a tensor whose first element is that of its storage; a pair of F4 is an element."""
    size = dtype.bits // 8 or 1
    extent = _measured(tuple(shape), tuple(stride))
    given_shape = (*shape[:-1], shape[-1] * 2) if dtype is DType.F4 else tuple(shape)
    room = extent.span * size
    return StridedTensor(
        TensorSpec("a", dtype, given_shape),
        Storage("0", "UntypedStorage", DType.U8, 1, room),
        ZipEntry("0", 0, room, room, 0, is_deflated=False),
        begin=0,
        offset=0,
        nbytes=extent.elements * size,
        stride=tuple(stride),
        extent=extent,
        is_direct=False,
        is_mapped=False,
        is_conjugated=conj,
        is_negated=neg,
    )


# Numbers turned round


@pytest.mark.parametrize(
    ("kind", "size", "data", "turned"),
    [
        ("HalfStorage", 2, "0102 0304", "0201 0403"),
        ("FloatStorage", 4, "01020304 05060708", "04030201 08070605"),
        ("LongStorage", 8, "0102030405060708", "0807060504030201"),
        ("ComplexFloatStorage", 8, "01020304 05060708", "04030201 08070605"),
        (
            "ComplexDoubleStorage",
            16,
            "01" * 7 + "00" + "02" * 7 + "03",
            "0001010101010101 0302020202020202",
        ),
        ("DoubleStorage", 8, "", ""),
    ],
)
def test_turns_numbers_round(kind: str, size: int, data: str, turned: str) -> None:
    content = bytes.fromhex(data)
    storage = Storage("0", kind, None, size, len(content) // size)
    assert swapped(bytearray(content), storage) == bytes.fromhex(turned)


# Elements put in order


@pytest.mark.parametrize("name", DTYPES)
def test_puts_elements_of_every_type_in_order(name: str) -> None:
    values = of_type(DTYPES[name], 4, 5)
    found = gathered(strided((5, 4), (1, 5), DType(name)), bytearray(raw(values)))
    size = values.itemsize
    columns = values.view(torch.uint8).reshape(4, 5, size).transpose(0, 1)
    assert bytes(found) == columns.contiguous().numpy().tobytes()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=5), st.data())
def test_puts_elements_in_the_order_that_torch_does(
    dims: list[tuple[int, int]], data: st.DataObject
) -> None:
    shape, stride = [dim[0] for dim in dims], [dim[1] for dim in dims]
    tensor = strided(shape, stride)
    content = data.draw(st.binary(min_size=tensor.extent.span * 4, max_size=tensor.extent.span * 4))
    elements = torch.frombuffer(bytearray(content or bytes(4)), dtype=torch.int32)
    expected = elements.as_strided(shape, stride).contiguous()
    assert bytes(gathered(tensor, bytearray(content))) == expected.numpy().tobytes()


def test_a_step_that_is_never_taken_can_be_of_any_size() -> None:
    largest = 2**63 - 1
    found = gathered(strided((1, 2, 1), (largest, 3, largest)), bytearray(range(16)))
    assert bytes(found) == bytes([0, 1, 2, 3, 12, 13, 14, 15])
    assert gathered(strided((1, 1), (largest, largest)), bytearray(4)).nbytes == 4


def test_repeats_elements() -> None:
    found = gathered(strided((2, 3), (0, 1)), bytearray(range(12)))
    assert bytes(found) == bytes(range(12)) * 2


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0, 3), (2**40, 0)])
@pytest.mark.parametrize("neg", [False, True])
def test_a_tensor_can_have_no_elements(shape: Sequence[int], neg: bool) -> None:
    stride = (7,) * len(shape)
    assert bytes(gathered(strided(shape, stride, neg=neg), bytearray())) == b""


def test_what_is_gathered_is_bytes() -> None:
    found = gathered(strided((2, 2), (1, 2)), bytearray(16))
    assert (found.format, found.itemsize, found.ndim, found.nbytes) == ("B", 1, 1, 16)


def test_takes_sixty_four_dimensions() -> None:
    shape = (1,) * 62 + (2, 2)
    found = gathered(strided(shape, (0,) * 62 + (1, 2)), bytearray(range(16)))
    assert bytes(found) == bytes([*range(4), *range(8, 12), *range(4, 8), *range(12, 16)])


# Values that are meant


COMPLEX = np.array([[1 + 2j, -3 - 0j], [0 - 4j, np.inf + 1j]], np.complex64)


@pytest.mark.parametrize(("conj", "neg"), [(True, False), (False, True), (True, True)])
def test_conjugates_and_negates(conj: bool, neg: bool) -> None:
    expected = torch.from_numpy(COMPLEX.T)
    expected = expected.conj() if conj else expected
    expected = torch._neg_view(expected) if neg else expected
    tensor = strided((2, 2), (1, 2), DType.C64, conj=conj, neg=neg)
    assert bytes(gathered(tensor, bytearray(COMPLEX.tobytes()))) == raw(expected)


def some_values() -> list[Any]:
    return [np.array([0.0, -0.0, 1.5, -np.inf, np.nan], dtype) for dtype in ("f2", "f4", "f8")] + [
        np.array([0, 1, 2**7 - 1, -(2**7)], dtype) for dtype in ("i1", "i2", "i4", "i8")
    ]


@pytest.mark.parametrize("values", some_values(), ids=lambda values: str(values.dtype))
def test_negates_as_torch_does(values: Any) -> None:
    tensor = torch.from_numpy(values)
    dtype = DType(TYPES[tensor.dtype])
    found = gathered(strided(values.shape, (1,), dtype, neg=True), bytearray(values.tobytes()))
    assert bytes(found) == raw(torch._neg_view(tensor))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_negates_types_that_numpy_has_otherwise(dtype: torch.dtype) -> None:
    values = torch.tensor([0.0, 1.0, 2.5, 96.0]).to(dtype)
    tensor = strided((4,), (1,), DType(TYPES[dtype]), neg=True)
    assert bytes(gathered(tensor, bytearray(raw(values)))) == raw(-values)
