"""Models whose files lie in object storage or on a web server: they are downloaded, and then read as a folder."""

from __future__ import annotations

import contextlib
import secrets
import threading
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import escape, join_some, quote, quote_url
from blobstore.core.file_kinds import HEAD, absence
from blobstore.core.schemes import WEB, scheme_of
from blobstore.core.urls import last_part
from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import (
    BlobDamaged,
    DamagedSource,
    InvalidDigest,
    RemoteRefused,
    SourceNotFound,
    UsageError,
)
from blobstore.http import protocol
from blobstore.http.protocol import Request
from blobstore.http.retry import Patience
from blobstore.http.rules import Rule
from blobstore.http.transport import Transport
from blobstore.manifests.file_names import is_safe_name
from blobstore.objects.address import StoreAddress
from blobstore.objects.client import ObjectClient
from blobstore.sources.fetched_tree import FetchedTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.store.partial import PartialBlob

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.fetched_tree import Downloads

_STREAMS: Final = 8
"""Parts of a file that are fetched at once."""
_PIECE: Final = 8 << 20
"""Bytes of an object that one request reads."""
_PATIENCE: Final = Patience()
_FILE: Final = Rule(is_hint=False, success=(200, 206))


class _File(NamedTuple):
    """What is known of a file before it is fetched."""

    size: int
    version: str
    """The ETag, or when it was written; empty if the server says neither, so that no download can be continued."""
    has_ranges: bool = True
    """Whether the server sends parts of it."""


@contextlib.contextmanager
def opened_remote(
    source: str,
    options: SourceOptions,
    downloads: Downloads,
    sha256: str | None,
    progress: Progress | None,
) -> Iterator[HuggingFaceFolder]:
    """Download the files of a model that ``options`` select, and open them.

    Args:
        source: ``s3://bucket/folder``, also with gs or az, or the file itself; or the URL of a weight file.
        options: what to select.
        downloads: has the files.
        sha256: what the only file must have; None to check nothing.
        progress: called with the name of a file, bytes done and total bytes.

    Raises:
        SourceNotFound: there is nothing.
        DamagedSource: a file changed in the meantime, does not have the digest, or is something else.
        RemoteError: the server cannot be reached, or refuses.
        UsageError: the address or the digest is malformed.
        BlobstoreError: as :class:`HuggingFaceFolder` and ``downloads``.
    """
    digest = None if sha256 is None else _parsed(sha256)
    with contextlib.closing(_Web(source) if scheme_of(source) in WEB else _Bucket(source)) as place:
        if digest is not None and len(place.files) > 1:
            raise UsageError(f"{quote(place.address)} has several files, and one SHA-256 is given")
        tree = _Tree(place, options, downloads, digest)
        found, _ = tree.take(progress)
    with contextlib.closing(HuggingFaceFolder(tree.root, options, found)) as opened:
        opened.notices.extend(place.notices)
        yield opened


class _Tree(FetchedTree):
    """The files of a place. They lie in ``files`` of the folder, and unfinished ones in ``partial``."""

    def __init__(
        self,
        place: _Bucket | _Web,
        options: SourceOptions,
        downloads: Downloads,
        sha256: Digest | None,
    ) -> None:
        self._place = place
        self._sha256 = sha256
        version = f"{sorted(place.files.items())} {sha256}"
        if sha256 is None and not all(file.version for file in place.files.values()):
            version += secrets.token_hex(16)  # so that no later download continues it
        folder = downloads.folder(place.address, version)
        self._partial = folder / "partial"
        sizes = {name: file.size for name, file in place.files.items()}
        super().__init__(folder / "files", sizes, options, place.address, downloads)

    def first_bytes(self, name: str) -> bytes:
        """See :class:`FetchedTree`."""
        end = min(self._place.files[name].size, HEAD)
        return self._checked(name, b"".join(self._place.read(name, 0, end)))

    def left_of(self, name: str) -> int:
        """See :class:`FetchedTree`."""
        return 0 if (self.root / name).exists() else self._place.files[name].size

    def fetch(self, names: Sequence[str], progress: Progress | None) -> None:
        """See :class:`FetchedTree`."""
        missing = [name for name in names if not (self.root / name).exists()]
        pool = WorkerPool(_STREAMS, progress, sum(map(self.left_of, missing)))
        for name in missing:
            digest = self._sha256 or Digest.of(name.encode())
            file = PartialBlob.open(self._partial, BlobId(digest, self._place.files[name].size))
            if file is None:
                raise Cancelled("stopped")  # the lock of the folder keeps other processes from it
            with file:
                self._fill(name, file, pool)
                if self._sha256 is not None and not file.has_right_digest():
                    raise DamagedSource(
                        f"{self.label(name)} has another SHA-256 than {digest.hex}",
                        advice="check the address and the digest",
                    )
                file.complete()
                with file.path.open("rb") as stream:
                    self._checked(name, stream.read(HEAD))
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                file.path.rename(target)
                file.discard()

    def _checked(self, name: str, head: bytes) -> bytes:
        """Return the first bytes of a file, which must not be something else in its place."""
        if kind := absence(name, head):
            advice = "put the file itself there, or give another address"
            raise kind.error(self.label(name), advice=advice)
        return head

    def _fill(self, name: str, file: PartialBlob, pool: WorkerPool) -> None:
        what = f"fetching {escape(name)}"
        pool.report(file.done, what)

        def fill(parts: Sequence[int]) -> None:
            begin, end = (file.missing_bytes(part) for part in (parts[0], parts[-1]))
            left = iter(parts)
            part = next(left)
            for whole in self._place.read(name, begin.start, end.stop):
                piece = memoryview(whole)
                while piece:
                    while not (count := len(file.missing_bytes(part))):
                        part = next(left)
                    file.write(part, piece[:count])
                    piece = piece[count:]
                pool.report(len(whole), what)

        jobs = [[part] for part in file.missing]
        if jobs and not self._place.files[name].has_ranges:
            jobs = [file.missing]  # the server sends only all of the file, which is read once
        pool.run(jobs, fill, self._place.abort)


class _Bucket:
    """A folder in object storage, or one object."""

    def __init__(self, text: str) -> None:
        address = StoreAddress.parse(text)
        self.address = str(address)
        self._is_stopping = threading.Event()
        self._client = ObjectClient(address)
        listed = {one.key: _File(one.size, _bare(one.etag)) for one in self._client.list("")}
        if not listed and address.prefix:
            folder, _, name = address.prefix.rpartition("/")
            self._client = ObjectClient(StoreAddress(address.scheme, address.bucket, folder))
            size, tag = self._client.size(name), self._client.tag(name)
            if size is not None:
                self.address = str(StoreAddress(address.scheme, address.bucket, folder))
                listed[name] = _File(size, _bare(tag.etag) if tag else "")
        is_store = any("blobs/sha256-" in name for name in listed)
        if is_store or not listed:
            found, advice = "has no files, or does not exist", "check the address"
            if is_store:
                found = "is a store, and not a folder of files"
                advice = "'blobstore pull' fetches a model of a store"
            raise SourceNotFound(f"{quote(self.address)} {found}", advice=advice)
        self.files = {name: file for name, file in listed.items() if is_safe_name(name)}
        # Some programs end the names of empty objects with a slash, to show folders.
        unsafe = [quote(it) for it in listed if it not in self.files and not it.endswith("/")]
        left = f"left out: {join_some(unsafe, 5)}, which no file of a folder can have as its name"
        self.notices = [left] if unsafe else []

    def read(self, name: str, begin: int, end: int) -> Iterator[memoryview]:
        """Yield bytes of a file. Raises DamagedSource and RemoteError."""
        what = quote(f"{self.address}/{name}")
        for start in range(begin, end, _PIECE):
            stop = min(start + _PIECE, end)
            piece = self._client.read(name, start, stop)
            if piece is None or (piece.size, _bare(piece.etag)) != self.files[name][:2]:
                raise _changed(what)
            if len(piece.data) != stop - start:
                raise DamagedSource(f"{what}: the server sends fewer bytes than asked for")
            yield piece.data
            if self._is_stopping.is_set():
                raise Cancelled("stopped")

    def abort(self) -> None:
        """End the requests of other threads after the pieces that they wait for."""
        self._is_stopping.set()

    def close(self) -> None:
        """Do nothing: obstore closes its connections itself."""


class _Web:
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

    def _look(self) -> _File:
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
                return _File(size, _version_in(response), has_ranges)
        raise AssertionError("unreachable")

    def read(self, name: str, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes of a file. Raises DamagedSource and RemoteError."""
        pieces = partial(self._pieces, self.files[name], end)
        return self._transport.retry().resumed(begin, end, pieces) if begin < end else iter(())

    def _pieces(self, file: _File, end: int, begin: int) -> Generator[bytes, None, None]:
        is_whole = begin == 0 and end == file.size
        headers = {} if is_whole else {"range": protocol.range_of(begin, end)}
        try:
            with self._sent(headers) as (request, response):
                if _version_in(response) != file.version:
                    raise _changed(self._what)
                yield from self._transport.span(request, response, begin, end, file.size)
        except BlobDamaged:
            raise _changed(self._what) from None

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


def _bare(etag: str) -> str:
    """Return an ETag without quotes, which the lists of Azure do not have."""
    return etag.strip('"')


def _version_in(response: Any) -> str:
    """Return what identifies the version of a file: its ETag, or when it was changed."""
    etag = str(response.headers.get("etag", ""))
    is_strong = etag and not etag.startswith("W/")
    return etag if is_strong else str(response.headers.get("last-modified", ""))


def _parsed(sha256: str) -> Digest:
    try:
        return Digest.parse(f"sha256:{sha256.lower().removeprefix('sha256:')}")
    except InvalidDigest:
        raise UsageError(
            f"not a SHA-256: {quote(sha256)}; expected 64 hexadecimal digits"
        ) from None


def _changed(what: str) -> DamagedSource:
    return DamagedSource(f"{what} changed while it was downloaded; run the same command again")
