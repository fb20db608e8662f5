"""Where the bytes of a file come from: a file, an object of Python that reads a file, or a web server."""

from __future__ import annotations

import http.client
import os
import re
import threading
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from blobstore.core.escape import escape, quote, quote_url
from blobstore.errors import SafetensorError

if TYPE_CHECKING:
    from collections.abc import Callable
    from email.message import Message

_FIRST_READ: Final = 1 << 16
"""Bytes at the beginning that a web server is asked for at once: few headers are larger."""
_TIMEOUT: Final = 30.0
"""Seconds without a byte."""
_MAX_SECONDS: Final = 600.0
"""Seconds of a request."""
_ATTEMPTS: Final = 4
_PAUSE: Final = 0.5
"""Seconds before the second attempt; twice as many before the next one."""
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})", re.ASCII)
_RETRIED: Final = {
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
}


class ByteSource(Protocol):
    """The bytes of a file. Threads may read concurrently."""

    @property
    def size(self) -> int:
        """Bytes of the file."""

    @property
    def gap(self) -> int:
        """Ranges with fewer bytes between them are read with one request."""

    @property
    def request(self) -> int:
        """Bytes per request, if several are sent at once."""

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on.

        Raises:
            SafetensorError: the file has become shorter, or has changed.
            OSError: it cannot be read.
        """


class FileSource:
    """An open file, which is closed with this object."""

    gap = 4096
    request = 4 << 20

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self.size = size

    def __del__(self) -> None:
        os.close(self._descriptor)

    def __reduce__(self) -> str:
        """Refuse copies: each would close the file."""
        raise TypeError("an open file cannot be copied or pickled")

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on. Raises as :meth:`ByteSource.read_into`."""
        done = 0
        while done < len(memory):
            count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if not count:
                raise SafetensorError("Error while reading: the file has become shorter")
            done += count


class StreamSource:
    """A binary file object that can seek, such as ``io.BytesIO`` or a file of fsspec. It is not closed."""

    gap = 4096
    request = 4 << 20

    def __init__(self, file: Any) -> None:
        """Take a file object.

        Raises:
            TypeError: it is not binary.
            OSError: it cannot seek.
        """
        self._file = file
        self._lock = threading.Lock()
        self.size = int(file.seek(0, os.SEEK_END))

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on. Raises as :meth:`ByteSource.read_into`."""
        with self._lock:
            self._file.seek(offset)
            while memory:
                data = self._file.read(len(memory))
                if not isinstance(data, bytes | bytearray | memoryview):
                    raise TypeError(f"the file object returns {type(data).__name__}, not bytes")
                if not data:
                    raise SafetensorError("Error while reading: the file has become shorter")
                if len(data) > len(memory):
                    raise SafetensorError("Error while reading: the file object returns too much")
                memory[: len(data)] = data
                memory = memory[len(data) :]


class _Part(NamedTuple):
    """What a web server says about a part of a file."""

    begin: int
    end: int
    size: int
    """Of the file."""
    tag: str | None
    """Differs if the file has changed."""


class UrlSource:
    """A file on a web server that supports range requests.

    Redirects are followed once, and later requests go where they led, until they are refused there.
    """

    gap = 256 << 10
    request = 8 << 20

    def __init__(self, url: str) -> None:
        """Ask for the beginning of the file.

        Raises:
            FileNotFoundError, PermissionError, OSError: the server has no such file, denies access, or fails.
            SafetensorError: the address is malformed or has a user name, or the server does not support range requests.
        """
        self._shown = quote_url(url)
        try:
            has_user = "@" in urlsplit(url).netloc
        except ValueError as error:
            raise SafetensorError(f"{self._shown} is not an address: {error}") from None
        if has_user:
            raise SafetensorError(
                f"{self._shown}: user names and passwords in addresses are not supported; use an address "
                "that is signed in its query, or download the file"
            )
        self._url = self._place = url
        self._opener = _opener()
        self._part: _Part | None = None
        self.size = 0
        start = bytearray(_FIRST_READ)
        self._part = part = self._retried(lambda: self._send(memoryview(start), 0))
        self.size = part.size
        self._start = bytes(start[: part.end])

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill memory with the bytes from ``offset`` on. Raises as :meth:`ByteSource.read_into`."""
        end = offset + len(memory)
        if end <= len(self._start):
            memory[:] = self._start[offset:end]
        elif end > self.size:
            raise SafetensorError("Error while reading: the file has become shorter")
        else:
            self._retried(lambda: self._send(memory, offset))

    def _retried(self, send: Callable[[], _Part]) -> _Part:
        """Send a request, again after failures that may pass."""
        for attempt in range(_ATTEMPTS):
            time.sleep(_PAUSE * (2**attempt - 1))
            is_last = attempt == _ATTEMPTS - 1
            try:
                return send()
            except urllib.error.HTTPError as error:
                error.close()
                # The target of a redirect may have expired.
                may_pass = error.code in _RETRIED or self._place != self._url
                if is_last or not may_pass:
                    raise self._refused(error.code) from None
            except (OSError, http.client.HTTPException) as error:
                is_wrong_address = self._part is None and isinstance(error, urllib.error.URLError)
                if is_last or is_wrong_address:
                    reason = escape(str(getattr(error, "reason", None) or error), 200)
                    raise OSError(f"{self._shown} cannot be read: {reason}") from None
            self._place = self._url
        raise AssertionError

    def _send(self, memory: memoryview, offset: int) -> _Part:
        """Read a range of the file, or less if the file ends before."""
        request = urllib.request.Request(  # noqa: S310 - see _opener()
            self._place,
            headers={
                "Range": f"bytes={offset}-{offset + len(memory) - 1}",
                "Accept-Encoding": "identity",
                "User-Agent": "blobstore",
            },
        )
        until = time.monotonic() + _MAX_SECONDS
        with self._opener.open(request, timeout=_TIMEOUT) as response:
            part = self._checked(response.status, response.headers, offset, len(memory))
            self._place = response.geturl()
            rest = memory[: part.end - part.begin]
            while rest:
                count = response.readinto(rest)
                if not count or time.monotonic() > until:
                    raise http.client.IncompleteRead(b"", len(rest))
                rest = rest[count:]
            return part

    def _checked(self, status: int, headers: Message, offset: int, count: int) -> _Part:
        """Return the part that a response has. Raises SafetensorError if it is not the one asked for."""
        encoding = headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in {"", "identity"}:
            raise SafetensorError(
                f"{self._shown}: the server sends bytes in the encoding {quote(encoding)}, which was not "
                "accepted; download the file"
            )
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if status != HTTPStatus.PARTIAL_CONTENT or found is None:
            raise SafetensorError(
                f"{self._shown}: the server does not support range requests; download the file"
            )
        begin, last, size = map(int, found.groups())
        part = _Part(begin, last + 1, size, headers.get("ETag") or headers.get("Last-Modified"))
        if self._part is not None and (size, part.tag) != (self._part.size, self._part.tag):
            raise SafetensorError(f"{self._shown} has changed while it was read")
        if (begin, last + 1) != (offset, min(offset + count, size)):
            raise SafetensorError(
                f"{self._shown}: the server sends bytes {begin} to {last} of {size}, not those "
                f"from {offset} on"
            )
        return part

    def _refused(self, status: int) -> OSError | SafetensorError:
        where = self._shown
        if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
            return FileNotFoundError(f"No such file: {where} (status {status})")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return PermissionError(
                f"{where} cannot be read: the server denies access (status {status})"
            )
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and self._part is None:
            return SafetensorError(f"{where}: the file is empty")
        return OSError(f"{where} cannot be read: the server answers with status {status}")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to web servers, and none from HTTPS to HTTP."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: Any,
        code: int,
        msg: str,
        headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme not in {"https", req.type}:
            fp.close()
            raise OSError(f"it redirects to {quote_url(newurl)}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener of web addresses only, which uses the proxies of the environment."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener
