"""Blobs that are truncated or cannot be read while a process uses them: it ends or goes on as documented."""

from __future__ import annotations

import os
import re
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
from tests.faults import tracing
from tests.support.damage import blob_path
from tests.support.models import write_folder

ROWS = 64
PAGE = 4096
_READER = """
import sys
import blobstore

store, how = sys.argv[1:]
options = {"map": {}, "populate": {"read": "populate"}, "pread": {"read": "pread"}}[how]
with blobstore.open("m", store=blobstore.LocalStore(store), **options) as model:
    weight = model["w"]
    print(float(weight.sum()), flush=True)
    sys.stdin.readline()
    print(float(weight.sum()), flush=True)
"""


_RETRIES = """
import sys
import blobstore

store, verify = sys.argv[1:]
for _ in range(2):
    try:
        model = blobstore.open("m", store=store, read="pread", verify=verify)
        print(float(model["w"].sum()))
    except blobstore.BlobstoreError as error:
        print(error)
"""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    weight = np.ones((ROWS, PAGE // 4), np.float32)
    blobstore.create(write_folder(tmp_path / "source", {"w": weight}), "m", store=store)
    return store


def read_while_truncated(store: LocalStore, how: str) -> tuple[int, list[str], str]:
    """Return status, output and errors of a process whose blob is truncated while it runs."""
    path = blob_path(store, "w")
    path.chmod(0o600)
    command = [sys.executable, "-X", "faulthandler", "-c", _READER, str(store.root), how]
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


def test_a_model_read_into_memory_outlives_its_blobs(store: LocalStore) -> None:
    total = f"{float(ROWS * PAGE // 4)}\n"
    assert read_while_truncated(store, "pread") == (0, [total, total], "")


@pytest.mark.parametrize("how", ["map", "populate"])
def test_truncating_a_mapped_blob_ends_the_process_with_sigbus(store: LocalStore, how: str) -> None:
    """The documentation warns of this; if it changes, the documentation must too."""
    status, lines, errors = read_while_truncated(store, how)
    assert status == -signal.SIGBUS
    assert len(lines) == 1
    assert errors.startswith("Fatal Python error: Bus error\n")


@pytest.mark.skipif(bool(tracing.why_not()), reason=tracing.why_not() or "strace works")
@pytest.mark.parametrize(
    ("verify", "calls"),
    [("none", "preadv,preadv2"), ("size", "preadv,preadv2"), ("header", "pread64")],
)
def test_a_blob_that_cannot_be_read_is_one_error_and_is_read_again_later(
    store: LocalStore, tmp_path: Path, verify: str, calls: str
) -> None:
    path = blob_path(store, "w")
    trace = ["strace", "-f", "-qq", "-o", str(tmp_path / "log"), "-P", str(path)]
    # The first of each call in each thread fails. The main thread reads a single blob itself.
    fails = ["-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO:when=1"]
    done = subprocess.run(
        [*trace, *fails, sys.executable, "-c", _RETRIES, str(store.root), verify],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    refused, found = done.stdout.splitlines()
    where = re.escape(f"m:latest: layer 'w': blob '{path}' cannot be read")
    assert re.fullmatch(f"{where}: Input/output error", refused)
    assert found == str(float(ROWS * PAGE // 4))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("options", [{}, {"read": "pread"}, {"read": "populate"}])
def test_a_blob_that_was_truncated_earlier_is_an_error_when_it_is_opened(
    store: LocalStore, options: dict[str, Any]
) -> None:
    path = blob_path(store, "w")
    path.chmod(0o600)
    os.truncate(path, PAGE)
    with pytest.raises(BlobDamaged, match=f"^m:latest: layer 'w'.*{PAGE} bytes"):
        blobstore.open("m", store=store, **options)
