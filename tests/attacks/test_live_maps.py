"""Blobs that somebody truncates while a process has them: what the documents promise of each way to read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.errors import BlobDamaged
from blobstore.store.local import LocalStore
from tests.support.damage import blob_path
from tests.support.models import write_folder

ROWS = 64
PAGE = 4096
_READER = """
import sys
import blobstore

store, how = sys.argv[1:]
options = {"map": {}, "copy": {"copy": True}, "pread": {"read": "pread"}}[how]
with blobstore.open("m", store=blobstore.LocalStore(store), **options) as model:
    weight = model["w"]
    print(float(weight.sum()), flush=True)
    sys.stdin.readline()
    print(float(weight.sum()), flush=True)
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    weight = np.ones((ROWS, PAGE // 4), np.float32)
    blobstore.create(write_folder(tmp_path / "source", {"w": weight}), "m", store=store)
    return store


def read_while_cut(store: LocalStore, how: str) -> tuple[int, list[str], str]:
    """Return the status, what was printed and the errors of a process whose blob is cut meanwhile."""
    path = blob_path(store, "w")
    path.chmod(0o600)
    command = [sys.executable, "-c", _READER, str(store.root), how]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        os.truncate(path, PAGE)
        rest, errors = process.communicate("go on\n")
    return process.returncode, [*lines, *rest.splitlines(keepends=True)], errors


@pytest.mark.parametrize("how", ["copy", "pread"])
def test_a_model_in_memory_of_its_own_outlives_its_blobs(store: LocalStore, how: str) -> None:
    whole = f"{float(ROWS * PAGE // 4)}\n"
    assert read_while_cut(store, how) == (0, [whole, whole], "")


def test_a_live_map_of_a_blob_that_is_cut_ends_the_process_by_sigbus(store: LocalStore) -> None:
    """No promise, but what the documents warn of: if it were otherwise, they should say so."""
    status, lines, _ = read_while_cut(store, "map")
    assert status == -signal.SIGBUS
    assert len(lines) == 1


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"read": "pread"}, {"prefetch": "read"}])
def test_a_blob_that_was_cut_before_is_an_error_before_it_is_mapped(
    store: LocalStore, options: dict[str, Any]
) -> None:
    path = blob_path(store, "w")
    path.chmod(0o600)
    os.truncate(path, PAGE)
    with pytest.raises(BlobDamaged, match=f"^m:latest: layer 'w'.*{PAGE} bytes"):
        blobstore.open("m", store=store, **options)
