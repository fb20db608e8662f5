"""Access control: tokens, and the host names for which a server without tokens answers."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.serve.messages import failure
from blobstore.serve.refusal import Refused, unauthorized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.serve.messages import Request
    from blobstore.serve.targets import Target

MAX_TOKENS: Final = 10_000
_TOKEN = re.compile(r"[\x21-\x7e]{8,4096}", re.ASCII)
_HEADER = re.compile(r"[\x21-\x7e]{1,4096}", re.ASCII)
"""A token that can stand in a header."""
_SAME_SITE = ("same-origin", "none")
"""Values that browsers send for addresses that a person types."""


class Client(NamedTuple):
    """A client whose request may be answered."""

    has_token: bool
    """Whether it has a token or a password, which is checked if this server has tokens."""
    upstream_token: str
    """See :meth:`Access.upstream_token`."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of a server."""

    tokens: Sequence[bytes] | None = None
    """None means that everyone who reaches it may read."""
    hosts: Sequence[str] | None = None
    """The host names that a request may be for, besides addresses of this machine; None means any."""

    def client(self, request: Request, target: Target) -> Client:
        """Return the client. Raises Refused for a request that must not be answered."""
        client = Client(bool(_presented(request)), self.upstream_token(request))
        is_known = self.hosts is None or self._is_known(request.headers.get("host", ""))
        if self._without_own(request) is None:
            message = "this server needs a token"
            raise Refused(unauthorized(message, is_registry=target.is_of_registry))
        if request.headers.get("sec-fetch-site", "none") not in _SAME_SITE:
            raise Refused(failure("another site has caused this request", 403))
        if not is_known:
            # DNS rebinding makes such requests: a page of another site would read what this machine serves.
            message = "this server does not answer for this host name"
            raise Refused(failure(message, 421))
        return client

    def upstream_token(self, request: Request) -> str:
        """Return the token that a client has for an upstream; empty if it has none, or one that is malformed.

        If this server has tokens of its own, that of the upstream follows one of them and a colon.
        """
        text = (self._without_own(request) or b"").decode("latin-1")
        return text if _HEADER.fullmatch(text) else ""

    def _without_own(self, request: Request) -> bytes | None:
        """Return the part of a request's token after that of this server, all if this has none; None without a valid one."""
        given = _presented(request)
        if self.tokens is None:
            return given
        # All are compared, so that the time says nothing about which one is near.
        if sum(hmac.compare_digest(given, known) for known in self.tokens):
            return b""
        starts = [known + b":" for known in self.tokens]
        found = [len(one) for one in starts if hmac.compare_digest(given[: len(one)], one)]
        return given[max(found) :] if found else None  # a token may begin with another one

    def first(self) -> str:
        """Return the first token, for a file that has one; empty without tokens."""
        return next((one.decode() for one in self.tokens or ()), "")

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
        name = name.strip("[]").lower()
        if name == "localhost" or name in (self.hosts or ()):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _presented(request: Request) -> bytes:
    """Return the token of a request: as a bearer, or as a password with any user name. It may be empty."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    token = given.strip().encode()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(token, validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return token if scheme.lower() == "bearer" else b""


def parse_tokens(data: bytes) -> tuple[Sequence[bytes], str]:
    """Return the tokens of a file, and its fault: empty if it has none.

    There is one on each line; empty lines, and those that begin with #, are skipped. One that is too short, or has
    a character that no token has, is wrong. So are too many tokens, and none at all.
    """
    tokens, wrong = [], ""
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if _TOKEN.fullmatch(text) is None:
            wrong = f"line {number} of the token file is no token: expected 8 to 4096 printable characters without spaces"
        else:
            tokens.append(text.encode())
    if not (wrong or 0 < len(tokens) <= MAX_TOKENS):
        wrong = (
            f"the token file has {len(tokens)} tokens; expected 1 to {MAX_TOKENS}, one on each line"
        )
    return tokens[:MAX_TOKENS], wrong
