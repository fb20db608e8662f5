"""A real server, and clients that speak HTTP with it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.errors import ModelNotFound
from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.registry.client import RegistryClient
from blobstore.serve import server as server_module
from blobstore.serve.library import Library
from blobstore.serve.messages import Request, Response
from blobstore.serve.server import Server
from blobstore.serve.unprepared import NotFetched, NotListed, NotPrepared
from blobstore.store.local import LocalStore
from tests.support.cold import cold
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.support.serve_process import SECONDS, Serving, connect, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

TOKEN = "hf_a-secret-token"
GET = Request("GET", "/", {})


@pytest.fixture
def server(library: Library, tmp_path: Path) -> Iterator[Serving]:
    with serving(library.store, tmp_path) as running:
        yield running


def wait_until(is_reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def large_model(store: LocalStore, folder: Path) -> bytes:
    """Add ``org/large``, whose file is larger than what the system takes for a slow reader."""
    import numpy as np

    random = np.random.default_rng(3)
    tensors = {
        f"model.layers.{number}.weight": random.standard_normal((1024, 2048), dtype=np.float32)
        for number in range(6)
    }
    source = write_folder(folder / "large", tensors)
    create(source, "org/large", store=store)
    return (source / "model.safetensors").read_bytes()


def begin_large(client: socket.socket, *headers: bytes) -> bytes:
    """Ask for the file of ``org/large``, and return the first bytes of the response."""
    line = b"GET /org/large/resolve/main/model.safetensors HTTP/1.1"
    client.sendall(b"\r\n".join([line, b"Host: localhost", *headers, b"", b""]))
    return client.recv(1000)


def rest_of(client: socket.socket) -> bytes:
    """Return what a server sends until it closes the connection."""
    return b"".join(iter(lambda: client.recv(1 << 20), b""))


def test_what_is_done_from_time_to_time_survives_a_failure(store: LocalStore) -> None:
    tested = Server(store, None)

    async def run() -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        done: list[int] = []

        def act() -> None:
            done.append(len(done))
            if len(done) < 3:
                raise OSError(errno.EROFS, "read-only")
            loop.call_soon_threadsafe(ended.set)

        chore = asyncio.create_task(tested._repeat(0, act))
        await ended.wait()
        chore.cancel()

    asyncio.run(run())
    errors = [json.loads(line)["error"] for line in tested._log.lines]
    assert errors == [f"OSError: [Errno {errno.EROFS}] read-only"] * 2


def test_a_request_with_a_body_does_not_delay_the_others(store: LocalStore) -> None:
    tested = Server(store, None)
    threads = []

    def answer(_: Request, __: Callable[[], str]) -> Response:
        threads.append(threading.current_thread())
        return Response(200)

    for body in (b"", b"paths=config.json"):
        asyncio.run(tested._response(Request("POST", "/", {}, body), answer))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()


def test_a_client_asks_again_when_others_take_the_memory(store: LocalStore) -> None:
    tested = Server(store, None)

    def answer(*_: object) -> Response:
        raise limits.Crowded("the headers of the model")

    response = asyncio.run(tested._sound(Request("GET", "/", {}), answer))
    assert response.status == 503
    assert "Retry-After" in response.headers
    assert not tested._log.lines


def test_an_error_of_a_disk_is_logged_and_an_answer_like_that_of_damage(store: LocalStore) -> None:
    tested = Server(store, None)

    def answer(*_: object) -> Response:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    response = asyncio.run(tested._sound(Request("GET", "/", {}), answer))
    assert response.status == 500
    (line,) = map(json.loads, tested._log.lines)
    assert line["error"] == "a file cannot be read: [Errno 5] Input/output error"


class Unready:
    """Answers once so many requests for the same have been prepared."""

    def __init__(self, steps: int, kind: type[NotPrepared] = NotPrepared) -> None:
        self.steps, self.kind = steps, kind

    def prepare(self) -> None:
        self.steps -= 1

    def answer(self, _: Request, __: Callable[[], str]) -> Response:
        if self.steps:
            raise self.kind(self.prepare)
        return Response(200)


@pytest.mark.parametrize("kind", [NotPrepared, NotListed, NotFetched])
def test_a_client_waits_while_the_same_is_not_ready_again_and_again(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, kind: type[NotPrepared]
) -> None:
    monkeypatch.setattr(NotPrepared, "pause", 0)
    asked = Unready(100, kind)
    assert asyncio.run(Server(store, None)._response(GET, asked.answer)).status == 200
    assert asked.steps == 0


def test_only_an_answer_of_another_server_is_given_up_early(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PATIENCE_SECONDS", 0)
    for kind, status in ((NotPrepared, 200), (NotListed, 200), (NotFetched, 503)):
        asked = Unready(3, kind)
        assert asyncio.run(Server(store, None)._response(GET, asked.answer)).status == status


def test_a_client_does_not_wait_for_ever(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "PREPARE_SECONDS", 0)
    response = asyncio.run(Server(store, None)._response(GET, Unready(1).answer))
    assert (response.status, response.headers["Retry-After"]) == (503, "5")


def test_files_arrive_as_they_are(server: Serving, folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.relative_to(folder).as_posix()
            status, headers, body = server.request(f"/org/model/resolve/main/{name}")
            assert (status, body) == (200, path.read_bytes())
            assert headers["content-length"] == str(len(body))
            assert headers["server"] == "blobstore"


def test_headers_of_other_bytes_than_utf_8_are_answered(library: Library, tmp_path: Path) -> None:
    with serving(library.store, tmp_path, "--anonymous") as server:
        for name in ("authorization", "host", "range", "if-none-match", "prefer", "user-agent"):
            headers: Any = {name: "\xff"}
            status, _, _ = server.request("/api/models/org/model/tree/main?limit=1", **headers)
            assert status == 200, name


def test_one_connection_carries_many_requests(server: Serving, folder: Path) -> None:
    (name,) = [path.name for path in folder.glob("*-00001-of-*.safetensors")]
    data = (folder / name).read_bytes()
    connection = http.client.HTTPConnection(server.host, timeout=60)
    with contextlib.closing(connection):
        for _ in range(20):
            for method, expected in (("HEAD", b""), ("GET", data)):
                connection.request(method, f"/org/model/resolve/main/{name}")
                answer = connection.getresponse()
                assert answer.status == 200
                assert answer.getheader("Content-Length") == str(len(data))
                assert answer.read() == expected
            connection.request(
                "GET", f"/org/model/resolve/main/{name}", headers={"Range": "bytes=9-400"}
            )
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (206, data[9:401])
    wait_until(lambda: server.metric("open_connections") == 1)  # that of this request


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_resumes_a_download(server: Serving, folder: Path, tmp_path: Path) -> None:
    (source,) = folder.glob("*-00001-of-*.safetensors")
    target = tmp_path / "part"
    target.write_bytes(source.read_bytes()[:100])
    url = f"{server.url}/org/model/resolve/main/{source.name}"
    command = ["curl", "-sfC", "-", "-o", str(target), url]
    subprocess.run(command, check=True)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_no_body_of_what_it_has(server: Serving) -> None:
    url = f"{server.url}/org/model/resolve/main/config.json"
    etag = server.request("/org/model/resolve/main/config.json")[1]["etag"]
    command = ["curl", "-s", "-H", f"If-None-Match: {etag}", "-w", "%{http_code}", url]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"304"


def test_a_frozen_model_is_served(store: LocalStore, tmp_path: Path) -> None:
    data = large_model(store, tmp_path)
    freeze_models(["org/large"], store=store)
    with serving(store, tmp_path) as server:
        target = "/org/large/resolve/main/model.safetensors"
        assert server.request(target)[2] == data
        assert server.request(target, range="bytes=5000000-9000001")[2] == data[5000000:9000002]


def test_an_address_that_others_reach_needs_a_token(store: LocalStore) -> None:
    store.root.mkdir()
    command = [sys.executable, "-m", "blobstore.cli", "serve", "--host", "0.0.0.0", "--port=0"]
    result = subprocess.run(
        [*command, "--store", str(store.root)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "--token-file" in result.stderr


def test_a_server_with_an_upstream_needs_no_store(store: LocalStore, tmp_path: Path) -> None:
    with serving(store, tmp_path, "--upstream=http://127.0.0.1:9") as server:
        assert server.request("/healthz")[0] == 200


def test_a_port_that_is_taken_is_an_error(store: LocalStore) -> None:
    store.root.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "blobstore.cli", "serve", f"--port={port}"]
        result = subprocess.run(
            [*command, "--store", str(store.root)], capture_output=True, text=True, check=False
        )
    assert result.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


def test_tokens_are_read_again_and_never_logged(library: Library, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    with serving(library.store, tmp_path, "--host=0.0.0.0", f"--token-file={tokens}") as server:
        target = f"/org/model/resolve/main/config.json?token={TOKEN}"
        assert server.request("/healthz")[0] == 200
        assert server.request(target)[0] == 401
        assert server.request("/metrics")[0] == 401
        assert server.request(target, authorization="Bearer \xff\xfe")[0] == 401
        assert server.request(target, authorization=f"Bearer {TOKEN}")[0] == 200
        second = tmp_path / "second"
        second.write_text("another-secret-token\n")
        second.replace(tokens)
        deadline = time.monotonic() + 60
        while server.request(target, authorization=f"Bearer {TOKEN}")[0] == 200:
            assert time.monotonic() < deadline
        bearer = "Bearer another-secret-token"
        assert server.request("/api/models/org/model", authorization=bearer)[0] == 200
        tokens.write_text("")  # is being written: the last tokens stay valid
        assert server.request("/api/models/org/model", authorization=bearer)[0] == 200
        path = target.partition("?")[0]
        assert server.wait_for_log("status", "401")["path"] == path
    text = server.log_file.read_text()
    assert "secret" not in text


def test_a_response_is_finished_before_the_server_ends(store: LocalStore, tmp_path: Path) -> None:
    data = large_model(store, tmp_path)
    with (
        serving(store, tmp_path) as server,
        connect(server) as client,
    ):
        received = begin_large(client)
        server.process.send_signal(signal.SIGTERM)
        is_open = True
        while is_open:
            try:
                connect(server).close()
            except ConnectionRefusedError:
                is_open = False
            except ConnectionError:  # it was waiting to be accepted
                continue
            time.sleep(0.01)
        received += rest_of(client)
        assert received.partition(b"\r\n\r\n")[2] == data
        assert server.process.wait(timeout=60) == 128 + signal.SIGTERM


def test_a_model_that_is_removed_while_it_is_sent_is_sent_to_its_end(
    store: LocalStore, tmp_path: Path
) -> None:
    data = large_model(store, tmp_path)
    create(write_folder(tmp_path / "other", moe_tensors()), "other", store=store)
    with (
        serving(store, tmp_path) as server,
        connect(server) as client,
    ):
        received = begin_large(client, b"Connection: close")
        remove_models(["org/large"], store=store)
        collect_garbage(store=store, older_than=0, force=True)
        assert server.request("/api/models/org/large")[0] == 404
        received += rest_of(client)
    assert received.partition(b"\r\n\r\n")[2] == data


def test_a_model_that_is_frozen_while_it_is_sent_is_sent_to_its_end(
    store: LocalStore, tmp_path: Path
) -> None:
    data = large_model(store, tmp_path)
    with serving(store, tmp_path) as server, connect(server) as client:
        received = begin_large(client, b"Connection: close")
        freeze_models(["org/large"], store=store)
        received += rest_of(client)
    assert received.partition(b"\r\n\r\n")[2] == data


def test_a_server_that_is_killed_leaves_nothing_that_gc_does_not_remove(
    store: LocalStore, tmp_path: Path
) -> None:
    data = large_model(store, tmp_path)
    create(write_folder(tmp_path / "other", moe_tensors()), "other", store=store)
    with serving(store, tmp_path) as server, connect(server) as client:
        begin_large(client)
        server.process.kill()
        server.process.wait()
    assert not verify_models(store=store).faults
    remove_models(["org/large"], store=store)
    removed = collect_garbage(store=store, older_than=0, force=True)
    assert removed.size > len(data)
    assert not list(store.folder("leases").iterdir())


def test_a_damaged_blob_ends_the_connection_before_its_first_byte(
    store: LocalStore, tmp_path: Path
) -> None:
    data = large_model(store, tmp_path)
    target = "/org/large/resolve/main/model.safetensors"
    with serving(store, tmp_path) as server:
        assert server.request(target)[2] == data  # its digest is known, and its blobs are intact
        library = Library(store)
        manifest = store.resolve("org/large")
        layer = next(one for one in manifest.layers if one.name == "model.layers.3.weight")
        path = Path(store.blob_path(layer.digest))
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        path.chmod(0o644)
        path.write_bytes(changed)
        begin = data.index(bytes(changed[200:300])) - 200
        connection = http.client.HTTPConnection(server.host, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", target)
            answer = connection.getresponse()
            assert answer.status == 200
            with pytest.raises(http.client.IncompleteRead) as caught:
                answer.read()
        received = caught.value.partial
        assert begin - 200 <= len(received) <= begin + 200
        assert received == data[: len(received)]
        entry = server.wait_for_log("error", "is damaged")
        assert layer.digest.hex in entry["error"]
        status, _, body = server.request(target, range=f"bytes={begin + 1000}-{begin + 2000}")
        assert (status, b"log of the server" in body) == (500, True)
        assert server.request(target, range="bytes=0-9")[2] == data[:10]
        assert server.metric("store_errors_total") == server.metric("damaged_total") == 2
        assert server.metric("cache_hits_total") == 2, "the last one is in memory"
        assert server.metric("cache_misses_total") == 0
    assert library.store.root == store.root


@pytest.mark.parametrize("has_right_checksums", [True, False])
def test_a_damaged_cold_blob_ends_the_connection_before_its_first_wrong_byte(
    store: LocalStore, tmp_path: Path, has_right_checksums: bool
) -> None:
    data = large_model(store, tmp_path)
    layer = next(
        one for one in store.resolve("org/large").layers if one.name == "model.layers.3.weight"
    )
    blob = bytearray(Path(store.blob_path(layer.digest)).read_bytes())
    begin = data.index(bytes(blob[200:300])) - 200
    freeze_models(["org/large"], store=store)
    path = Path(store.cold_path(layer.digest))
    if has_right_checksums:
        blob[-1] ^= 1
        changed = bytearray(cold(bytes(blob), digest=layer.digest))
    else:
        changed = bytearray(path.read_bytes())
        changed[len(changed) // 2] ^= 1
    target = "/org/large/resolve/main/model.safetensors"
    with serving(store, tmp_path) as server:
        assert server.request(target, range="bytes=0-9")[2] == data[:10]  # its digest is known
        path.chmod(0o644)
        path.write_bytes(changed)
        connection = http.client.HTTPConnection(server.host, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", target)
            with pytest.raises(http.client.IncompleteRead) as caught:
                connection.getresponse().read()
        received = caught.value.partial
        assert begin - 200 <= len(received) <= begin + 200
        assert received == data[: len(received)]
        assert layer.digest.hex in server.wait_for_log("error", "cold blob")["error"]


def test_blobs_that_were_verified_are_not_hashed_again(store: LocalStore, tmp_path: Path) -> None:
    data = large_model(store, tmp_path)
    for path in store.folder("blobs").iterdir():
        os.utime(path, (1, 1))
    target = "/org/large/resolve/main/model.safetensors"
    # A file that has just changed may change again, so the server would hash those of the last seconds.
    limits = dict.fromkeys(
        ("blob_reader._MARGIN_NS", "blobstore.store.verified_cache._MARGIN_NS"), 0
    )
    for expected in (True, False):
        with serving(store, tmp_path, limits=limits) as server:
            assert server.request(target)[2] == data
            hashed = server.metric("verified_bytes_total")
            assert server.request(target)[2] == data
            assert server.metric("verified_bytes_total") == hashed
            assert (hashed > 0) in (expected, False)
            server.stop()
    assert hashed == 0


def test_digests_are_those_that_clients_compare(server: Serving) -> None:
    status, headers, body = server.request("/org/model/resolve/main/config.json")
    assert status == 200
    assert headers["etag"].strip('"') == Digest.of(body).hex


def test_a_form_that_is_too_large_is_refused(server: Serving) -> None:
    target = "/api/models/org/model/paths-info/main"
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.request(target, "POST", b"paths=config.json", **kind)[0] == 200
    assert server.request(target, "POST", b"x" * (2 << 20), **kind)[0] == 413


def test_a_form_that_does_not_arrive_is_refused(library: Library, tmp_path: Path) -> None:
    with serving(library.store, tmp_path, limits={"server.BODY_SECONDS": 0.05}) as server:
        host, _, port = server.host.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as client:
            client.sendall(
                b"POST /api/models/org/model/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 9\r\n\r\npaths="
            )
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_files_are_left_for_blobs_if_few_may_be_open() -> None:
    program = """
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[1])))
        from blobstore.serve.server import max_connections
        fetches = sys.argv[2] == "fetches"
        print(max_connections(fetches=fetches), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        """
    # Only some users may raise the second limit, and others have little.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    has_enough = hard == resource.RLIM_INFINITY or hard >= 12352
    enough = "4096 12352" if has_enough else f"{(hard - 64) // 3} {hard}"
    cases = (200, "", "45 200"), (200, "fetches", "12 200"), (hard, "", enough)
    for most, fetches, expected in cases:
        command = [sys.executable, "-c", textwrap.dedent(program), str(most), fetches]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
        assert result.stdout.strip() == expected


def test_dense_models_of_odd_names_are_served(store: LocalStore, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "dense", dense_tensors())
    create(source, "dense", store=store)
    with serving(store, tmp_path) as server:
        body = server.request("/dense/resolve/main/model.safetensors")[2]
    assert body == (source / "model.safetensors").read_bytes()


def test_a_client_hears_of_another_manifest_while_it_waits(
    server: Serving, library: Library, tmp_path: Path
) -> None:
    host = server.host
    with RegistryClient(host) as client:
        first, _ = client.watch_manifest("org/model", "latest", None, 30)
        waited = client.watch_manifest("org/model", "latest", first, 1)
        assert waited == (first, True)
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(client.watch_manifest, "org/model", "latest", first, 60)
            wait_until(lambda: server.metric("open_requests") == 2)
            source = write_folder(tmp_path / "new", moe_tensors())
            made = create(source, "org/model", store=library.store)
            assert later.result(60)[0] not in (first, made.digest)
        with pytest.raises(ModelNotFound):
            client.watch_manifest("org/model", "none", first, 1)


def test_a_client_that_waits_does_not_keep_the_server_from_ending(server: Serving) -> None:
    with RegistryClient(server.host) as client:
        first, _ = client.watch_manifest("org/model", "latest", None, 30)
        with ThreadPoolExecutor(1) as thread:
            later = thread.submit(client.watch_manifest, "org/model", "latest", first, 60)
            wait_until(lambda: server.metric("open_requests") == 2)
            assert server.stop() == 143
            assert later.result(60) == (first, True)
