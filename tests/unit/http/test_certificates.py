"""Folders of certificates for one registry, as Docker and Podman have them."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from blobstore.errors import RemoteError, RemoteRefused
from blobstore.http.retry import Patience
from blobstore.registry.client import RegistryClient
from blobstore.registry.credentials import GivenLogin
from tests.support.raw_server import RawServer, reply


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """Return a certificate that signs itself, and its key."""
    paths = folder / f"{name}.cert", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    files = ["-out", str(paths[0]), "-keyout", str(paths[1])]
    program = ["openssl", "req", "-x509", *curve, *subject, *files]
    subprocess.run(program, check=True, capture_output=True)
    return paths


def login(server: RawServer) -> None:
    with RegistryClient(
        server.host, plain_http=False, credentials=GivenLogin(None), patience=Patience(first=0)
    ) as client:
        client.check_login()


def test_certificate_is_shown_to_a_registry_that_requires_one(home: Path) -> None:
    own, key = make_certificate(home, "server")
    client, client_key = make_certificate(home, "client")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(client))
    context.load_cert_chain(own, key)
    context.verify_mode = ssl.CERT_REQUIRED
    with RawServer(lambda _: reply(200), context) as server:
        with pytest.raises(RemoteError, match="certificate verify failed"):
            login(server)
        folder = home / ".config/containers/certs.d" / server.host
        folder.mkdir(parents=True)
        (folder / "ca.crt").write_bytes(own.read_bytes())
        # Final, however often a lost connection is tried again.
        with pytest.raises(
            RemoteRefused, match=f"certificate of this machine.*certs.d/{server.host}"
        ):
            login(server)
        assert server.requests == []
        (folder / "client.cert").write_bytes(client.read_bytes())
        (folder / "client.key").write_bytes(client_key.read_bytes())
        login(server)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["ca.crt"], "ca.crt"),
        (["client.cert"], "client.key"),  # which is missing
        (["client.cert", "client.key"], "client.cert"),
    ],
)
def test_file_without_a_certificate_or_key_is_named(
    home: Path, names: list[str], named: str
) -> None:
    folder = home / ".config/containers/certs.d/127.0.0.1:1"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("x", encoding="utf-8")

    with pytest.raises(RemoteError, match=f"{named}' cannot be used for TLS"):
        RegistryClient("127.0.0.1:1", plain_http=False)


def test_no_home_folder_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    RegistryClient("127.0.0.1:1", plain_http=False, credentials=GivenLogin(None)).close()
