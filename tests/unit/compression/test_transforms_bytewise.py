from __future__ import annotations

import numpy as np
import pytest

from blobstore.compression.transforms import bytewise, whole


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
