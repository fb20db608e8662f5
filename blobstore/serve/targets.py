"""The targets of requests: segments of a path, and a query."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote_to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TARGET = 8000
"""Characters of a target."""
MAX_FIELDS = 1000
"""Fields of a query or a form."""
_TARGET = re.compile(r"/[!$&-;=@-Z_a-z~%\[\]?]*", re.ASCII)
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)(|[/?].*)", re.ASCII | re.IGNORECASE)
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})", re.ASCII)


class InvalidTarget(ValueError):
    """A target or form is malformed."""


class Target(NamedTuple):
    """A target, decoded. A segment may have any printable characters, also a slash, so it must not become a path."""

    segments: tuple[str, ...]
    query: dict[str, list[str]]

    @property
    def is_of_registry(self) -> bool:
        """Whether it is one of the protocol of registries."""
        return self.segments[:1] == ("v2",)

    def first(self, name: str, default: str = "") -> str:
        """Return the first value of a field of the query."""
        return self.query.get(name, [default])[0]


def split_host(target: str) -> tuple[str | None, str]:
    """Return the host, with a port, of a target in absolute form, and the target in origin form.

    Any other target is returned as it is, with None. Proxies and some clients send absolute forms, and their host
    counts instead of the header's (RFC 9112, 3.2.2).
    """
    match = _ABSOLUTE.fullmatch(target)
    if match is None:
        return None, target
    host, rest = match.groups()
    return host, rest if rest.startswith("/") else f"/{rest}"


def logged_path(target: str) -> str:
    """Return the path of a target of any form, without what may be a secret: the query, and a login before the host."""
    path = target.partition("?")[0]
    return path if path.startswith("/") else "/" + path.rpartition("://")[2].partition("/")[2]


def parse_target(target: str) -> Target:
    """Return the parts of a target in origin form.

    Raises:
        InvalidTarget: it is too long, in another form, or has a broken escape, invalid UTF-8 or
            control characters.
    """
    if len(target) > MAX_TARGET or _TARGET.fullmatch(target) is None:
        raise InvalidTarget("the target is too long, or not that of this server")
    path, _, query = target.partition("?")
    return Target(tuple(map(_decoded, path[1:].split("/"))), parse_form(query))


def parse_form(text: str) -> dict[str, list[str]]:
    """Return the values of the fields of a query or of an ``application/x-www-form-urlencoded`` body.

    Raises:
        InvalidTarget: as :func:`parse_target`, or it has too many fields.
    """
    fields: dict[str, list[str]] = {}
    parts: Sequence[str] = text.split("&", MAX_FIELDS) if text else ()
    if len(parts) > MAX_FIELDS:
        raise InvalidTarget(f"there are more than {MAX_FIELDS} fields")
    for part in parts:
        name, _, value = part.replace("+", " ").partition("=")
        fields.setdefault(_decoded(name), []).append(_decoded(value))
    return fields


def _decoded(text: str) -> str:
    if "%" not in text and text.isprintable():
        return text
    if _BROKEN_ESCAPE.search(text):
        raise InvalidTarget("a percent sign is not that of an escape")
    try:
        decoded = unquote_to_bytes(text).decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidTarget("an escape is not UTF-8") from None
    if not decoded.isprintable():
        raise InvalidTarget("an escape is that of a control character")
    return decoded
