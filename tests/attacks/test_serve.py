"""Hostile clients of ``blobstore serve``: what they send, and what they do not read."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from blobstore.core import capacity
from blobstore.operations.create.create import create
from blobstore.serve.server import MAX_CONNECTIONS
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.serve_process import SECONDS, Serving, connect, serving

pytest.importorskip("aiohttp", reason="it is in the test group, and in the extra [serve]")

FILE = "/org/model/resolve/main/model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    """Return a store with ``org/model``, whose file is larger than the system's buffers of a connection."""
    folder = tmp_path_factory.mktemp("models")
    random = np.random.default_rng(5)
    tensors = {
        f"layers.{number}.weight": random.standard_normal((1024, 2048), dtype=np.float32)
        for number in range(4)
    }
    store = LocalStore(folder / "store")
    create(write_folder(folder / "source", tensors), "org/model", store=store)
    return store


@pytest.fixture(scope="module")
def data(models: LocalStore) -> bytes:
    """Return the file of ``org/model``."""
    return (models.root.parent / "source" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def server(models: LocalStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(models, tmp_path_factory.mktemp("server")) as running:
        yield running


def exchange(server: Serving, sent: bytes) -> bytes:
    """Return what the server says to some bytes until it ends the connection."""
    with connect(server) as client:
        client.sendall(sent)
        return rest_of(client)


def rest_of(client: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(1 << 20):
            received += piece
    return received


def get(target: str, *headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "Host: localhost", *headers, "Connection: close"]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


@pytest.mark.parametrize(
    "target",
    [
        "/../../../../etc/passwd",
        "/org/model/resolve/main/../../../../../etc/passwd",
        "/org/model/resolve/main/..%2f..%2f..%2fetc%2fpasswd",
        "/org/model/resolve/main/%2e%2e/%2e%2e/etc/passwd",
        "/org/model/resolve/..%2f..%2f..%2fetc/passwd",
        "/org/..%2f..%2fblobs/resolve/main/config.json",
        "/api/models/..%2f..%2f..%2fetc/passwd",
        "/v2/org/model/blobs/sha256:..%2f..%2f..%2fetc%2fpasswd",
        "/v2/org/model/manifests/..%2f..%2f..%2fetc%2fpasswd",
        "/v2/../../etc/passwd/manifests/latest",
        "/v2/org/model/manifests/latest?ns=..%2f..%2fetc",
        "/..%2f..%2fetc/org/model/resolve/main/passwd",
        "/..%2f..%2f.etc/passwd/resolve/main/config.json",
        "/api/models/org/model/tree/main/..%2f..%2f..%2fetc",
        "/api/models/org/model/revision/..%2f..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
        "/org/model/resolve/main/config.json%00.safetensors",
    ],
)
def test_no_target_leads_out_of_the_models(server: Serving, target: str) -> None:
    received = exchange(server, get(target))
    assert received.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), received
    assert b"root:" not in received


def test_no_path_of_a_form_leads_out_of_the_models(server: Serving) -> None:
    paths = ("../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "config.json/../..")
    body = "&".join(f"paths={path}" for path in paths).encode()
    target = "/api/models/org/model/paths-info/main"
    as_json = json.dumps({"paths": paths}).encode()
    for kind, sent in (("x-www-form-urlencoded", body), ("json", as_json)):
        headers = {"Content-Type": f"application/{kind}"}
        assert server.request(target, "POST", sent, **headers)[::2] == (200, b"[]")


@pytest.mark.parametrize(
    "target",
    [
        "/org/x%0d%0aSet-Cookie:%20a=b/resolve/main/f",
        "/api/models/org/model/tree/main?limit=1&cursor=%0d%0aSet-Cookie:a",
        "/api/models/org/model/tree/main?recursive=true&limit=1&x=%0d%0aSet-Cookie:%20a",
        "/v2/org/model/tags/list?n=1&last=%0d%0aSet-Cookie:a",
    ],
)
def test_no_text_of_a_request_becomes_a_header(server: Serving, target: str) -> None:
    head = exchange(server, get(target)).partition(b"\r\n\r\n")[0]
    assert b"set-cookie" not in head.lower().replace(b"%0d%0aset-cookie", b"")


def test_a_host_of_the_client_becomes_no_other_header(server: Serving) -> None:
    sent = get("/api/models/org/model/tree/main?limit=1").replace(
        b"Host: localhost", b'Host: localhost"> ; x=<a'
    )
    head = exchange(server, sent).partition(b"\r\n\r\n")[0]
    assert b"x=<a" not in head


def test_ranges_by_the_thousand_cost_no_more_than_the_file(server: Serving, data: bytes) -> None:
    ranges = "Range: bytes=" + ",".join(f"{number}-{number}" for number in range(1500))
    received = exchange(server, get(FILE, ranges))
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == data


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 200 + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : a\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
        b"GET /" + b"a" * (1 << 17) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * (1 << 17) + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    ],
)
def test_a_malformed_request_ends_the_connection(server: Serving, sent: bytes) -> None:
    received = exchange(server, sent)
    assert received == b"" or received.startswith(b"HTTP/1."), received
    assert b" 200 " not in received[:20]
    assert server.request("/healthz")[0] == 200


def test_a_body_without_an_end_is_refused(server: Serving) -> None:
    with connect(server) as client:
        client.sendall(
            b"POST /api/models/org/model/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                client.sendall(b"10000\r\n" + b"a" * 0x10000 + b"\r\n")
    assert server.wait_for_log("status", "413")


@pytest.mark.parametrize(
    ("target", "head", "status"),
    [
        ("/nothing", b"Host: localhost", b"405"),
        (
            "/api/models/org/model/paths-info/main",
            b"Host: evil.example\r\nContent-Type: application/json",
            b"421",
        ),
        (
            "/api/models/org/model/paths-info/main",
            b"Host: localhost\r\nSec-Fetch-Site: cross-site\r\nContent-Type: application/json",
            b"403",
        ),
        (
            "/api/models/org/model/paths-info/main",
            b"Host: localhost\r\nContent-Type: text/plain",
            b"415",
        ),
    ],
)
def test_no_body_is_waited_for_that_the_head_does_not_allow(
    server: Serving, target: str, head: bytes, status: bytes
) -> None:
    with connect(server) as client:
        client.sendall(
            b"POST %s HTTP/1.1\r\n%s\r\nContent-Length: 1000\r\n\r\n" % (target.encode(), head)
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 " + status)


@pytest.mark.parametrize(
    ("target", "status"),
    [("/v2/org/model/blobs/uploads/", 405), ("/api/models/org/model/paths-info/main", 413)],
)
def test_a_client_that_sends_all_of_a_body_first_hears_that_it_is_refused(
    server: Serving, target: str, status: int
) -> None:
    body = bytes(16 << 20)  # more than sockets hold
    assert server.request(target, "POST", body, Content_Type="application/json")[0] == status


def test_a_form_that_does_not_go_on_gives_its_memory_to_others(
    data: bytes, models: LocalStore, tmp_path: Path
) -> None:
    def form(text: bytes, size: int) -> bytes:
        return (
            b"POST /api/models/org/model/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        ) % (size, text)

    limits = {"server.MAX_TEXTS": 1100, "server.BODY_SECONDS": SECONDS}
    small = b'{"paths": []}'.ljust(200)
    with serving(models, tmp_path, limits=limits) as server, connect(server) as silent:
        silent.sendall(form(b" " * 999, 1000))
        while not select.select([silent], [], [], 0)[0]:  # until it is read, and ended
            assert answer_of(server, form(small, len(small))).startswith(b"HTTP/1.1 200")
        assert not silent.recv(1)


def test_answers_take_of_the_same_memory(data: bytes, models: LocalStore, tmp_path: Path) -> None:
    with serving(models, tmp_path, limits={"server.MAX_TEXTS": 100}) as server:
        for target in ("/api/models/org/model", "/api/models"):
            status, headers, _ = server.request(target)
            assert (status, headers["retry-after"]) == (503, "5")
        assert server.request("/healthz")[0] == 200
        assert server.request("/org/model/resolve/main/model.safetensors")[2] == data


def test_a_request_for_another_host_is_refused(server: Serving) -> None:
    sent = get(FILE).replace(b"localhost", b"evil.example")
    assert exchange(server, sent).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    "host",
    [
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "localhost@evil.example",
        "evil.example:80@localhost:80",
        "2130706433",
        "",
    ],
)
def test_a_host_name_that_may_be_rebound_gets_nothing(server: Serving, host: str) -> None:
    sent = get(FILE).replace(b"Host: localhost", f"Host: {host}".encode())
    assert exchange(server, sent).startswith(b"HTTP/1.1 421")


@pytest.mark.parametrize(
    "heads",
    [
        f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n",
        f"GET {FILE} HTTP/1.1\r\nHost: evil.example\r\nHost: localhost\r\n",
        f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\n evil.example\r\n",
        f"GET {FILE} HTTP/1.1\r\n",
        f"GET {FILE} HTTP/1.0\r\n",
        f"GET {FILE}\r\n",
        f"GET http://u@localhost{FILE} HTTP/1.1\r\nHost: localhost\r\n",
        f"GET http://evil.example{FILE} HTTP/1.1\r\nHost: localhost\r\n",
        "CONNECT evil.example:443 HTTP/1.1\r\nHost: localhost\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n",
    ],
)
def test_a_request_in_another_form_is_refused(server: Serving, heads: str) -> None:
    received = exchange(server, f"{heads}Connection: close\r\n\r\n".encode())
    assert received.partition(b" ")[2][:3] in (b"400", b"421"), received[:100]


def test_a_target_with_our_host_is_answered(server: Serving, data: bytes) -> None:
    sent = get(FILE).replace(b"GET /", b"GET http://LOCALHOST:1/")
    assert exchange(server, sent).endswith(data)


@pytest.mark.parametrize(
    "header",
    [
        "Upgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nConnection: HTTP2-Settings",
        "Upgrade: websocket\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
        "Expect: something",
    ],
)
def test_a_client_that_asks_for_another_protocol_gets_none(
    server: Serving, data: bytes, header: str
) -> None:
    head, _, body = exchange(server, get(FILE, header)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == data


def test_an_old_client_gets_the_file_and_the_end_of_the_connection(
    server: Serving, data: bytes
) -> None:
    sent = f"GET {FILE} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode()
    assert exchange(server, sent).partition(b"\r\n\r\n")[2] == data


@pytest.mark.parametrize("framing", ["Content-Length: {}", "Transfer-Encoding: chunked"])
def test_a_request_in_the_body_of_another_is_not_answered(server: Serving, framing: str) -> None:
    inner = get("/metrics")
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(inner), inner) if "chunked" in framing else inner
    outer = f"GET /healthz HTTP/1.1\r\nHost: localhost\r\n{framing.format(len(inner))}\r\n\r\n"
    received = exchange(server, outer.encode() + sent + get("/none"))
    assert received.count(b"HTTP/1.1 200") == 1
    assert b"blobstore_requests_total" not in received


def test_a_head_or_a_form_that_comes_byte_by_byte_is_let_go(
    data: bytes, models: LocalStore, tmp_path: Path
) -> None:
    limits = {"server.IDLE_SECONDS": 0.3, "server.BODY_SECONDS": 0.3}
    with serving(models, tmp_path, limits=limits) as server:
        with contextlib.ExitStack() as held:
            slow = [held.enter_context(connect(server)) for _ in range(50)]
            for letter in b"GET / HTTP/1.1\r\nX: " + b"a" * 2000:
                with contextlib.suppress(ConnectionError):
                    for client in slow:
                        client.sendall(bytes([letter]))
                if is_alone(server):
                    break
                time.sleep(0.02)
            else:
                pytest.fail("connections are kept")
        form = (
            b"POST /api/models/org/model/paths-info/main HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\npaths"
        )
        answer = b""
        while not answer:
            with connect(server) as client, contextlib.suppress(ConnectionError):
                client.sendall(form)
                answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 413")
        assert answer_of(server, get(FILE)).endswith(data)


def is_alone(server: Serving) -> bool:
    """Return whether the server has no connection but that of this question."""
    return b"\nblobstore_open_connections 1\n" in answer_of(server, get("/metrics"))


def answer_of(server: Serving, sent: bytes) -> bytes:
    """Ask until there is an answer: a busy machine may be too slow for the patience of the server."""
    while not (answer := exchange(server, sent)):
        pass
    return answer


def test_who_does_not_read_is_let_go(data: bytes, models: LocalStore, tmp_path: Path) -> None:
    limits = {"server.STALL_SECONDS": 2}
    with serving(models, tmp_path, limits=limits) as server, connect(server) as slow:
        assert answer_of(server, get(FILE)).endswith(data)  # nothing is left to prepare
        slow.sendall(get(FILE))
        while all(entry["bytes"] >= len(data) for entry in server.log() if entry["status"] == 200):
            time.sleep(0.02)
        assert server.metric("broken_responses_total") == 1
        assert server.metric("open_requests") == 1  # that of this question


def test_who_says_nothing_is_let_go(store: LocalStore, tmp_path: Path) -> None:
    store.root.mkdir()
    with (
        serving(store, tmp_path, limits={"server.IDLE_SECONDS": 0.3}) as server,
        connect(server) as silent,
        connect(server) as slow,
    ):
        slow.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert rest_of(silent) == b""
        assert rest_of(slow) == b""


@pytest.mark.parametrize("more", [1, 40])
def test_connections_beyond_the_limit_are_refused(
    store: LocalStore, tmp_path: Path, more: int
) -> None:
    assert capacity.CONNECTIONS.most == MAX_CONNECTIONS
    store.root.mkdir()
    limits = {"server.MAX_CONNECTIONS": 3, "connection.GRACE_SECONDS": 1000}
    with (
        serving(store, tmp_path, limits=limits) as server,
        contextlib.ExitStack() as held,
    ):
        for _ in range(3):
            client = held.enter_context(connect(server))
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        for _ in range(more):
            with connect(server) as other:
                assert rest_of(other).startswith(b"HTTP/1.1 503")
        held.pop_all().close()  # they leave
        while not exchange(server, get("/healthz")).startswith(b"HTTP/1.1 200"):
            pass


def test_connections_that_say_nothing_or_read_nothing_keep_nobody_out(
    data: bytes, models: LocalStore, tmp_path: Path
) -> None:
    limits = {"server.MAX_CONNECTIONS": 3, "connection.GRACE_SECONDS": 0}
    with serving(models, tmp_path, limits=limits) as server, contextlib.ExitStack() as held:
        for sent in (b"", b"GET / HTTP/1.1\r\nHost: loc", get(FILE)) * 3:
            held.enter_context(connect(server)).sendall(sent)
        for _ in range(3):
            assert answer_of(server, get(FILE)).endswith(data)


def test_connections_that_come_at_once_are_counted_before_they_are_made(
    store: LocalStore, tmp_path: Path
) -> None:
    store.root.mkdir()
    limits = {"server.MAX_CONNECTIONS": 3, "connection.GRACE_SECONDS": 1000}
    with (
        serving(store, tmp_path, limits=limits) as server,
        contextlib.ExitStack() as held,
    ):
        pid = server.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        clients = [held.enter_context(connect(server)) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        os.kill(pid, signal.SIGCONT)
        # Those that are refused may end before their request was read.
        statuses = []
        for client in clients:
            with contextlib.suppress(ConnectionError):
                statuses.append(client.recv(1000)[9:12])
        assert 0 < statuses.count(b"200") <= 3


def test_a_thousand_idle_connections_cost_little(server: Serving, data: bytes) -> None:
    assert server.request(FILE)[2] == data
    before = private_memory(server)
    with contextlib.ExitStack() as held:
        for _ in range(900):
            client = held.enter_context(connect(server))
            client.sendall(b"HEAD " + FILE.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        assert server.request(FILE)[2] == data
        assert private_memory(server) - before < 40 << 20


def private_memory(server: Serving) -> int:
    """Return the bytes of memory that a server shares with no other process."""
    text = Path(f"/proc/{server.process.pid}/smaps_rollup").read_text(encoding="ascii")
    found = [line.split() for line in text.splitlines() if line.startswith("Private_")]
    return sum(int(size) << 10 for _, size, _ in found)


def test_requests_in_a_row_are_answered_in_order(server: Serving, data: bytes) -> None:
    many = b"".join(
        f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\nRange: bytes={number}-{number}\r\n\r\n".encode()
        for number in range(1500)  # more bytes than are read ahead
    )
    with connect(server) as client:
        client.sendall(many + get("/healthz"))
        received = rest_of(client)
    bodies = [part.partition(b"\r\n\r\n")[2] for part in received.split(b"HTTP/1.1 ")[1:]]
    assert b"".join(bodies[:1500]) == data[:1500]
    assert bodies[1500:] == [b"ok\n"]


def test_who_leaves_in_the_middle_leaves_nothing_behind(server: Serving, data: bytes) -> None:
    for _ in range(20):
        with connect(server) as client:
            client.sendall(get(FILE))
            client.recv(10)
    assert server.request(FILE)[2] == data
    descriptors = Path(f"/proc/{server.process.pid}/fd")
    # The server may yet have to learn of some; the whole suite has a time limit.
    while sum("sha256-" in str(path.resolve()) for path in descriptors.iterdir()) > 1:
        time.sleep(0.02)


def test_a_token_that_its_file_lacks_now_is_refused_whatever_else_the_file_has(
    data: bytes, models: LocalStore, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-leaked-token\n")
    with serving(models, tmp_path, "--token-file", str(tokens)) as server:

        def wait_until(token: str, status: int) -> None:
            deadline = time.monotonic() + SECONDS
            while server.request(FILE, "HEAD", Authorization=f"Bearer {token}")[0] != status:
                assert time.monotonic() < deadline, (token, status)
                time.sleep(0.05)

        wait_until("a-leaked-token", 200)
        tokens.write_text("the-new-token\nmy token\n")
        wait_until("a-leaked-token", 401)
        wait_until("the-new-token", 200)
        assert "my token" not in server.wait_for_log("error", "line 2 of the token file")["error"]
        tokens.unlink()
        wait_until("the-new-token", 401)
        server.wait_for_log("error", "cannot read the token file")
        assert server.request(FILE, "HEAD")[0] == 401
        tokens.write_text("the-new-token\n")
        wait_until("the-new-token", 200)
        tokens.write_text("#\n")
        wait_until("the-new-token", 401)
        server.wait_for_log("error", "the token file has 0 tokens")


def test_a_token_file_that_is_half_written_changes_nothing(
    models: LocalStore, tmp_path: Path
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("the-old-token\n")
    with serving(models, tmp_path, "--token-file", str(tokens)) as server:
        tokens.write_text("the-new-token\nthe-third")
        server.wait_for_log("error", "has no newline at its end; what it had before holds")
        for token, status in {"the-old-token": 200, "the-new-token": 401, "the-third": 401}.items():
            found = server.request(FILE, "HEAD", Authorization=f"Bearer {token}")[0]
            assert found == status
        tokens.write_text("the-new-token\nthe-third-token\n")
        while server.request(FILE, "HEAD", Authorization="Bearer the-third-token")[0] != 200:
            time.sleep(0.05)
        assert server.request(FILE, "HEAD", Authorization="Bearer the-old-token")[0] == 401
