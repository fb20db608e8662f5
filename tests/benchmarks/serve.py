"""``blobstore serve`` compared with nginx, which sends one plain file by sendfile.

    python -m tests.benchmarks.serve [--folder DIR] [--scale X] [--rounds N]

The client lets the kernel discard what it receives, so that the server is the limit. Both servers have one
process, and nginx sends the very file that blobstore puts together from the blobs.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.store.local import LocalStore
from tests.benchmarks import common
from tests.support.processes import start
from tests.support.registry import free_port
from tests.support.serve_process import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BLOBS = 130
_BYTES = 1_420_000_000
_HEADS = 4000
_IDLE = 1000
_NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_PIECE = 1 << 20


@contextmanager
def nginx(folder: Path, root: Path) -> Iterator[int]:
    """Serve the files of a folder."""
    port = free_port()
    kinds = "client_body proxy fastcgi uwsgi scgi"
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds.split())
    config = folder / "nginx.conf"
    config.write_text(
        f"""
        daemon off; master_process off; pid {folder}/pid; error_log {folder}/log;
        user root; events {{ worker_connections 2048; }}
        http {{
            access_log {folder}/access; {temporary} sendfile on; tcp_nopush on;
            keepalive_requests 1000000;
            server {{ listen 127.0.0.1:{port}; root {root}; }}
        }}
        """,
        encoding="utf-8",
    )
    process = start([str(_NGINX), "-c", str(config), "-e", f"{folder}/log"])
    try:
        for _ in range(100):
            try:
                connect(port).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def connect(port: int) -> socket.socket:
    """Return a connection to a server of this machine."""
    return socket.create_connection(("127.0.0.1", port))


def request(client: socket.socket, method: str, target: str) -> tuple[int, bytes]:
    """Send a request; return the length that the response says, and what follows its head so far."""
    client.sendall(f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    received = b""
    while b"\r\n\r\n" not in received:
        piece = client.recv(1 << 16)
        if not piece:
            raise ConnectionError("the server has ended the connection")
        received += piece
    head, _, rest = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200"):
        raise ConnectionError(head.decode())
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return int(lengths[0].partition(b":")[2]), rest


def download(port: int, target: str) -> int:
    """Receive a file and discard it; return its size."""
    with connect(port) as client:
        size, rest = request(client, "GET", target)
        left = size - len(rest)
        buffer = bytearray(_PIECE)
        while left:
            count = client.recv_into(buffer, min(left, _PIECE), socket.MSG_TRUNC)
            if not count:
                raise ConnectionError(f"{left} bytes are missing")
            left -= count
    return size


def downloads(port: int, target: str, count: int) -> float:
    """Return the seconds of so many downloads at once."""
    with ThreadPoolExecutor(count) as pool:
        return common.timed(lambda: list(pool.map(lambda _: download(port, target), range(count))))


def heads(port: int, target: str) -> float:
    """Return the seconds of many HEAD requests on one connection, 16 of which are under way."""
    message = f"HEAD {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    group = 16

    def ask() -> None:
        with connect(port) as client:
            for _ in range(_HEADS // group):
                client.sendall(message * group)
                ends = 0
                tail = b""
                while ends < group:
                    piece = tail + client.recv(1 << 16)
                    ends += piece.count(b"\r\n\r\n")
                    tail = piece[-3:] if not piece.endswith(b"\r\n\r\n") else b""

    return common.timed(ask)


def first_byte(port: int, target: str) -> float:
    """Return the seconds until the head of a response is there."""
    with connect(port) as client:
        return common.timed(lambda: request(client, "GET", target))


def private_bytes(pid: int) -> int:
    """Return the private memory of a process."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii")
    lines = [line.split() for line in text.splitlines() if line.startswith("Private_")]
    return 1024 * sum(int(line[1]) for line in lines)


def make_model(store: LocalStore, folder: Path, scale: float) -> Path:
    """Add ``org/hot`` and ``org/frozen``, and return the source of the first."""
    random = np.random.default_rng(0)
    count = int(_BYTES * scale) // _BLOBS // 2
    specs = [
        TensorSpec(f"layers.{number}.weight", DTYPES["BF16"], (count,)) for number in range(_BLOBS)
    ]

    def weights(_: str) -> list[bytes]:
        values = random.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        return [values.astype(ml_dtypes.bfloat16).tobytes()]

    source = common.write_model(folder / "source", specs, weights)
    blobstore.create(source, "org/hot", store=store)
    part = specs[: _BLOBS // 4]
    frozen = common.write_model(folder / "part", part, weights)
    blobstore.create(frozen, "org/frozen", store=store)
    blobstore.freeze("org/frozen", store=store)
    return source


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    if _NGINX is None:
        raise SystemExit("nginx is not installed (Debian: apt-get install nginx-light)")
    with common.workspace(options.folder) as folder, ExitStack() as stack:
        store = LocalStore(folder / "store")
        source = make_model(store, folder, options.scale)
        served = stack.enter_context(serving(store, folder))
        ours = int(served.url.rpartition(":")[2])
        theirs = stack.enter_context(nginx(folder, source))
        name = "model.safetensors"
        hot, frozen = (f"/org/{model}/resolve/main/{name}" for model in ("hot", "frozen"))
        size, small = download(ours, hot), download(ours, frozen)
        common.warm(source)
        for count in (1, 4):
            cases: dict[str, Callable[[], float]] = {
                "nginx, sendfile": partial(downloads, theirs, f"/{name}", count),
                "blobstore serve": partial(downloads, ours, hot, count),
                "nginx, sendfile, again": partial(downloads, theirs, f"/{name}", count),
            }
            print(f"{size / 1e9:.2f} GB in {_BLOBS} blobs, connections: {count}\n")
            common.table(common.rounds(cases, options.rounds), "nginx, sendfile", size * count)
        print(f"frozen, {small / 1e9:.2f} GB\n")
        common.table(
            common.rounds({"blobstore serve": lambda: downloads(ours, frozen, 1)}, options.rounds),
            "blobstore serve",
            small,
        )
        print(f"{_HEADS} HEAD requests\n")
        cases = {
            "nginx": lambda: heads(theirs, f"/{name}"),
            "blobstore serve": lambda: heads(ours, hot),
        }
        found = common.rounds(cases, options.rounds)
        common.table(found, "nginx")
        for case, seconds in found.items():
            print(f"{case}: {_HEADS / statistics.median(seconds):.0f} a second")
        first = [first_byte(ours, hot) for _ in range(20)]
        print(
            f"\nfirst byte: median {statistics.median(first) * 1000:.1f} ms, max {max(first) * 1000:.1f} ms"
        )
        idle = [stack.enter_context(connect(ours)) for _ in range(_IDLE)]
        for client in idle:
            request(client, "HEAD", hot)
        private = private_bytes(served.process.pid)
        print(f"private memory with {_IDLE} connections: {private / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
