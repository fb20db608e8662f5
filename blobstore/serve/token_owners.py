"""The owner of a token, for which ``hf auth login`` asks before it keeps the token.

A server with tokens of its own has refused others with 401 before. Without such tokens, it asks its upstream. Without
both, any token is accepted, because none is needed.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.capacity import TRY
from blobstore.errors import RemoteError
from blobstore.serve.expiring import Expiring
from blobstore.serve.messages import failure, json_response
from blobstore.serve.refusal import Refusal, unauthorized
from blobstore.serve.rights import client_of
from blobstore.serve.unprepared import NotFetched

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.serve.find_upstream import Upstreams
    from blobstore.serve.messages import Response

_SECONDS: Final = 5.0
"""How long an answer of the upstream is repeated."""
_MAX_KNOWN: Final = 4096


def owner_response(token: str, owners: TokenOwners | None, *, has_token: bool) -> Response:
    """Return the owner of a client's token. ``owners`` ask the upstream; None if the server has checked the token.

    Raises:
        NotPrepared: the upstream has to be asked.
    """
    if not has_token:
        return unauthorized("who asks has no token", is_registry=False)
    try:
        name = owners.name(token) if owners else ""
    except Refusal as refusal:
        return failure(refusal.message, refusal.status)
    value: dict[str, Any] = {
        "type": "user",
        "id": "blobstore",
        "name": name or "blobstore",
        "fullname": "A client of blobstore serve",
        "email": None,
        "orgs": [],
        "auth": {
            "type": "access_token",
            "accessToken": {"displayName": "blobstore", "role": "read"},
        },
    }
    return json_response(value)


class TokenOwners:
    """The answers of an upstream about tokens, which are kept as digests. Threads may share it."""

    def __init__(self, upstreams: Upstreams, note: Callable[..., object]) -> None:
        """Ask nothing yet."""
        self._upstreams, self._note = upstreams, note
        self._known = Expiring[str, str | Refusal](_MAX_KNOWN)

    def name(self, token: str) -> str:
        """Return the name of the client with a token. Raises Refusal or NotPrepared."""
        found = self._known.get(client_of(token))
        if found is None:
            raise NotFetched(self._ask, token, threads=TRY)
        if isinstance(found, Refusal):
            raise found.again()
        return found

    def _ask(self, token: str) -> None:
        found: str | Refusal
        try:
            found = self._upstreams.user(token)
        except Refusal as refusal:
            found = refusal.again()
        except RemoteError as error:
            self._note(error=str(error))
            found = Refusal(HTTPStatus.BAD_GATEWAY, message="the upstream cannot be reached")
        self._known.set(client_of(token), found, _SECONDS)
