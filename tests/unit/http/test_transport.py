"""Proxies, certificates and rates, as the environment and the user say."""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import errno
import ipaddress
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
from httpcore2._backends.sync import SyncStream

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.rate_limit import RateLimiter
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobstoreError, RemoteError, RemoteRefused
from blobstore.http import transport
from blobstore.http.certificates import tls_context
from blobstore.http.retry import Patience
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from tests.support.raw_server import Answer, RawServer, Received, reply
from tests.support.stub_registry import StubRegistry

DATA = bytes(100_000)
DIGEST = Digest.of(DATA)
NOBODY = GivenLogin(None)
ONCE = Patience(attempts=1)
CERTIFICATES = ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def test_a_document_that_finds_no_memory_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = limits.Memory(1000)
    monkeypatch.setattr(limits, "DOCUMENTS", memory)
    others = limits.Held()
    others.add(990, "others")
    asked = []

    def answer(received: Received) -> Answer:
        asked.append(received)
        if len(asked) == 2:
            others.release()
        return reply(200, b'{"tags":["one"]}')

    with RawServer(answer) as server:
        patience = Patience(attempts=2, first=0)
        with RegistryClient(server.host, credentials=NOBODY, patience=patience) as client:
            assert list(client.tags("x")) == ["one"]
        assert len(asked) == 2
        others.add(990, "others")
        with (
            RegistryClient(server.host, credentials=NOBODY, patience=patience) as client,
            pytest.raises(RemoteError, match="too many large documents") as caught,
        ):
            list(client.tags("x"))
        assert caught.value.status == 503


class TunnelProxy:
    """A proxy that connects to the host of a CONNECT request, or only sends ``answered``."""

    def __init__(self, answered: bytes | None = None) -> None:
        self.heads: list[str] = []
        self._answered = answered
        self._server = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.getsockname()[1]}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # it is closed, or a client or a server has gone
            self._pass_on(self._server.accept()[0])

    def _pass_on(self, client: socket.socket) -> None:
        with client:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += (piece := client.recv(1))
                if not piece:
                    return
            self.heads.append(head.decode())
            if self._answered is not None:
                client.sendall(self._answered)
                return
            host, _, port = self.heads[0].split()[1].rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join(10)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), *CERTIFICATES):
        monkeypatch.delenv(name, raising=False)


def size(host: str, *, plain_http: bool | None = None) -> int | None:
    with RegistryClient(host, plain_http=plain_http, credentials=NOBODY, patience=ONCE) as client:
        return client.blob_size("a", DIGEST)


def answer(_: Received) -> bytes:
    return reply(200, content_length=17)


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_plain_requests_go_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    with RawServer(answer) as proxy:
        monkeypatch.setenv(variable, f"http://{proxy.host}")
        assert size("registry.example", plain_http=True) == 17

    assert proxy.requests[0].path == f"http://registry.example/v2/a/blobs/{DIGEST}"


def test_encrypted_requests_ask_the_proxy_for_a_tunnel(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(lambda _: reply(403)) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy.host)
        with pytest.raises(RemoteError, match="lost the connection to 'https://registry.example'"):
            size("registry.example")

    assert (proxy.requests[0].method, proxy.requests[0].path) == ("CONNECT", "registry.example:443")


@pytest.mark.parametrize("exception", ["*", "registry.invalid", ".invalid"])
def test_exceptions_from_the_proxy_are_respected(
    monkeypatch: pytest.MonkeyPatch, exception: str
) -> None:
    with RawServer(answer) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy.host}")
        monkeypatch.setenv("no_proxy", f"other.example,{exception}")
        with pytest.raises(RemoteError, match="cannot connect"):
            size("registry.invalid", plain_http=True)

    assert proxy.requests == []


def test_this_machine_is_never_asked_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    with RawServer(answer) as server, RawServer(answer) as proxy:
        for variable in PROXIES[:3]:
            monkeypatch.setenv(variable, f"http://{proxy.host}")
        assert size(server.host) == 17
        assert size(server.host.replace("127.0.0.1", "localhost")) == 17

    assert proxy.requests == []
    assert len(server.requests) == 2


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a file with a key and a certificate for 127.0.0.1."""
    x509 = pytest.importorskip("cryptography.x509", reason="it is in the test group")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "registry of the tests")])
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    signed = (
        x509.CertificateBuilder(name, name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path = tmp_path / "certificate.pem"
    path.write_bytes(private + signed.public_bytes(serialization.Encoding.PEM))
    return path


@pytest.mark.parametrize("variable", CERTIFICATES)
def test_certificates_of_the_environment_are_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with RawServer(answer, context) as server:
        with pytest.raises(RemoteError, match="certificate verify failed.*; SSL_CERT_FILE names"):
            size(server.host, plain_http=False)
        path = certificate
        if variable == "SSL_CERT_DIR":  # as "openssl rehash" prepares it
            path = certificate.parent / "authorities"
            path.mkdir()
            command = ["openssl", "x509", "-hash", "-noout", "-in", str(certificate)]
            name = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            (path / f"{name.strip()}.0").symlink_to(certificate)
        monkeypatch.setenv(variable, str(path))
        assert size(server.host, plain_http=False) == 17


@pytest.mark.parametrize("variable", CERTIFICATES)
def test_a_refused_certificate_names_the_variable_that_counts(
    certificate: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    system = ssl.get_default_verify_paths()
    path = system.capath if variable == "SSL_CERT_DIR" else system.cafile
    if path is None:
        pytest.skip("OpenSSL knows no certificates of the system")
    for one in CERTIFICATES[CERTIFICATES.index(variable) :]:
        monkeypatch.setenv(one, path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with (
        RawServer(answer, context) as server,
        pytest.raises(
            RemoteError, match=f"; {variable} names the certificates to trust: '{path}'$"
        ),
    ):
        size(server.host, plain_http=False)


def test_a_server_that_has_left_when_it_is_asked_for_its_address_is_no_error_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leave(stream: SyncStream, name: str) -> object:
        if name == "server_addr":
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return info(stream, name)

    info = SyncStream.get_extra_info
    monkeypatch.setattr(SyncStream, "get_extra_info", leave)
    with RawServer(answer) as server:
        assert size(server.host) == 17


@pytest.mark.parametrize("sends_page", [False, True])
def test_plain_http_to_a_server_with_tls_says_so_at_once(
    certificate: Path, *, sends_page: bool
) -> None:
    """Some such servers end the connection, and others say what is wrong without TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with RawServer(answer, context) as server:
        if sends_page:
            server.plain_answer = reply(400, b"Client sent an HTTP request to an HTTPS server.")
        with (
            RegistryClient(server.host, plain_http=True, credentials=NOBODY) as client,
            pytest.raises(
                RemoteError,
                match=f"'http://{server.host}' speaks TLS, and was asked without it; the address may have to "
                f"begin with https://{server.host}$",
            ),
        ):
            client.blob_size("a", DIGEST)
        assert server.connections == 2, "the request, and the question whether it is TLS"


def test_tls_to_a_server_of_plain_http_says_so_at_once() -> None:
    with RawServer(answer) as server:
        server.plain_answer = reply(400)
        with pytest.raises(RemoteError, match=f"begin with http://{server.host}$"):
            size(server.host, plain_http=False)


def test_a_server_that_breaks_off_is_asked_again() -> None:
    answers = [b"", b"", answer(Received("", "", {}, b""))]
    with RawServer(lambda _: answers.pop(0)) as server:
        server.plain_answer = reply(400)
        patience = Patience(first=0.01)
        with RegistryClient(server.host, credentials=NOBODY, patience=patience) as client:
            assert client.blob_size("a", DIGEST) == 17
        assert server.connections == 4, "three attempts, and one question whether it is TLS"


def test_connections_share_what_they_trust_until_it_changes(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tls_context("a") is tls_context("b")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    first = tls_context("a")
    assert first is tls_context("a")
    certificate.write_bytes(certificate.read_bytes() * 2)
    assert first is not tls_context("a")


@pytest.mark.parametrize("variable", CERTIFICATES[:2])
@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_certificates_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, content: bytes | None
) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setenv(variable, str(path))
    with pytest.raises(RemoteError, match=f"^{variable}: '{path}': "):
        size("registry.invalid")


def test_missing_folder_of_certificates_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "none"
    monkeypatch.setenv("SSL_CERT_DIR", str(path))
    with pytest.raises(RemoteError, match=f"^SSL_CERT_DIR: '{path}' is not a folder"):
        size("registry.invalid")


def test_credentials_of_a_proxy_reach_the_proxy_only(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setattr(transport, "_LOOPBACK", ())  # this machine is asked through the proxy
    with RawServer(answer, context) as server, TunnelProxy() as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:s3cret@{proxy.host}")
        assert size(server.host, plain_http=False) == 17
        assert proxy.heads[0].startswith(f"CONNECT {server.host} ")

    secret = base64.b64encode(b"user:s3cret").decode()
    assert f"Basic {secret}" in proxy.heads[0]
    assert "proxy-authorization" not in server.requests[0].headers


@pytest.mark.parametrize("answered", [b"HTTP/1.1 407 No\r\n\r\n", b""])
def test_passwords_of_proxies_are_in_no_message(
    monkeypatch: pytest.MonkeyPatch, answered: bytes
) -> None:
    with TunnelProxy(answered) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:s3cret@{proxy.host}")
        with pytest.raises(RemoteError) as failed:
            size("registry.example")

    assert "s3cret" not in str(failed.value)
    assert isinstance(failed.value, RemoteRefused) == bool(answered)


@pytest.mark.parametrize("scheme", ["ftp", "socks5"])
def test_proxies_of_other_kinds_are_refused(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    monkeypatch.setenv("ALL_PROXY", f"{scheme}://user:s3cret@proxy.example:1")
    with pytest.raises(RemoteError, match="the proxy of the environment cannot be used") as failed:
        size("registry.example")
    assert "s3cret" not in str(failed.value)


def test_bytes_of_blobs_are_limited_in_both_directions() -> None:
    spent: list[int] = []

    class Counted(RateLimiter):
        def spend(self, count: int, wait: object) -> None:
            spent.append(count)

    def serve(request: Received) -> bytes:
        if request.method == "GET":
            return reply(200, DATA)
        return reply(202 if request.method == "POST" else 201, location="/upload")

    with (
        RawServer(serve) as server,
        RegistryClient(server.host, credentials=NOBODY, limiter=Counted(1)) as client,
    ):
        assert b"".join(client.read_blob("a", DIGEST, 0, len(DATA), size=len(DATA))) == DATA
        assert sum(spent) == len(DATA)
        client.upload_blob("a", DIGEST, len(DATA), lambda offset: [DATA[offset:]])
        assert sum(spent) == 2 * len(DATA)


@pytest.mark.parametrize("part", ["response", "body", "upload"])
@pytest.mark.parametrize("is_encrypted", [False, True])
def test_requests_that_wait_for_a_silent_server_can_be_aborted(
    part: str, is_encrypted: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_silent = threading.Event()
    context = None
    if is_encrypted:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))

    def serve(request: Received) -> Iterator[bytes]:
        if request.method == "POST":
            yield reply(202, location="/upload")
            return
        if part == "body":
            yield reply(200, b"x", content_length=len(DATA))
        is_silent.set()
        server.closing.wait()

    errors: list[BaseException] = []
    with (
        RawServer(serve, context) as server,
        RegistryClient(server.host, plain_http=not is_encrypted, credentials=NOBODY) as client,
    ):

        def transfer() -> None:
            try:
                if part == "upload":
                    client.upload_blob("a", DIGEST, len(DATA), lambda offset: [DATA[offset:]])
                else:
                    b"".join(client.read_blob("a", DIGEST, 0, len(DATA), size=len(DATA)))
            except BlobstoreError as error:
                errors.append(error)

        thread = threading.Thread(target=transfer)
        thread.start()
        is_silent.wait()
        client.abort()
        thread.join()
        assert len(server.requests) == 1 + (part == "upload")
    assert [type(error) for error in errors] == [Cancelled]


def test_client_that_was_aborted_connects_no_more() -> None:
    with (
        RawServer(answer) as server,
        RegistryClient(server.host, credentials=NOBODY) as client,
    ):
        client.abort()
        with pytest.raises(Cancelled):
            client.blob_size("a", DIGEST)
        assert server.requests == []


def test_client_that_is_closed_waits_for_nothing() -> None:
    with RegistryClient("127.0.0.1:1", limiter=RateLimiter(1)) as client:
        transport = client._transport
    transport.limit(10**9)


def test_threads_use_connections_of_other_threads_again() -> None:
    with (
        StubRegistry() as registry,
        RegistryClient(registry.host, credentials=NOBODY) as client,
    ):
        for _ in range(3):
            thread = threading.Thread(target=client.blob_size, args=("a", DIGEST))
            thread.start()
            thread.join()
        assert len(registry.requests) == 3
        assert len(registry.connections) == 1


def test_requests_during_a_download_have_a_connection_of_their_own() -> None:
    with (
        StubRegistry() as registry,
        RegistryClient(registry.host, credentials=NOBODY) as client,
    ):
        registry.blobs[str(DIGEST)] = DATA
        for _ in client.read_blob("a", DIGEST, 0, len(DATA), size=len(DATA)):
            assert client.blob_size("a", DIGEST) == len(DATA)
        assert len(registry.connections) == 2
