"""Files whose space was reserved and not written, next to files that have zeros."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from blobstore.errors import DamagedSource
from blobstore.operations.create.create import create
from blobstore.store.local import LocalStore

COUNT = 1 << 18
ONES, ZEROS = np.ones(COUNT, np.float32), np.zeros(COUNT, np.float32)
HALF = np.concatenate([ONES[: COUNT // 2], ZEROS[: COUNT // 2]])


def written(path: Path, *arrays: np.ndarray, is_sparse: bool) -> Path:
    """Write the arrays in their order; zeros are left as holes if the file is sparse."""
    save_file({f"t{number}": array for number, array in enumerate(arrays)}, path)
    data = path.read_bytes()
    with path.open("wb") as stream:
        for at in range(0, len(data), 4096):
            block = data[at : at + 4096]
            if is_sparse and not any(block):
                stream.seek(len(block), os.SEEK_CUR)
            else:
                stream.write(block)
        stream.truncate(len(data))
    return path


@pytest.mark.parametrize(
    "arrays", [(ZEROS,), (ZEROS, ZEROS), (ONES, HALF, ZEROS)], ids=["one", "all", "from-within"]
)
def test_what_was_never_written_is_an_unfinished_download(
    arrays: tuple[np.ndarray, ...], store: LocalStore, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.safetensors", *arrays, is_sparse=True)
    with pytest.raises(
        DamagedSource, match=r"unfinished download: nothing .* in tensor 't\d'; finish"
    ):
        create(path, "m", store=store)
    path.write_bytes(path.read_bytes())  # as cp --sparse=never does
    (notice,) = create(path, "m", store=store).notices
    assert "are zeros; if they should not be, finish the download" in notice


@pytest.mark.parametrize(
    "arrays", [(ONES, ZEROS), (ONES, ZEROS, ZEROS), (ONES, HALF), (ZEROS, ONES)]
)
def test_tensors_of_zeros_may_be_holes(
    arrays: tuple[np.ndarray, ...], store: LocalStore, tmp_path: Path
) -> None:
    path = written(tmp_path / "model.safetensors", *arrays, is_sparse=True)
    created = create(path, "m", store=store)
    assert "were never written, and are zeros" in created.notices[0]
    path = written(path, *arrays, is_sparse=False)
    again = create(path, "n", store=store)
    assert (again.notices, again.digest) == ((), created.digest)
