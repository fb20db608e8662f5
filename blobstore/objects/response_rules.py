"""The requests of all commands to object storage: what each needs, and what its answers mean.

A command ends if a request fails whose answer it needs. What only spares bytes or adds to a result is a hint:
without it, the command goes on. Without the right to list, a user gets a denial for an absent object. So
commands that can go on without the object do so after a denial, too.

Any status of 2xx is success. obstore repeats requests that are answered with 429 or 5xx, or not at all.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple


class Answer(Enum):
    """What an answer other than success means."""

    ABSENT = auto()
    """There is no such object."""
    DENIED = auto()
    """The user may not do that, or may not know whether there is such an object."""
    CONDITION = auto()
    """A condition of a write is not met, or another write is going on."""
    UNUSABLE = auto()
    """No request can succeed: no such bucket, wrong or expired credentials, a wrong clock."""
    FAILED = auto()
    """Everything else, also no answer."""


STATUSES: Final = {
    304: Answer.CONDITION,
    401: Answer.DENIED,
    403: Answer.DENIED,
    404: Answer.ABSENT,
    409: Answer.CONDITION,
    412: Answer.CONDITION,
}
"""All others are ``FAILED``."""


class Code(NamedTuple):
    """What one of S3's codes means, whatever its status."""

    message: str
    advice: str = ""
    is_refusal: bool = True


_EXPIRED: Final = Code("the credentials have expired", "renew them, and repeat")
_WRONG: Final = Code("the server does not accept the credentials", "check them")
CODES: Final = {
    "ExpiredToken": _EXPIRED,
    "ExpiredTokenException": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "RequestExpired": _EXPIRED,
    "InvalidAccessKeyId": _WRONG,
    "InvalidToken": _WRONG,
    "SignatureDoesNotMatch": _WRONG,
    "RequestTimeTooSkewed": Code(
        "the clock of this machine and that of the server differ by too much", "set the clock"
    ),
    "NoSuchBucket": Code("there is no such bucket", is_refusal=False),
}
"""The codes of ``UNUSABLE``."""


class Request(NamedTuple):
    """A kind of request."""

    action: str
    """The right that it takes, as AWS calls it."""
    absent: frozenset[Answer]
    """The answers that count as if there were no such object, or as if nothing was asked."""


_NEEDED: Final = frozenset({Answer.ABSENT})
_UNLESS_DENIED: Final = _NEEDED | {Answer.DENIED}
_HINT: Final = frozenset(Answer) - {Answer.UNUSABLE}

CONNECT: Final = Request("s3:GetObject", frozenset())
"""Nothing is sent: the settings are given to obstore, which may refuse them."""

# What all commands read.
READ: Final = Request("s3:GetObject", _NEEDED)
"""Manifests and blobs."""
READ_FORMER: Final = Request("s3:GetObject", _UNLESS_DENIED)
"""The manifest that a name has before a push. If it is there after all, the write's condition fails."""
READ_HEADERS: Final = Request("s3:GetObject", _HINT)
"""The headers of all blobs of a model, which can be read one by one."""
READ_COLD_INDEX: Final = Request("s3:GetObject", _HINT)
"""The compressed forms of the blobs of a model."""
READ_SIGNATURE: Final = Request("s3:GetObject", _NEEDED)
LIST_SIGNATURES: Final = Request("s3:ListBucket", _NEEDED)
"""Commands go on without signatures. A policy that requires them refuses the model, and says why they are missing."""
LOOK_FOR_BLOB: Final = Request("s3:GetObject", _HINT)
"""Whether a blob needs to be sent."""
LOOK_FOR_COLLECTION: Final = Request("s3:GetObject", _UNLESS_DENIED)
"""The note of a collection of garbage. The push that asks has read its own lease, so it sees what is there."""
LIST: Final = Request("s3:ListBucket", frozenset())
"""The names for ``list``; blobs, leases and names for ``gc``."""
LOOK_FOR_STORE: Final = Request("s3:ListBucket", _HINT)
"""Whether there is a store under a prefix: a new one may lie within another."""

# What ``push``, ``rm`` and ``gc`` write.
WRITE: Final = Request("s3:PutObject", frozenset())
WRITE_HEADERS: Final = Request("s3:PutObject", _HINT)
WRITE_NEW: Final = Request("s3:PutObject", frozenset({Answer.CONDITION}))
"""If there is no such object."""
WRITE_CHANGED: Final = Request("s3:PutObject", frozenset({Answer.CONDITION, Answer.ABSENT}))
"""If the object is that which was read."""
DELETE: Final = Request("s3:DeleteObject", _NEEDED)
"""Names and blobs; the lease of a push, which ends by itself."""
