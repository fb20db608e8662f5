"""Access control: tokens with the models that they open, and the host names for which a server without tokens answers.

A line of a token file may have a name and globs before its token. The token is last, so that a line of a file that is
half written opens no more than the complete one: what is left of it has the same limits, or is no token.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.errors import UsageError
from blobstore.manifests.reference import Reference, name_matches
from blobstore.serve.messages import failure
from blobstore.serve.refusal import Refused, unauthorized

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.serve.messages import Request
    from blobstore.serve.targets import Target

MAX_TOKENS: Final = 10_000
_TOKEN = re.compile(r"[\x21-\x7e]{8,4096}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_EXPECTED: Final = "[name=NAME] [models=GLOB,...] and a token of 8 to 4096 printable characters"
_HEADER = re.compile(r"[\x21-\x7e]{1,4096}", re.ASCII)
"""A token that can stand in a header."""
_SAME_SITE = ("same-origin", "none")
"""Values that browsers send for addresses that a person types."""


class Token(NamedTuple):
    """A token of this server."""

    secret: bytes
    name: str = ""
    """Stands for it in the log."""
    models: tuple[str, ...] = ()
    """Globs of the names of the models that it opens; none means all."""


_ANY: Final = Token(b"")
"""Stands for the token of a client of a server without tokens."""


class Client(NamedTuple):
    """A client whose request may be answered."""

    has_token: bool
    """Whether it has a token or a password, which is checked if this server has tokens."""
    upstream_token: str
    """See :meth:`Access.upstream_token`."""
    models: tuple[str, ...] = ()
    """Globs of the names of the models that it may read; none means all."""


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of a server."""

    tokens: Sequence[Token] | None = None
    """None means that everyone who reaches it may read."""
    hosts: Sequence[str] | None = None
    """The host names that a request may be for, besides addresses of this machine; None means any."""
    _by_digest: Mapping[bytes, Token] = field(init=False)
    _lengths: Sequence[int] = field(init=False)
    """Those of tokens, the longest first."""

    def __post_init__(self) -> None:
        """Take tokens by their digests: a file may have thousands, and strangers ask all the time."""
        tokens = self.tokens or ()
        by_digest = {hashlib.sha256(one.secret).digest(): one for one in tokens}
        object.__setattr__(self, "_by_digest", by_digest)
        lengths = sorted({len(one.secret) for one in tokens}, reverse=True)
        object.__setattr__(self, "_lengths", lengths)

    def client(self, request: Request, target: Target) -> Client:
        """Return the client. Raises Refused for a request that must not be answered."""
        is_known = self.hosts is None or self._is_known(request.headers.get("host", ""))
        if (token := self._token(request)) is None:
            message = "this server needs a token"
            raise Refused(unauthorized(message, is_registry=target.is_of_registry))
        if request.headers.get("sec-fetch-site", "none") not in _SAME_SITE:
            raise Refused(failure("another site has caused this request", 403))
        if not is_known:
            # DNS rebinding makes such requests: a page of another site would read what this machine serves.
            message = "this server does not answer for this host name"
            raise Refused(failure(message, 421))
        return Client(bool(_presented(request)), self.upstream_token(request), token.models)

    def name(self, request: Request) -> str:
        """Return the name of the token of a request; empty if it has none."""
        token = self._token(request)
        return "" if token is None else token.name

    def upstream_token(self, request: Request) -> str:
        """Return the token that a client has for an upstream; empty if it has none, or one that is malformed.

        If this server has tokens of its own, that of the upstream follows one of them and a colon.
        """
        if (token := self._token(request)) is None:
            return ""
        own = token.secret and token.secret + b":"
        left = _presented(request)[len(own) :]
        text = left.decode("latin-1")
        # A second token of this server is not for the upstream either.
        return text if _HEADER.fullmatch(text) and not (own and self._token_of(left)) else ""

    def _token(self, request: Request) -> Token | None:
        """Return the token of this server that a request has; None without a valid one."""
        return self._token_of(_presented(request))

    def _token_of(self, given: bytes) -> Token | None:
        if self.tokens is None:
            return _ANY
        for length in self._lengths:  # a token may begin with another one
            if length <= len(given) and given[length : length + 1] in (b"", b":"):
                # Digests are compared, so that the time says nothing about which token is near.
                digest = hashlib.sha256(given[:length]).digest()
                if (token := self._by_digest.get(digest)) is not None:
                    return token
        return None

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


def parse_tokens(data: bytes) -> tuple[Sequence[Token], str]:
    """Return the tokens of a file, and its fault: empty if it has none.

    There is one on each line; empty lines, and those that begin with #, are skipped. A line is wrong if its token is too
    short, has a character that no token has, or is on another line with other limits. So are too many tokens, and none.
    """
    tokens, wrong = dict[bytes, Token](), ""
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        token = _parse_token(text)
        if token is None:
            wrong = f"line {number} of the token file is no token: expected {_EXPECTED}"
        elif tokens.setdefault(token.secret, token) != token:
            wrong = (
                f"the token of line {number} of the token file has other limits on a line before"
            )
    if not (wrong or 0 < len(tokens) <= MAX_TOKENS):
        wrong = (
            f"the token file has {len(tokens)} tokens; expected 1 to {MAX_TOKENS}, one on each line"
        )
    return list(tokens.values())[:MAX_TOKENS], wrong


def _parse_token(line: str) -> Token | None:
    """Return the token of a line; None if it is wrong."""
    *fields, secret = line.split()
    found = dict(one.split("=", 1) for one in fields if "=" in one)
    if len(found) < len(fields) or not found.keys() <= {"name", "models"}:
        return None
    if _TOKEN.fullmatch(secret) is None or secret.startswith(("name=", "models=")):
        return None
    if _NAME.fullmatch(found.get("name", "none")) is None:
        return None
    models = tuple(found["models"].split(",")) if "models" in found else ()
    try:
        for one in models:
            name_matches(Reference.parse("model"), one)
    except UsageError:
        return None
    return Token(secret.encode(), found.get("name", ""), models) if all(models) else None
