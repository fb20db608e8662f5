"""A server that issues tokens for a registry: JSON web tokens, signed with ES256."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from tests.support.http_server import HttpServer

ISSUER = "issuer of the tests"
SERVICE = "registry of the tests"


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class TokenServer(HttpServer):
    """Gives anyone access to pull, and one user to push; ``refresh`` stands for that user too."""

    def __init__(self, user: str, password: str) -> None:
        self.expected = f"{user}:{password}"
        self.refresh = "identity"
        self.requests: list[tuple[str, str | None, list[str]]] = []
        """Method, authorization and scopes of each request."""
        self.seconds = 300
        """How long tokens are valid."""
        self.denied: set[str] = set()
        """Repositories to which nobody gets access."""
        self._key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ISSUER)])
        now = datetime.now(UTC)
        self._certificate = (
            x509.CertificateBuilder(name, name)
            .public_key(self._key.public_key())
            .serial_number(1)
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, SHA256())
        )
        super().__init__(self._handler())

    @property
    def realm(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/token"

    @property
    def certificate(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def token(self, scopes: list[str], *, may_push: bool) -> str:
        """Return a token for what may be granted of the scopes."""
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            granted = [one for one in actions.split(",") if may_push or one == "pull"]
            granted = [] if name in self.denied else granted
            access.append({"type": kind, "name": name, "actions": granted})
        now = int(time.time())
        claims = {
            "iss": ISSUER,
            "aud": SERVICE,
            "nbf": now - 60,
            "exp": now + self.seconds,
            "access": access,
        }
        chain = [base64.b64encode(self._certificate.public_bytes(Encoding.DER)).decode()]
        header = {"typ": "JWT", "alg": "ES256", "x5c": chain}
        signed = ".".join(_base64url(json.dumps(part).encode()) for part in (header, claims))
        r, s = decode_dss_signature(self._key.sign(signed.encode(), ec.ECDSA(SHA256())))
        return f"{signed}.{_base64url(r.to_bytes(32) + s.to_bytes(32))}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        tokens = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = parse_qs(urlsplit(self.path).query)
                given = self.headers["authorization"]
                tokens.requests.append(("GET", given, asked.get("scope", [])))
                expected = "Basic " + base64.b64encode(tokens.expected.encode()).decode()
                self.answer("token", asked.get("scope", []), given, expected)

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                asked = parse_qs(self.rfile.read(length).decode())
                scopes = asked.get("scope", [""])[0].split()
                given = asked["refresh_token"][0]
                tokens.requests.append(("POST", given, scopes))
                self.answer("access_token", scopes, given, tokens.refresh)

            def answer(self, key: str, scopes: list[str], given: str | None, expected: str) -> None:
                status, body = 200, b"{}"
                if given in (None, expected):
                    token = tokens.token(scopes, may_push=given == expected)
                    value: dict[str, Any] = {key: token, "expires_in": tokens.seconds}
                    body = json.dumps(value).encode()
                else:
                    status = 401
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
