from __future__ import annotations

import struct

import pytest

from blobstore.core.tensor import DType, TensorSpec
from blobstore.gguf.header import parse_header
from blobstore.gguf.layout import file_layout
from tests.support.gguf_files import U32, Tensor, gguf_file


@pytest.mark.parametrize(
    ("tensor", "dtype", "shape"),
    [
        (("t", 30, [4, 3], bytes(24)), DType.BF16, (3, 4)),
        (("t", 27, [], bytes(8)), DType.I64, ()),
        (("t", 12, [512, 3, 2], bytes(144 * 12)), DType.U8, (2, 3, 288)),
        (("t", 99, [4, 3], bytes(64)), DType.U8, (64,)),
    ],
    ids=["plain", "a number", "blocks", "an unknown type"],
)
def test_a_tensor_is_stored_as_its_type_or_as_bytes(
    tensor: Tensor, dtype: DType, shape: tuple[int, ...]
) -> None:
    data = gguf_file([], [tensor])
    layout = file_layout(parse_header(data, len(data)))
    spec, begin, end = layout.tensors["t"]
    assert spec == TensorSpec("t", dtype, shape)
    assert (begin, end - begin) == (layout.data_start, len(tensor[3]))


def test_the_bytes_between_tensors_are_gaps() -> None:
    values = [("general.alignment", U32, struct.pack("<I", 16))]
    data = gguf_file(values, [("a", 24, [3], b"abc"), ("b", 24, [16], bytes(16))], alignment=16)
    layout = file_layout(parse_header(data, len(data)))
    start = layout.data_start
    assert layout.alignment == 16
    assert [*layout.gaps(len(data) + 5)] == [
        (start + 3, start + 16),
        (start + 32, start + 37),
    ]
