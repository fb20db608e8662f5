"""``blobstore serve`` with TLS: handshakes that never end, clients that read nothing, and files that are half replaced."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from blobstore.core import capacity
from blobstore.core.digest import Digest
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.serve.blob_reader import BlobReader
from blobstore.serve.body import WRITTEN, BodySender
from blobstore.serve.connection import MAX_HANDSHAKES, Connection, Connections, Refusal
from blobstore.serve.listener import read_certificate
from blobstore.serve.messages import BlobPart
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.serve_process import SECONDS, Serving, connect, serving
from tests.support.tls import Authority, Pair

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.pair()


class Transport:
    """The socket of a client that sends nothing."""

    def __init__(self) -> None:
        self.is_aborted = self.is_closed = False
        self.sent = b""

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.is_closed = True

    def write(self, data: bytes) -> None:
        self.sent += data

    def set_write_buffer_limits(self, _: int) -> None:
        """Have no limits."""


@pytest.mark.parametrize("more", [1, 40])
def test_handshakes_beyond_the_limit_take_the_places_of_the_oldest(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    assert capacity.HANDSHAKES.most == MAX_HANDSHAKES
    now, most = [0.0], capacity.HANDSHAKES.most
    context = read_certificate(*pair)

    async def run() -> None:
        host = Connections(most + 2 * more)

        def come() -> tuple[Any, Transport]:
            protocol, transport = host.accepted(asyncio.Protocol, context), Transport()
            protocol.connection_made(cast("Any", transport))
            return protocol, transport

        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: now[0])
            first = [come() for _ in range(most)]
            refused, transport = come()
            assert isinstance(refused, Refusal)
            assert transport.is_closed
            assert transport.sent == b"", "what is not encrypted is no answer to this client"
            now[0] = 0.6
            last = [come() for _ in range(more)]
            assert [one.is_aborted for _, one in first] == [True] * more + [False] * (most - more)
            assert len(host) == len(host.handshakes) == most
            # Those whose handshake has ended keep nobody out.
            for connection in list(host.handshakes):
                connection.connection_made(cast("Any", Transport()))
            assert not host.handshakes
            assert len(host) == most
            await asyncio.sleep(0)
            for protocol, _ in (*last, *first):
                protocol.connection_lost(None)
            assert not len(host)

    asyncio.run(run())


def test_a_handshake_that_does_not_end_is_ended(
    store: LocalStore, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    store.root.mkdir()
    limits = {"connection.HANDSHAKE_SECONDS": 0.2, "connection.MAX_HANDSHAKES": 2}
    limits["connection._HANDSHAKE_GRACE_SECONDS"] = 0
    hello = ssl.MemoryBIO()
    client = authority.context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="localhost")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    with serving(store, tmp_path, *pair.options, limits=limits, tls=authority.context()) as server:
        for sent in (b"", b"\x16", hello.read()[:50], b"GET / HTTP/1.1\r\n\r\n"):
            with connect(server) as silent, contextlib.suppress(ConnectionResetError):
                silent.sendall(sent)
                assert b"HTTP" not in silent.recv(100)
        with contextlib.ExitStack() as held:
            for _ in range(20):
                held.enter_context(connect(server))
            assert server.request("/healthz")[0] == 200
        assert not [line for line in server.log() if "error" in line]


class Peaks:
    """Writes to a connection, and notes the most bytes that the process holds for its client."""

    def __init__(self, writer: asyncio.StreamWriter, raw: asyncio.Transport) -> None:
        self.writer, self.raw = writer, raw
        self.most = self.longest = 0

    async def write(self, data: bytes | memoryview) -> None:
        self.writer.write(data)
        held = self.raw.get_write_buffer_size() + self.writer.transport.get_write_buffer_size()
        self.most, self.longest = max(self.most, held), max(self.longest, len(data))
        await self.writer.drain()


@contextlib.contextmanager
def connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Give a block the ends of a client and a server, for which the system holds little."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        client.connect(listener.getsockname())
        with listener.accept()[0] as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 << 10)
            yield client, server


@pytest.mark.parametrize("is_frozen", [False, True])
def test_little_is_held_for_a_client_that_reads_slowly(
    store: LocalStore, tmp_path: Path, authority: Authority, pair: Pair, *, is_frozen: bool
) -> None:
    weights = np.random.default_rng(0).standard_normal((2048, 1024), dtype=np.float32)
    create(write_folder(tmp_path / "source", {"weight": weights}), "model", store=store)
    body = max(map(Path.read_bytes, store.folder("blobs").iterdir()), key=len)
    if is_frozen:
        freeze_models(["model"], store=store)
    part = BlobPart(Digest.of(body), len(body), 0, len(body))
    sent: list[int] = []

    async def run() -> tuple[bytes, Peaks]:
        loop, made = asyncio.get_running_loop(), loop_future()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader, lambda _, writer: made.set_result(writer))
        host = Connections(1)
        encrypted: Any = host.accepted(lambda: protocol, read_certificate(*pair))
        with connected() as (theirs, ours):
            raw, _ = await loop.connect_accepted_socket(lambda: encrypted, ours)
            theirs_reader, theirs_writer = await asyncio.open_connection(
                sock=theirs.dup(), ssl=authority.context(), server_hostname="localhost"
            )
            writer = await made
            assert isinstance(writer.transport.get_protocol(), Connection)
            writer.transport.set_write_buffer_limits(1)
            peaks, sender = Peaks(writer, raw), BodySender(BlobReader(store, lambda _: None))
            transport = cast("asyncio.Transport", writer.transport)
            sending = sender.send([part], peaks, transport, sent.append)

            async def read() -> bytes:
                got = bytearray()
                while len(got) < len(body):
                    got += await theirs_reader.read(4096)
                return bytes(got)

            _, got = await asyncio.gather(sending, read())
            sender.close()
            for one in (theirs_writer, writer):
                one.transport.abort()
            return got, peaks

    def loop_future() -> asyncio.Future[asyncio.StreamWriter]:
        return asyncio.get_running_loop().create_future()

    got, peaks = asyncio.run(run())
    assert got == body
    assert sum(sent) == len(body)
    assert 0 < peaks.most < WRITTEN * 1.01, "records are a little longer than what is in them"
    assert peaks.longest == WRITTEN // 2


def test_a_pair_is_replaced_one_file_after_the_other(
    store: LocalStore, tmp_path: Path, authority: Authority, pair: Pair
) -> None:
    store.root.mkdir()
    other = authority.pair("other")

    def subject(server: Serving) -> str:
        with connect(server) as plain:
            context = authority.context()
            with context.wrap_socket(plain, server_hostname="localhost") as client:
                certificate: Any = client.getpeercert()
        return str(certificate["subject"][0][0][1])

    with serving(store, tmp_path, *pair.options, tls=authority.context()) as server:
        assert subject(server) == "server"
        shutil.copy(other.chain, tmp_path / "next")
        (tmp_path / "next").replace(pair.chain)
        fault = server.wait_for_log("error", "is not that of the certificate")["error"]
        assert "BEGIN" not in fault
        assert subject(server) == "server", "the former pair holds"
        shutil.copy(other.key, tmp_path / "next")
        (tmp_path / "next").replace(pair.key)
        deadline = time.monotonic() + SECONDS
        while subject(server) != "other":
            assert time.monotonic() < deadline
            time.sleep(0.05)
