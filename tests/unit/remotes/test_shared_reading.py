"""Processes of one machine that open one model in object storage at the same time."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import blobstore
from blobstore.core.digest import Digest
from blobstore.operations.transfer.push import push_model
from blobstore.store.claims import BlobClaims
from blobstore.store.local import LocalStore
from tests.support.hostile_s3 import HostileS3, hostile_s3
from tests.support.models import add_blobs, blob
from tests.support.raw_server import Received

COUNT, SIZE = 12, 1 << 20
READ_ALL = """
import sys, blobstore
print("ready", flush=True)
sys.stdin.readline()
with blobstore.open(sys.argv[1], framework="numpy", cache=sys.argv[2]) as model:
    print({name: int(tensor[0]) for name, tensor in model.tensors().items()})
"""
EXPECTED = str({f"x{number:02}": number for number in range(COUNT)})


class Counting:
    """A bucket that counts the bytes of blobs that it sends, and how often it sends each."""

    def __init__(self, server: HostileS3) -> None:
        self.server = server
        self.begun: dict[str, int] = {}
        server.disturb = self.count

    def count(self, request: Received) -> None:
        if request.method == "GET" and "/blobs/" in request.path:
            self.begun[request.path] = self.begun.get(request.path, 0) + 1

    @property
    def most(self) -> int:
        """How often the blob that was read most often was read."""
        return max(count for path, count in self.begun.items() if self.is_large(path))

    def is_large(self, path: str) -> bool:
        return len(self.server.objects[path.removeprefix("/models/")]) >= SIZE


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    with hostile_s3() as server:
        server.set_environment(monkeypatch)
        monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "node"))
        local = LocalStore(tmp_path / "local")
        add_blobs(
            local,
            "one",
            {
                f"x{number:02}": blob((f"x{number:02}", "U8", (SIZE,), bytes([number]) * SIZE))
                for number in range(COUNT)
            },
        )
        push_model("one", server.address, store=local)
        yield Counting(server)


def start(bucket: Counting, count: int, cache: str = "keep") -> list[subprocess.Popen[str]]:
    """Start processes, which read after :func:`go`."""
    address = f"{bucket.server.address}/one"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, address, cache],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    return processes


def go(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def finish(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        output, _ = process.communicate()
        assert output.strip() == EXPECTED
        assert process.returncode == 0


def test_processes_that_open_a_model_at_once_read_it_once(bucket: Counting) -> None:
    processes = start(bucket, 4)
    go(processes)
    finish(processes)
    assert bucket.most == 1
    assert len(bucket.begun) >= COUNT


def test_without_a_cache_nobody_waits(bucket: Counting) -> None:
    processes = start(bucket, 2, "none")
    go(processes)
    finish(processes)
    assert bucket.most == 2


def test_a_process_that_is_killed_while_it_reads_costs_a_second_read(bucket: Counting) -> None:
    victim, *others = processes = start(bucket, 3)

    def kill(request: Received) -> None:
        bucket.count(request)
        if len(bucket.begun) > COUNT // 2:
            victim.kill()

    bucket.server.disturb = kill
    go(processes)
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    finish(others)
    assert bucket.most <= len(processes)


def test_a_blob_that_another_process_could_not_keep_is_read(
    bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Digest] = []
    monkeypatch.setattr(BlobClaims, "take", lambda *_: False)
    monkeypatch.setattr(BlobClaims, "wait", lambda _, digest, __: waited.append(digest))
    with blobstore.open(f"{bucket.server.address}/one", framework="numpy") as model:
        found = model.tensors()
    assert str({name: int(tensor[0]) for name, tensor in found.items()}) == EXPECTED
    assert len(waited) == COUNT
    assert bucket.most == 1


def test_a_store_of_another_user_whose_claims_cannot_be_written_is_used(
    bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: BlobClaims, path: Path) -> None:
        raise PermissionError(path)

    monkeypatch.setattr(BlobClaims, "__init__", refuse)
    with blobstore.open(f"{bucket.server.address}/one", framework="numpy") as model:
        assert len(model.tensors()) == COUNT
    assert sum(map(LocalStore().has, (blob.digest for blob in model.manifest.blobs))) >= COUNT


def test_locks_without_effect_cost_a_second_read(
    bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "lockf", lambda *_: None)
    address = f"{bucket.server.address}/one"
    with (
        blobstore.open(address, framework="numpy") as one,
        blobstore.open(address, framework="numpy") as two,
    ):
        first, second = one.tensors(), two.tensors()
    assert {name: int(tensor[0]) for name, tensor in first.items()} == {
        name: int(tensor[0]) for name, tensor in second.items()
    }


def test_parts_of_blobs_are_read_without_waiting(
    bucket: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed: list[Any] = []
    monkeypatch.setattr(BlobClaims, "take", lambda _, digest: claimed.append(digest))
    with blobstore.open(f"{bucket.server.address}/one", framework="numpy") as model:
        assert int(model.get_slice("x03")[5:10][0]) == 3
    assert not claimed
