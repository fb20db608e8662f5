"""Rules for responses: whether a request is needed, which statuses answer it, and which are temporary.

Each protocol has a table of its requests, as ``registry/response_rules`` is that of registries.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final, NamedTuple

TRANSIENT: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which a request is sent again."""
KEEPS_METHOD: Final = frozenset({HTTPStatus.TEMPORARY_REDIRECT, HTTPStatus.PERMANENT_REDIRECT})
"""Redirects that a request with a body follows, within the registry."""
ERROR_CODES: Final = frozenset(
    {
        "BLOB_UNKNOWN",
        "BLOB_UPLOAD_INVALID",
        "BLOB_UPLOAD_UNKNOWN",
        "DIGEST_INVALID",
        "MANIFEST_BLOB_UNKNOWN",
        "MANIFEST_INVALID",
        "MANIFEST_UNKNOWN",
        "NAME_INVALID",
        "NAME_UNKNOWN",
        "SIZE_INVALID",
        "UNAUTHORIZED",
        "DENIED",
        "UNSUPPORTED",
        "TOOMANYREQUESTS",
    }
)
"""https://github.com/opencontainers/distribution-spec/blob/v1.1.1/spec.md#error-codes"""


class Rule(NamedTuple):
    """The meaning of responses to one kind of request."""

    is_hint: bool
    success: tuple[int, ...]
    absent: tuple[int, ...] = ()
    """The server does not have it."""

    @property
    def answers(self) -> tuple[int, ...]:
        """The statuses that answer the question."""
        return self.success + self.absent


TOKEN: Final = Rule(is_hint=False, success=(200,))
"""GET or POST at the realm of a challenge."""
