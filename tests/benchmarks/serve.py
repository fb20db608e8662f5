"""``blobstore serve`` compared with nginx, which sends one plain file by sendfile, and with olah, a mirror of the Hub.

    python -m tests.benchmarks.serve [--folder DIR] [--scale X] [--rounds N] [--olah PROGRAM]

The client lets the kernel discard what it receives, so that the server is the limit. All servers have one
process, and nginx sends the very file that blobstore puts together from the blobs. olah gets the model from
blobstore, and sends what it has kept; install it in an environment of its own.
"""

from __future__ import annotations

import argparse
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
from tests.support.ports import free_port
from tests.support.processes import start
from tests.support.serve_process import serving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

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


@contextmanager
def olah(program: Path, folder: Path, upstream: str) -> Iterator[int]:
    """Serve what another server has, and keep it."""
    port = free_port()
    ours = f"127.0.0.1:{port}"
    addresses = {"hf": upstream, "hf-lfs": upstream, "mirror": ours, "mirror-lfs": ours}
    options = [f"--{name}-netloc={address}" for name, address in addresses.items()]
    options += ["--hf-scheme=http", "--mirror-scheme=http", f"--repos-path={folder}/olah"]
    command = [str(program), "--host=127.0.0.1", f"--port={port}", f"--log-path={folder}/olah-log"]
    with (folder / "olah.out").open("wb") as log:
        process = start([*command, *options], stdout=log, stderr=log)
    try:
        for _ in range(600):
            try:
                connect(port).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.1)
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


def heads(port: int, target: str, count: int) -> float:
    """Return the seconds of :data:`_HEADS` HEAD requests on one connection, 16 of which are under way.

    Only ``count`` of them are sent.
    """
    message = f"HEAD {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    group = 16

    def ask() -> None:
        with connect(port) as client:
            for _ in range(count // group):
                client.sendall(message * group)
                ends = 0
                tail = b""
                while ends < group:
                    piece = tail + client.recv(1 << 16)
                    ends += piece.count(b"\r\n\r\n")
                    tail = piece[-3:] if not piece.endswith(b"\r\n\r\n") else b""

    return common.timed(ask) * _HEADS / count


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


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    found = shutil.which("olah-cli")
    parser.add_argument("--olah", type=Path, default=found, help="olah's program, olah-cli")


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__, add_options)
    if _NGINX is None:
        raise SystemExit("nginx is not installed (Debian: apt-get install nginx-light)")
    with common.workspace(options.folder) as folder, ExitStack() as stack:
        store = LocalStore(folder / "store")
        source = make_model(store, folder, options.scale)
        served = stack.enter_context(serving(store, folder, is_new=True))
        ours = int(served.url.rpartition(":")[2])
        name = "model.safetensors"
        hot, frozen = (f"/org/{model}/resolve/main/{name}" for model in ("hot", "frozen"))
        ports = {"nginx, sendfile": (stack.enter_context(nginx(folder, source)), f"/{name}")}
        ports["blobstore serve"] = (ours, hot)
        ports["nginx, sendfile, again"] = ports["nginx, sendfile"]
        if options.olah is not None:
            mirror = stack.enter_context(olah(options.olah, folder, served.host))
            ports["olah"] = (mirror, hot)
        common.warm(source)
        size = download(ours, hot)
        for count in (1, 4):
            cases: dict[str, Callable[[], float]] = {
                case: partial(downloads, *place, count) for case, place in ports.items()
            }
            print(f"{size / 1e9:.2f} GB in {_BLOBS} blobs, connections: {count}\n")
            common.table(common.rounds(cases, options.rounds), "nginx, sendfile", size * count)
        measure_frozen(ours, frozen, options.rounds)
        measure_heads({case: ports[case] for case in ports if "again" not in case}, options.rounds)
        first = [first_byte(ours, hot) for _ in range(20)]
        print(
            f"\nfirst byte: median {statistics.median(first) * 1000:.1f} ms, max {max(first) * 1000:.1f} ms"
        )
        idle = [stack.enter_context(connect(ours)) for _ in range(_IDLE)]
        for client in idle:
            request(client, "HEAD", hot)
        private = private_bytes(served.process.pid)
        print(f"private memory with {_IDLE} connections: {private / 2**20:.0f} MiB")


def measure_frozen(port: int, target: str, rounds: int) -> None:
    """Print how fast a frozen model is sent: for the first time, when it is verified too, and later."""
    sizes: list[int] = []
    first = common.timed(lambda: sizes.append(download(port, target)))
    later = common.rounds({"later": partial(downloads, port, target, 1)}, rounds)
    print(f"frozen, {sizes[0] / 1e9:.2f} GB\n")
    common.table({"first": [first], **later}, "later", sizes[0])


def measure_heads(ports: Mapping[str, tuple[int, str]], rounds: int) -> None:
    """Print how many requests without a body servers answer."""
    print(f"{_HEADS} HEAD requests\n")
    cases = {
        case: partial(heads, port, target, _HEADS if case != "olah" else _HEADS // 40)
        for case, (port, target) in ports.items()
    }
    for case, seconds in common.rounds(cases, rounds).items():
        print(f"{case}: {_HEADS / statistics.median(seconds):.0f} a second")


if __name__ == "__main__":
    main()
