"""Requests and responses as values. A body consists of bytes and of ranges of blobs that are not read yet."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from blobstore.core import strict_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.files import FileVersion
    from blobstore.serve.arriving_file import ArrivingFile

_HEADER_NAME = re.compile(r"[A-Za-z0-9-]+", re.ASCII)
_HEADER_VALUE = re.compile(r"[\x20-\x7e]*", re.ASCII)
PEER = "x-blobstore-peer"
"""The header of requests that are answered from the store alone."""
OCTETS = "application/octet-stream"
JSON = "application/json"


def _nothing() -> None:
    """Do nothing: most responses use no blobs."""


class BlobPart(NamedTuple):
    """A range of a blob."""

    digest: Digest
    size: int
    """Bytes of the blob."""
    begin: int
    length: int


class FilePart(NamedTuple):
    """A range of a file that is being fetched."""

    file: ArrivingFile
    begin: int
    length: int


class StoredPart(NamedTuple):
    """A range of the file of a cold blob, as it is."""

    path: str
    size: int
    """Bytes of the file."""
    begin: int
    length: int
    version: FileVersion
    """The version that the file must still have."""


Part = bytes | BlobPart | FilePart | StoredPart


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrived; nothing in it is trusted."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    """By lower-case names; of a header that occurs twice, the first."""
    body: bytes | None = None
    """None if it was not read yet."""
    damaged: float = 0.0
    """When a response to it was found damaged, on the monotonic clock; 0 if none was. Another source is wanted then."""


class Wait(NamedTuple):
    """A delay of a response, for a client that waits for a change."""

    seconds: float
    is_over: Callable[[], bool]
    """Returns whether there is another response by now."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response. A response to HEAD has no parts, and the headers of the one to GET."""

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    in_use: Callable[[], object] = _nothing
    """Is called from time to time while the parts are sent, so that their blobs are kept."""
    wait: Wait | None = None
    """Set if the client waits for a change, and there is none yet."""

    @property
    def texts(self) -> list[bytes] | None:
        """The parts, if all are in memory; otherwise None."""
        found = [part for part in self.parts if isinstance(part, bytes)]
        return found if len(found) == len(self.parts) else None

    def __post_init__(self) -> None:
        """Refuse headers with characters that could split them. Raises ValueError."""
        for name, value in self.headers.items():
            if not (_HEADER_NAME.fullmatch(name) and _HEADER_VALUE.fullmatch(value)):
                raise ValueError(f"not a header: {name!r}: {value!r}")


class Content:
    """A sequence of parts of which any range can be cut."""

    __slots__ = ("_ends", "parts", "size")

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._ends = list(accumulate(map(length_of, parts)))
        self.size = self._ends[-1] if parts else 0

    @classmethod
    def absent(cls, size: int) -> Self:
        """Return the content of a file that is not here, of which only the size is known."""
        made = cls(())
        made.size = size
        return made

    def cut(self, begin: int, end: int) -> list[Part]:
        """Return the parts of the bytes from ``begin`` to ``end``, which lie within the content."""
        found: list[Part] = []
        number = bisect_right(self._ends, begin)
        while begin < end:
            part, part_end = self.parts[number], self._ends[number]
            first = begin - (part_end - length_of(part))
            length = min(end, part_end) - begin
            if isinstance(part, bytes):
                found.append(part[first : first + length])
            elif length:
                found.append(part._replace(begin=part.begin + first, length=length))
            begin += length
            number += 1
        return found


def length_of(part: Part) -> int:
    """Return the bytes of a part."""
    return len(part) if isinstance(part, bytes) else part.length


def json_response(
    value: Any,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str = JSON,
) -> Response:
    """Return a value as JSON."""
    data = strict_json.dumps(value).encode()
    return bytes_response(data, status, headers, media_type)


def failure(message: str, status: int, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as clients of the Hub read it. Its header has the message, in ASCII."""
    shown = message.encode("ascii", "backslashreplace").decode()
    return json_response({"error": message}, status, {"X-Error-Message": shown, **(headers or {})})


def bytes_response(
    data: bytes,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    media_type: str = "text/plain; charset=utf-8",
) -> Response:
    """Return bytes of a media type."""
    described = {"Content-Type": media_type, "Content-Length": str(len(data)), **(headers or {})}
    return Response(status, described, (data,))


def without_body(request: Request, response: Response) -> Response:
    """Return the response as it is sent to the request: one to HEAD has no body."""
    return replace(response, parts=()) if request.method == "HEAD" else response


def content_response(
    request: Request,
    content: Content,
    etag: str,
    headers: Mapping[str, str],
    in_use: Callable[[], object] = _nothing,
) -> Response:
    """Return the content, or the range of it that the request is for.

    ``etag`` is the strong validator without its quotes. Several ranges in one request are ignored, as RFC 9110
    allows: no client needs them, and they could cost far more than the content.
    """
    quoted = f'"{etag}"'
    described = {"ETag": quoted, "Accept-Ranges": "bytes", **headers}
    if has_tag(request, quoted):
        return Response(304, described)
    described.setdefault("Content-Type", OCTETS)
    begin, end, status = 0, content.size, 200
    condition = request.headers.get("if-range", quoted)
    if "range" in request.headers and condition == quoted:
        found = requested_range(request.headers["range"], content.size)
        if found == UNSATISFIABLE:
            described |= {"Content-Range": f"bytes */{content.size}", "Content-Length": "0"}
            return Response(416, described)
        if found is not None:
            (begin, end), status = found, 206
            described["Content-Range"] = f"bytes {begin}-{end - 1}/{content.size}"
    described["Content-Length"] = str(end - begin)
    if request.method == "HEAD":
        return Response(status, described)
    is_all = (begin, end) == (0, content.size)
    parts = content.parts if is_all else content.cut(begin, end)
    return Response(status, described, parts, in_use)


UNSATISFIABLE = (-1, -1)
"""A range that begins behind the end."""
_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})", re.ASCII)


def requested_range(text: str, size: int) -> tuple[int, int] | None:
    """Return the begin and the end of the range that a header asks for, of a content of ``size`` bytes.

    None means that the header is ignored: it is malformed, or has another unit or several ranges.
    :data:`UNSATISFIABLE` means that no byte of the content is in it.
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        return None
    first, last = match.groups()
    if not first:
        if not last:
            return None
        return (max(size - int(last), 0), size) if int(last) and size else UNSATISFIABLE
    begin, end = int(first), int(last) + 1 if last else size
    if last and end <= begin:
        return None
    return (begin, min(end, size)) if begin < size else UNSATISFIABLE


def has_tag(request: Request, quoted: str) -> bool:
    """Return whether the client has the version with this validator, which has its quotes."""
    listed = request.headers.get("if-none-match", "")
    if not listed:
        return False
    return listed.strip() == "*" or quoted in (
        tag.strip().removeprefix("W/") for tag in listed.split(",", 100)
    )
