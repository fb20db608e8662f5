"""The meaning of responses to each request, in one table: needed or a hint, and which statuses count.

A request is needed if the command cannot do its job without it: if it is refused, the command ends with one
error. A hint only saves work. If it is refused or fails, the command continues as if the registry had answered
404, and the next needed request shows whether rights are missing. Real registries answer hints with 401, 403,
405 and 500 where the specification says 404.

Statuses of neither kind are judged by :func:`blobstore.http.protocol.failure`: some are tried again
(:data:`~blobstore.http.rules.TRANSIENT`), all others are final. The functions say after which refusals a command does
something else.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from blobstore.http.rules import Rule

if TYPE_CHECKING:
    from blobstore.errors import RemoteError

_UPLOAD_CODES: Final = frozenset({"BLOB_UPLOAD_INVALID", "BLOB_UPLOAD_UNKNOWN"})
_BLOB_CODES: Final = frozenset({"BLOB_UNKNOWN", "MANIFEST_BLOB_UNKNOWN"})
_FORM_CODES: Final = frozenset({"MANIFEST_INVALID", "UNSUPPORTED"})

BASE: Final = Rule(is_hint=False, success=(200,))
"""GET /v2/: checks a login."""
MANIFEST: Final = Rule(is_hint=False, success=(200,), absent=(404,))
"""GET of a manifest."""
MANIFEST_LOOK: Final = Rule(is_hint=True, success=(200,), absent=(404,))
"""HEAD of a manifest, before a push and for the IDs of a list."""
MANIFEST_WATCH: Final = Rule(is_hint=False, success=(200, 304), absent=(404,))
"""HEAD of a manifest that the client has, to hear whether the tag has another one."""
MANIFEST_PUT: Final = Rule(is_hint=False, success=(200, 201, 202, 204))
"""PUT of a manifest. If a refusal names missing blobs, these are sent, and it is put once more."""
MANIFEST_DELETE: Final = Rule(is_hint=False, success=(202, 200, 204), absent=(404,))
"""DELETE of a tag or a manifest. Registries may delete only by digest, or nothing."""
BLOB: Final = Rule(is_hint=False, success=(200, 206), absent=(404,))
"""GET of a blob, or of a range of it."""
BLOB_SIZE: Final = Rule(is_hint=False, success=(200,), absent=(404,))
"""HEAD of a blob that is read later."""
BLOB_LOOK: Final = Rule(is_hint=True, success=(200,), absent=(404, 500))
"""HEAD of a blob before it is sent. Distribution answers with 500 if a full disk has left a part of the blob
empty, and uploading it again repairs that."""
MOUNT: Final = Rule(is_hint=True, success=(201,), absent=(202,))
"""POST that mounts a blob of another repository. 202 begins an upload instead."""
UPLOAD_START: Final = Rule(is_hint=False, success=(202, 200, 204))
"""POST of an upload."""
UPLOAD_PART: Final = Rule(is_hint=False, success=(202, 204, 200, 201))
"""PATCH of an upload. If it is refused, the blob is sent in one piece."""
UPLOAD_STATUS: Final = Rule(is_hint=True, success=(204, 202, 200), absent=(404,))
"""GET of an upload that was interrupted. Without an answer, the upload begins again."""
UPLOAD_END: Final = Rule(is_hint=False, success=(201, 204, 200))
"""PUT of an upload. 202 is the answer to a part, so the blob may not be there."""
TAGS: Final = Rule(is_hint=False, success=(200,), absent=(404,))
"""GET of a page of the list of tags."""
REPOSITORIES: Final = Rule(is_hint=False, success=(200,), absent=(404, 405, 501))
"""GET of a page of the list of repositories, which is not in the specification and which many registries lack."""
REFERRERS: Final = Rule(is_hint=True, success=(200,), absent=(404,))
"""GET of what refers to a manifest: signatures and compressed forms. Without an answer, a tag may list
them. A policy that requires a signature refuses a model whose signatures cannot be read."""


def is_gone(error: RemoteError) -> bool:
    """Return whether the refusal of a part or an end says that the upload is not known (any more)."""
    return error.code in _UPLOAD_CODES or (error.status == HTTPStatus.NOT_FOUND and not error.code)


def names_missing_blobs(error: RemoteError) -> bool:
    """Return whether a manifest is refused because the registry lacks blobs of it."""
    return error.code in _BLOB_CODES


def refuses_form(error: RemoteError) -> bool:
    """Return whether a manifest is refused for what it is: of another type than the registry takes."""
    return error.code in _FORM_CODES or error.status in (
        HTTPStatus.NOT_ACCEPTABLE,
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
    )


def refuses_deletion(error: RemoteError) -> bool:
    """Return whether a registry deletes no such thing: distribution answers so to tags."""
    return error.code in _FORM_CODES | {"DIGEST_INVALID"} or error.status in (
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.METHOD_NOT_ALLOWED,
    )
