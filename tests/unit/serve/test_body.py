"""Bodies that are sent to many clients at once, to slow ones, and to some that leave. The model is frozen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from blobstore.core import capacity
from blobstore.core.digest import Digest
from blobstore.errors import BlobDamaged
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.serve import blob_reader
from blobstore.serve.blob_reader import BlobReader, OpenBlob
from blobstore.serve.body import WINDOW, WRITTEN, BodySender, _sendfile
from blobstore.serve.messages import BlobPart
from blobstore.store.local import LocalStore
from tests.support.descriptors import open_files
from tests.support.models import write_folder
from tests.support.serve_process import SECONDS, Serving, connect, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

FILE = "/model/resolve/main/model.safetensors"
REQUEST = f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()


def frozen(store: LocalStore, folder: Path, values: int) -> bytes:
    """Add a frozen model of one tensor, whose blob is larger than a piece, and return its file."""
    weights = np.random.default_rng(0).standard_normal((values // 1024, 1024), dtype=np.float32)
    source = write_folder(folder / "source", {"weight": weights})
    create(source, "model", store=store)
    freeze_models(["model"], store=store)
    return (source / "model.safetensors").read_bytes()


class Draining:
    """Writes to a connection, and waits until the other end has taken it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer

    async def write(self, data: bytes | memoryview) -> None:
        self.writer.write(data)
        await self.writer.drain()


def received(client: socket.socket) -> bytes:
    """Return the body of the response that a connection gets, or its beginning if it is broken off."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            data += piece
    return bytes(data).partition(b"\r\n\r\n")[2]


@contextlib.contextmanager
def asked(server: Serving, count: int) -> Iterator[list[socket.socket]]:
    """Give a block so many connections that have asked for the file, and read nothing yet."""
    with contextlib.ExitStack() as held:
        clients = [held.enter_context(connect(server)) for _ in range(count)]
        for client in clients:
            client.sendall(REQUEST)
        yield clients


def test_a_blob_that_is_repaired_while_it_is_checked_is_sent_as_it_is_then(
    store: LocalStore, tmp_path: Path
) -> None:
    """Its file was open when it was damaged, and what was checked is another file."""
    path = Path(store.blob_path(Digest.of(b"x" * 1000)))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"y" * 1000)

    class Repairing(BlobReader):
        is_repaired = False

        def verify(self, digest: Digest, size: int) -> object:
            if not self.is_repaired:
                self.is_repaired = True
                right = tmp_path / "right"
                right.write_bytes(b"x" * 1000)
                right.replace(path)
            return super().verify(digest, size)

    async def opened() -> OpenBlob:
        sender = BodySender(Repairing(store, lambda _: None))
        blob = await sender._open(BlobPart(Digest.of(b"x" * 1000), 1000, 0, 1000))
        sender.close()
        return blob

    blob = asyncio.run(opened())
    assert blob.descriptor is not None
    try:
        assert os.pread(blob.descriptor, 2000, 0) == b"x" * 1000
    finally:
        blob.close()
    assert not open_files(path.parent), "that of the damaged file is closed, too"


def test_a_blob_that_is_damaged_leaves_no_file_open(store: LocalStore) -> None:
    digest = Digest.of(b"x" * 1000)
    path = Path(store.blob_path(digest))
    path.parent.mkdir(parents=True)
    path.write_bytes(b"y" * 1000)

    async def opened() -> None:
        sender = BodySender(BlobReader(store, lambda _: None))
        with pytest.raises(BlobDamaged):
            await sender.first([BlobPart(digest, 1000, 0, 1000)])
        sender.close()

    asyncio.run(opened())
    assert not open_files(path.parent)


@pytest.mark.parametrize("can_sendfile", [True, False])
@pytest.mark.parametrize("size", [100, 9 << 20])
def test_a_range_of_a_file_is_sent_as_it_is(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, size: int, can_sendfile: bool
) -> None:
    def refuse(*_: int) -> int:
        raise OSError(errno.EINVAL, "this file system cannot")

    if not can_sendfile:
        monkeypatch.setattr(os, "sendfile", refuse)
    data = os.urandom(size)
    digest = Digest.of(data)
    path = Path(store.blob_path(digest))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)

    async def run() -> tuple[bytes, int]:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        reader, other = await asyncio.open_connection(sock=theirs)

        sender, sent = BodySender(BlobReader(store, lambda _: None)), list[int]()
        receiving = asyncio.create_task(reader.read())
        part = BlobPart(digest, size, 10, size - 20)
        transport: Any = writer.transport
        await sender.send([part], Draining(writer), transport, sent.append)
        writer.close()
        received = await receiving
        other.close()
        sender.close()
        return received, sum(sent)

    assert asyncio.run(run()) == (data[10:-10], size - 20)


@pytest.mark.parametrize(
    ("count", "broken", "error"),
    [
        (100_000, ("sendfile", "pread"), BlobDamaged),
        (1000, ("pread",), BlobDamaged),
        (100_000, ("sendfile",), OSError),
    ],
)
def test_a_blob_that_cannot_be_sent_is_read_again(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    broken: tuple[str, ...],
    error: type[Exception],
) -> None:
    """That shows whether the disk has lost its bytes, or something else has failed."""
    data = os.urandom(count)
    path = Path(store.blob_path(Digest.of(data)))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    monkeypatch.setattr(blob_reader, "_MARGIN_NS", 0)
    reader, part = BlobReader(store, lambda _: None), BlobPart(Digest.of(data), count, 0, count)
    reader.verify(part.digest, part.size)

    def fail(*_: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def run() -> None:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        sender, transport = BodySender(reader), cast("asyncio.Transport", writer.transport)
        with pytest.raises(error) as caught, theirs:
            await sender.send([part], cast("Any", writer), transport, lambda _: None)
        assert caught.type is error
        sender.close()
        writer.close()

    with monkeypatch.context() as patch:
        for name in broken:
            patch.setattr(os, name, fail)
        asyncio.run(run())
    blob = reader.open(part)
    os.close(cast("int", blob.descriptor))
    assert blob.is_verified == (error is OSError)
    assert not open_files(path.parent)


@pytest.mark.parametrize("can_sendfile", [True, False])
@pytest.mark.parametrize("size", [1000, 100_000, WINDOW + 100_000])
@pytest.mark.parametrize("is_last", [True, False])
def test_no_blob_that_is_written_to_while_it_is_sent_is_sent_to_its_end(
    store: LocalStore,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    is_last: bool,
    can_sendfile: bool,
) -> None:
    """Another program writes to it after it was found intact, and before its last bytes are read."""
    monkeypatch.setattr(blob_reader, "_MARGIN_NS", 0)  # it is not verified again
    data = os.urandom(size)
    part = BlobPart(Digest.of(data), size, 0, size)
    path = Path(store.blob_path(part.digest))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    os.utime(path, (1, 1))
    reader = BlobReader(store, lambda _: None)
    reader.verify(part.digest, part.size)
    actual = {name: getattr(os, name) for name in ("sendfile", "pread")}

    def writing(name: str) -> Callable[..., object]:
        def act(*arguments: int) -> object:
            with path.open("r+b") as file:
                file.seek(size - 1)
                file.write(bytes([data[-1] ^ 1]))
            if name == "sendfile" and not can_sendfile:
                raise OSError(errno.EINVAL, "this file system cannot")
            return actual[name](*arguments)

        return act

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        _, writer = await asyncio.open_connection(sock=ours)
        other, end = await asyncio.open_connection(sock=theirs)
        receiving = asyncio.create_task(other.read())
        sender = BodySender(reader)
        with monkeypatch.context() as patch:
            for name in actual:
                patch.setattr(os, name, writing(name))
            with pytest.raises(BlobDamaged):
                await sender.send(
                    [part] if is_last else [part, b"end"],
                    Draining(writer),
                    cast("Any", writer.transport),
                    lambda _: None,
                )
        writer.close()
        received = await receiving
        end.close()
        sender.close()
        return received

    received = asyncio.run(run())
    assert len(received) < size + (0 if is_last else 3)
    assert b"end" not in received[size:]


def test_a_blob_that_is_linked_or_loses_its_name_while_it_is_sent_is_the_same(
    store: LocalStore, tmp_path: Path
) -> None:
    data = os.urandom(1000)
    path = Path(store.blob_path(Digest.of(data)))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    blob = BlobReader(store, lambda _: None).open(BlobPart(Digest.of(data), 1000, 0, 1000))
    os.link(path, tmp_path / "link")
    path.unlink()
    blob.check_same()
    blob.close()


def test_others_are_served_between_the_small_ranges_of_a_file(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_reader, "_MARGIN_NS", 0)  # it is not verified again
    data, turns = bytes(range(100)), list[int]()
    path = Path(store.blob_path(Digest.of(data)))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)

    class Fast:
        async def write(self, data: bytes | memoryview) -> None:
            assert len(data) == 1

    async def others() -> None:
        while True:
            turns.append(1)
            await asyncio.sleep(0)

    async def run() -> None:
        sender, transport = BodySender(BlobReader(store, lambda _: None)), cast("Any", None)
        parts = [BlobPart(Digest.of(data), 100, place, 1) for place in range(100)]
        await sender.first(parts)
        with contextlib.suppress(asyncio.CancelledError):
            other = asyncio.create_task(others())
            await sender.send(parts, Fast(), transport, lambda _: None)
            other.cancel()
            await other
        sender.close()

    asyncio.run(run())
    assert len(turns) >= len(data)


def test_the_loop_goes_on_while_a_client_does_not_take_the_head(tmp_path: Path) -> None:
    head, body = bytes(8 << 20), b"body"
    file = tmp_path / "file"
    file.write_bytes(body)

    async def run() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, file.open("rb") as opened:
            theirs.setblocking(False)
            transport, _ = await loop.create_connection(asyncio.Protocol, sock=ours)
            transport.write(head)
            assert transport.get_write_buffer_size()
            sending = asyncio.create_task(_sendfile(transport, opened.fileno(), 0, len(body)))
            got = b""
            while len(got) < len(head) + len(body):
                got += await loop.sock_recv(theirs, 1 << 20)
            assert await sending
            transport.close()
            return got

    assert asyncio.run(run()) == head + body


def test_a_long_part_is_written_in_pieces(store: LocalStore) -> None:
    part, written = bytes(range(256)) * 3000, list[bytes]()

    class Slow:
        async def write(self, data: bytes | memoryview) -> None:
            written.append(bytes(data))

    async def run() -> None:
        sender = BodySender(BlobReader(store, lambda _: None))
        transport: Any = None
        await sender.send([part, b""], Slow(), transport, lambda _: None)
        sender.close()

    asyncio.run(run())
    assert b"".join(written) == part
    assert max(map(len, written)) == WRITTEN // 2


@pytest.mark.parametrize("more", [1, 40])
def test_more_clients_than_pieces_get_a_frozen_model(
    store: LocalStore, tmp_path: Path, more: int
) -> None:
    data = frozen(store, tmp_path, 1 << 19)
    count = capacity.DECODED.most + more
    with serving(store, tmp_path) as server, asked(server, count) as clients:
        with ThreadPoolExecutor(count) as threads:
            assert all(body == data for body in threads.map(received, clients))
        assert server.request(FILE)[2] == data


def test_clients_that_leave_give_their_pieces_back(store: LocalStore, tmp_path: Path) -> None:
    data = frozen(store, tmp_path, 1 << 20)
    with serving(store, tmp_path) as server:
        with asked(server, capacity.DECODED.most + 40) as clients:
            for client in clients:
                client.recv(100)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        for _ in range(2):
            assert server.request(FILE)[2] == data
        assert not [entry for entry in server.log() if "error" in entry]


def test_clients_that_take_nothing_yield_their_pieces(store: LocalStore, tmp_path: Path) -> None:
    # The file is larger than what the system takes for a client that reads nothing.
    data = frozen(store, tmp_path, 6 << 20)
    limits = {"decoded_pieces._DECODED": 1, "decoded_pieces._GRACE_SECONDS": 0.05}
    with (
        serving(store, tmp_path, limits=limits) as server,
        asked(server, 3) as silent,
    ):
        assert server.request(FILE)[2] == data
        assert server.metric("broken_responses_total") >= 1  # of those who read nothing
        for client in silent:
            assert data.startswith(received(client))


def test_a_server_ends_in_time_whatever_clients_do(store: LocalStore, tmp_path: Path) -> None:
    frozen(store, tmp_path, 6 << 20)
    limits = {
        "server.STALL_SECONDS": 10 * SECONDS,
        "server.IDLE_SECONDS": 10 * SECONDS,
        "server._CLEANUP_SECONDS": 59.9,  # so that the responses have a tenth of a second
    }
    with (
        serving(store, tmp_path, "--drain=60", limits=limits) as server,
        asked(server, 2) as silent,
        connect(server) as slow,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: loc")  # a head without an end
        assert silent[0].recv(100)
        assert server.stop() == 143
        entry = server.wait_for_log("stopping")
        assert entry["stopping"] == "SIGTERM"
        assert entry["open_requests"] >= 1
        lines = server.log_file.read_text().splitlines()
        assert all(line.startswith("{") for line in lines)
