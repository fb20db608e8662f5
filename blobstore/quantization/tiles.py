"""Tiled scales: the layout that tensor cores of NVIDIA read, and that ComfyUI stores.

The matrix of scales is padded to whole tiles of 128 rows and 4 columns. The scales of a tile are consecutive, and
so are the tiles of a row of tiles: the scale of row r and column c is byte ``16 * (r % 32) + 4 * (r // 32) + c`` of
its tile. cuBLAS calls it the layout of block scaling factors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 4
_LANES: Final = 32
"""Rows of which the scales of one column are 16 bytes apart."""
_ORDER: Final = (0, 3, 2, 1, 4)
"""The dimensions of :func:`split_shape` in the order of a matrix: row of tiles, row, column of tiles, column."""


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of a matrix of scales that is padded to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def split_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of tiled scales in five dimensions, of which each has one stride."""
    rows, columns = shape
    tiles = rows // TILE_ROWS, columns // TILE_COLUMNS
    return *tiles, _LANES, TILE_ROWS // _LANES, TILE_COLUMNS


def untiled(scale: Any, rows: int, columns: int) -> Any:
    """Return scales as a matrix, without padding.

    Args:
        scale: an array of numpy or MLX, of a shape that :func:`tiled_shape` returns.
        rows: rows of the weight.
        columns: groups of a row.
    """
    matrix = scale.reshape(split_shape(scale.shape)).transpose(*_ORDER).reshape(scale.shape)
    return matrix[:rows, :columns]


def untiled_tensor(scale: Any, rows: int, columns: int) -> Any:
    """Return a tensor of torch as :func:`untiled` does."""
    matrix = scale.reshape(split_shape(scale.shape)).permute(*_ORDER).reshape(scale.shape)
    return matrix[:rows, :columns]
