"""Proxies, certificates and rates, as the environment and the user say."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

import pytest

from blobstore.core.digest import Digest
from blobstore.core.workers import RateLimiter
from blobstore.errors import RemoteError
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from blobstore.registry.protocol import Patience
from tests.support.raw_server import RawServer, Received, reply

DATA = bytes(100_000)
DIGEST = Digest.of(DATA)
NOBODY = GivenLogin(None)
ONCE = Patience(attempts=1)
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), "SSL_CERT_FILE", "SSL_CERT_DIR"):
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


def test_certificates_of_the_environment_are_trusted(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    with RawServer(answer, context) as server:
        with pytest.raises(RemoteError, match="certificate verify failed.*; SSL_CERT_FILE names"):
            size(server.host, plain_http=False)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert size(server.host, plain_http=False) == 17


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


def test_client_that_is_closed_waits_for_nothing() -> None:
    with RegistryClient("127.0.0.1:1", limiter=RateLimiter(1)) as client:
        transport = client._transport
    transport.limit(10**9)
