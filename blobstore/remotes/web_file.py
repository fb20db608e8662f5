"""A weight file on a web server, whose download can be continued while its ETag stays the same."""

from __future__ import annotations

import contextlib
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from blobstore.core.escape import quote, quote_url
from blobstore.core.urls import last_part
from blobstore.errors import BlobDamaged, DamagedSource, RemoteRefused, SourceNotFound, UsageError
from blobstore.http import protocol
from blobstore.http.protocol import Request
from blobstore.http.retry import Patience
from blobstore.http.rules import Rule
from blobstore.http.transport import Transport
from blobstore.manifests.file_names import is_safe_name
from blobstore.remotes.remote_file import RemoteFile, changed

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

_PATIENCE: Final = Patience()
_FILE: Final = Rule(is_hint=False, success=(200, 206))


class WebFile:
    """One file on a web server."""

    notices = ()

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            is_sound = bool(parts.hostname) and parts.port != 0 and len(url) <= protocol.MAX_URL
        except ValueError:
            is_sound = False
        if not is_sound or not (url.isascii() and url.isprintable()) or " " in url:
            raise UsageError(f"not the URL of a file: {quote_url(url)}")
        if "@" in parts.netloc:
            raise UsageError(
                f"{quote_url(url)}: a login in a URL can be read by others of this machine",
                advice="download the file with a program that asks for it, and create from the file",
            )
        name = last_part(url)
        if not is_safe_name(name):
            raise UsageError(f"{quote_url(url)} does not end with the name of a file")
        # Without the query, which may hold a signature that gives access.
        self.address = f"{parts.scheme.lower()}://{parts.netloc}{parts.path.rpartition('/')[0]}"
        self._url = url.partition("#")[0]
        self._what = quote(f"{self.address}/{name}")
        self._transport = Transport(
            parts.netloc,
            plain_http=parts.scheme.lower() == "http",
            find_login=lambda _: None,
            limiter=None,
            patience=_PATIENCE,
            authorization="",
        )
        try:
            self.files = {name: self._look()}
        except BaseException as error:
            self.close()
            if isinstance(error, BlobDamaged):  # it has no first byte
                raise DamagedSource(f"{self._what} is empty") from None
            raise

    def _look(self) -> RemoteFile:
        """Ask what the file is, by its first byte: signed URLs allow no HEAD."""
        for attempt in self._transport.retry():
            with attempt, self._sent({"range": protocol.range_of(0, 1)}) as (_, response):
                has_ranges = response.status_code == HTTPStatus.PARTIAL_CONTENT
                text = response.headers.get("content-length")
                if has_ranges:
                    text = response.headers.get("content-range", "").rpartition("/")[2]
                size = protocol.content_length(text)
                if size is None:
                    advice = "download it with another program, and create from the file"
                    raise DamagedSource(
                        f"{self._what}: the server does not state its size", advice=advice
                    )
                return RemoteFile(size, _version_in(response), has_ranges)
        raise AssertionError("unreachable")

    def read(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes of a file. Raises DamagedSource and RemoteError."""
        pieces = partial(self._pieces, self.files[name], end)
        return self._transport.retry().resumed(begin, end, pieces) if begin < end else iter(())

    def _pieces(self, file: RemoteFile, end: int, begin: int) -> Generator[bytes, None, None]:
        is_whole = begin == 0 and end == file.size
        headers = {} if is_whole else {"range": protocol.range_of(begin, end)}
        try:
            with self._sent(headers) as (request, response):
                if _version_in(response) != file.version:
                    raise changed(self._what)
                yield from self._transport.span(request, response, begin, end, file.size)
        except BlobDamaged:
            raise changed(self._what) from None

    @contextlib.contextmanager
    def _sent(self, headers: dict[str, str]) -> Iterator[tuple[Request, Any]]:
        what = self._what
        request = Request(what=what, method="GET", url=self._url, rule=_FILE, headers=headers)
        try:
            with self._transport.send(request) as response:
                yield request, response
        except RemoteRefused as error:
            if error.status == HTTPStatus.NOT_FOUND:
                raise SourceNotFound(
                    f"there is no file {what}", advice="check the address"
                ) from None
            if error.status not in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
                raise
            advice = "download the file with a program that can log in, and create from the file"
            raise RemoteRefused(error.message, advice=advice, status=error.status) from None

    def abort(self) -> None:
        """End the requests of other threads."""
        self._transport.abort()

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


def _version_in(response: Any) -> str:
    """Return what identifies the version of a file: its ETag, or when it was changed."""
    etag = str(response.headers.get("etag", ""))
    is_strong = etag and not etag.startswith("W/")
    return etag if is_strong else str(response.headers.get("last-modified", ""))
