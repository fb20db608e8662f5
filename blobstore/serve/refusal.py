"""Refused requests, in the form of the client's protocol, and the one rule about models that a client may not see.

A model that is absent, one that a client may not read, and one that is not served get the same response, to the
byte. Otherwise strangers would learn which restricted models there are. If tokens decide which
models a client may read, the response is that of the Hub for private models, 401, which also lets clients of
registries send their login. Otherwise it is 404, because no token would help.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.core.limits import Crowded
from blobstore.errors import StoreBusy, StoreError
from blobstore.serve.messages import failure, json_response
from blobstore.sources.hub_client import REFUSALS
from blobstore.store.partial import FULL

if TYPE_CHECKING:
    from blobstore.errors import BlobstoreError
    from blobstore.serve.messages import Response

API_VERSION: Final = {"Docker-Distribution-API-Version": "registry/2.0"}
_MESSAGES: Final = {
    "RepoNotFound": "there is no such model",
    "RevisionNotFound": "the model has no such revision",
    "EntryNotFound": "the model has no such file",
    "GatedRepo": "access to this model is restricted; its owner has to accept yours",
    "DisabledRepo": "access to this model is disabled",
}
"""The meanings of the Hub's error codes."""
_HIDDEN: Final = "there is no such model, or it needs a token that may read it: if it is gated, of a user whom its owner has accepted"
_REGISTRY_CODES: Final = {
    400: "PAGINATION_NUMBER_INVALID",
    401: "UNAUTHORIZED",
    403: "DENIED",
    404: "MANIFEST_UNKNOWN",
}


class Refusal(Exception):
    """Something does not exist, or this client may not have it."""

    def __init__(self, status: int, code: str = "", message: str = "", commit: str = "") -> None:
        """``code`` is one of the Hub, and ``commit`` the version that lacks a file."""
        self.status = status
        self.code = code if code in _MESSAGES else ""
        self.message = message or _MESSAGES.get(code, "the upstream refuses access to this model")
        self.commit = commit
        self.repository = ""
        """The upstream's name of the repository that it has refused, if the client used another one."""
        super().__init__(self.message)

    def again(self) -> Refusal:
        """Return the same without the traceback, which holds what the request had open."""
        return Refusal(self.status, self.code, self.message, self.commit)

    @property
    def is_of_repository(self) -> bool:
        """Whether all of a repository is absent or refused, and not only a revision or a file."""
        return self.status in REFUSALS and self.code not in {"RevisionNotFound", "EntryNotFound"}


class Refused(Exception):
    """A request is refused whatever models there are, with a response that is the same for all clients."""

    def __init__(self, response: Response) -> None:
        self.response = response
        super().__init__(f"refused with status {response.status}")


def no_model() -> Refusal:
    """Return the refusal of a repository that the store lacks, or does not serve."""
    return Refusal(HTTPStatus.NOT_FOUND, "RepoNotFound")


def refusal_response(refusal: Refusal, *, is_registry: bool, reads_tokens: bool) -> Response:
    """Return the response to a request that was refused.

    With ``reads_tokens``, a token decides which models there are for a client.
    """
    if refusal.is_of_repository:
        if reads_tokens:
            return unauthorized(_HIDDEN, is_registry=is_registry, code="RepoNotFound")
        refusal = no_model()
    if is_registry:
        code = _REGISTRY_CODES.get(refusal.status, "UNKNOWN")
        if refusal.is_of_repository:
            code = "NAME_UNKNOWN"
        return error_response(refusal.status, code, refusal.message)
    headers = {"X-Error-Code": refusal.code, "X-Repo-Commit": refusal.commit}
    return failure(refusal.message, refusal.status, {one: it for one, it in headers.items() if it})


def unauthorized(message: str, *, is_registry: bool, code: str = "") -> Response:
    """Return the response to a request that may need a token; ``code`` is one of the Hub."""
    # Registry clients send a password only if they are asked for one.
    headers = {"WWW-Authenticate": f'{"Basic" if is_registry else "Bearer"} realm="blobstore"'}
    if is_registry:
        return error_response(401, "UNAUTHORIZED", message, headers)
    if code:
        headers["X-Error-Code"] = code
    return failure(message, 401, headers)


def error_response(
    status: int, code: str, message: str, headers: dict[str, str] | None = None
) -> Response:
    """Return an error in the form of registries."""
    value = {"errors": [{"code": code, "message": message, "detail": None}]}
    return json_response(value, status, API_VERSION | (headers or {}))


def as_refusal(error: BlobstoreError | Refusal) -> Refusal:
    """Return the answer to clients that have waited for a model that does not arrive."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, Crowded):
        message = "the server imports many other models; ask again later"
        return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message=message)
    if not isinstance(error, StoreError):
        message = "the model cannot be fetched from the upstream; the log of the server says why"
        return Refusal(HTTPStatus.BAD_GATEWAY, message=message)
    cause = error.__cause__
    is_full = not isinstance(error, StoreBusy) and (
        not isinstance(cause, OSError) or cause.errno in FULL
    )
    message = "the store of the server cannot be written; the log of the server says why"
    status = HTTPStatus.INSUFFICIENT_STORAGE if is_full else HTTPStatus.SERVICE_UNAVAILABLE
    return Refusal(status, message=message)
