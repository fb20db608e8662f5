"""Requests to object storage, by the library obstore, with errors of :mod:`blobstore.errors`.

Credentials, regions and endpoints come from where the tools of each provider look for them; for S3,
:mod:`blobstore.objects.aws` finds them. :mod:`blobstore.objects.response_rules` lists the requests, and what their
answers mean. Every call of obstore goes through :func:`_guarded`.
"""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from blobstore.core import interrupts, limits
from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import RemoteError
from blobstore.objects.aws import Settings, find_settings
from blobstore.objects.failures import Failure
from blobstore.objects.response_rules import (
    CONNECT,
    DELETE,
    LIST,
    READ,
    WRITE,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from typing_extensions import Buffer

    from blobstore.objects.address import StoreAddress
    from blobstore.objects.response_rules import Request

CHUNK: Final = 16 * 2**20
"""Bytes of a part of a large upload."""
_STALL: Final = "30s"
"""Without a byte of an answer that is read."""
_TIMEOUT: Final = "10m"
"""Of a request with its answer; many parts of uploads share a slow connection."""
_UPLOADS: Final = 4
"""Parts of one upload that are sent at once."""
_RETRIES: Final = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"max_backoff": timedelta(seconds=10)},
}
_MAX_LISTED: Final = limits.LISTED
_MAX_LIST_SECONDS: Final = 3600.0
_NO_TAG: Final = "ETag Header missing"
_Found = TypeVar("_Found")


class ObjectInfo(NamedTuple):
    """An object in a listing."""

    key: str
    """Below the prefix of the store."""
    size: int
    modified: datetime
    etag: str
    """Of its version; empty if the server does not say."""


class ObjectTag(NamedTuple):
    """The identity of a version of an object."""

    etag: str
    version: str | None
    """The number of the version, which Google compares instead of the ETag."""


class ObjectVersion(NamedTuple):
    """The content of a small object, and its identity."""

    data: bytes
    tag: ObjectTag | None


class ObjectPiece(NamedTuple):
    """Bytes of an object, and the size of the whole."""

    data: memoryview
    size: int
    etag: str
    """Of the version that was read; empty if the server does not say."""


class ObjectClient:
    """The objects below one prefix of a bucket. Any number of threads may use it.

    If a request fails whose answer counts as absence (:class:`~blobstore.objects.response_rules.Request`), methods
    return None or nothing, and raise RemoteError otherwise.
    """

    def __init__(self, address: StoreAddress) -> None:
        """Send nothing to the bucket yet.

        Raises:
            MissingLibrary: obstore is not installed, or botocore, which the profile needs.
            RemoteError: the configuration cannot be used.
        """
        with optional_libraries():
            import obstore
        self.address = address
        self._api = obstore
        self._lock = threading.Lock()
        self._use(_settings(address))

    def get(self, key: str, limit: int, request: Request = READ) -> ObjectVersion | None:
        """Return an object of at most ``limit`` bytes, or None if there is none.

        Raises:
            RemoteError: it is larger, or cannot be read.
        """

        def send() -> ObjectVersion:
            found = self._api.get(self._reading, key)
            # Only the headers have arrived so far; a larger object is not read.
            if (size := found.meta["size"]) > limit:
                raise RemoteError(
                    f"{self._name(key)}: {size} bytes, expected at most {limit}",
                    advice=limits.ADVICE,
                )
            return ObjectVersion(bytes(found.bytes()), tag_of(found.meta))

        return self._send(request, key, send)

    def size(self, key: str, request: Request = READ) -> int | None:
        """Return the size of an object, or None if there is none."""
        meta = self._head(key, request)
        return None if meta is None else int(meta["size"])

    def tag(self, key: str) -> ObjectTag | None:
        """Return the tag of the version that an object has now, or None if there is no object."""
        meta = self._head(key, READ)
        return None if meta is None else tag_of(meta)

    def modified(self, key: str, request: Request = READ) -> datetime | None:
        """Return when an object was written, by the server's clock, or None if there is none."""
        meta = self._head(key, request)
        return None if meta is None else meta["last_modified"]

    def read(self, key: str, begin: int, end: int) -> ObjectPiece | None:
        """Return bytes of an object, fewer if it ends before; None if there is no such object.

        The range must not be empty.
        """

        def send() -> ObjectPiece:
            found = self._api.get(self._reading, key, options={"range": (begin, end)})
            # One piece, if the server keeps to the range.
            pieces = iter(found.stream(min_chunk_size=end - begin))
            data = memoryview(next(pieces, b""))
            if len(data) > end - begin or next(pieces, None) is not None:
                raise RemoteError(f"{self._name(key)}: the server sends more bytes than asked for")
            return ObjectPiece(data, found.meta["size"], _etag(found.meta))

        return self._send(READ, key, send)

    def put(self, key: str, data: Buffer | Iterable[Buffer], request: Request = WRITE) -> None:
        """Write an object, whatever was there; an iterable is sent in parts. Readers see all of it or none."""
        whole = isinstance(data, (bytes, bytearray, memoryview))

        def send() -> None:
            self._put(
                key, data, use_multipart=not whole, chunk_size=CHUNK, max_concurrency=_UPLOADS
            )

        # An iterable cannot be sent twice.
        self._send(request, key, send, may_repeat=whole)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; absent ones are ignored."""

        def send() -> None:
            self._api.delete(self._writer(), key)

        for key in keys:
            self._send(DELETE, key, send)

    def list(self, folder: str, request: Request = LIST) -> Iterator[ObjectInfo]:
        """Yield the objects whose keys begin with ``folder`` and a slash, or all if it is empty.

        Raises:
            RemoteError: the list cannot be read, or does not end.
        """

        def begin() -> tuple[Iterator[Any], Any]:
            pages = self._api.list(self._reading, folder, chunk_size=1000)
            return pages, next(pages, None)

        pages, page = self._send(request, folder, begin) or (iter(()), None)
        until, count, former = time.monotonic() + _MAX_LIST_SECONDS, 0, None
        while page:
            count += len(page)
            # A server that ignores the token of the next page sends the first page again.
            if page[0]["path"] == former or count > _MAX_LISTED or time.monotonic() > until:
                raise RemoteError(f"{self._name(folder)}: the server sends a list without end")
            former = page[0]["path"]
            for item in page:
                if not folder or item["path"].startswith(f"{folder}/"):
                    yield ObjectInfo(item["path"], item["size"], item["last_modified"], _etag(item))
            # The pages go on with the connection that they began with.
            page = self._send(request, folder, lambda: next(pages, None), may_repeat=False)

    def folders(self, request: Request = LIST) -> Sequence[str]:
        """Return the first parts of the keys that have a slash, as far as one response lists them."""
        found = self._send(request, "", lambda: self._api.list_with_delimiter(self._reading))
        prefixes = found["common_prefixes"] if found else ()
        inside = f"{self.address.prefix}/" if self.address.scheme != "file" else ""
        return [str(one).removeprefix(inside).strip("/").partition("/")[0] for one in prefixes]

    def _head(self, key: str, request: Request) -> Any:
        """Return obstore's description of an object, or None if it does not exist."""
        return self._send(request, key, lambda: self._api.head(self._reading, key))

    def _put(self, key: str, data: Any, **how: Any) -> None:
        try:
            self._api.put(self._writer(), key, data, **how)
        except self._api.exceptions.BaseError as error:
            if _NO_TAG not in str(error):  # of an answer that means success
                raise

    def _send(
        self, request: Request, key: str, send: Callable[[], _Found], *, may_repeat: bool = True
    ) -> _Found | None:
        """Send requests, once more if access was denied and the user's credentials have changed since.

        Return None if the answer counts as absence.
        """
        settings = self._settings
        renew = (lambda: self._renew(settings)) if may_repeat else None
        return _guarded(self._name(key), request, send, renew)

    def _renew(self, used: Settings) -> bool:
        """Read the user's settings again; return whether they differ from those that were used."""
        with self._lock:
            # Another thread may have renewed them since.
            if self._settings is used:
                if used.provider is not None:  # it renews them in time
                    return False
                found = _settings(self.address)
                if found == used:
                    return False
                self._use(found)
            return True

    def _writer(self) -> Any:
        """Return a writer. The first write makes the folder of a store with the scheme ``file``."""
        with self._lock:
            if self._writing is None:
                self._use(self._settings, is_written=True)
            return self._writing

    def _use(self, settings: Settings, *, is_written: bool = False) -> None:
        connection: Any = _guarded(
            quote(self.address),
            CONNECT,
            lambda: _connect(self.address, settings, is_written=is_written),
        )
        self._reading, self._writing = connection
        self._settings = settings

    def _name(self, key: str) -> str:
        return quote(f"{self.address}/{key}")


def _guarded(
    what: str,
    request: Request,
    call: Callable[[], _Found],
    renew: Callable[[], bool] | None = None,
) -> _Found | None:
    """Call obstore; its errors become ours, those too with which its code in Rust ends.

    Return None if the answer counts as absence.
    """
    while True:
        try:
            return interrupts.call(call)
        except BaseException as error:
            failure = Failure.of(error)
            if failure is None:
                raise
            if failure.answer in request.absent:
                return None
            if renew is None or not (failure.may_be_credentials and renew()):
                raise failure.error(what, request) from None
            # Once only: if new credentials are denied too, they are not the reason.
            renew = None


def _connect(
    address: StoreAddress, settings: Settings, *, is_written: bool = False
) -> tuple[Any, Any]:
    """Return a reader and a writer. A missing folder is read as empty, and has no writer unless it ``is_written``."""
    from obstore import store

    prefix = address.prefix or None
    if address.scheme == "file":
        folder = Path("/", address.prefix)
        if not (is_written or folder.is_dir()):  # reading makes no folders
            return store.MemoryStore(), None
        files = store.LocalStore(folder, automatic_cleanup=False, mkdir=True)
        return files, files
    client: dict[str, Any] = {"timeout": _TIMEOUT, "connect_timeout": "10s"}
    options: dict[str, Any] = {}
    config: Any = dict(settings.options)
    if address.scheme == "s3":
        client["allow_http"] = settings.options.get("endpoint", "").startswith("http://")
        if bundle := config.pop("ca_bundle", None):
            client["root_certificate"] = Path(bundle).read_bytes()
        if settings.provider is not None:
            options["credential_provider"] = settings.provider
    else:  # for emulators; obstore reads no such options from the environment if others are given
        variable = {"gs": "GOOGLE_ALLOW_HTTP", "az": "AZURE_ALLOW_HTTP"}[address.scheme]
        client["allow_http"] = os.environ.get(variable, "").lower() in ("1", "true")
    kinds: dict[str, Any] = {"gs": store.GCSStore, "az": store.AzureStore, "s3": store.S3Store}
    reading, writing = (
        kinds[address.scheme](
            address.bucket,
            prefix=prefix,
            config=config,
            client_options=client | more,
            retry_config=_RETRIES,
            **options,
        )
        # Without a read timeout for writes, because the answer to a part comes only after all of
        # its bytes.
        for more in ({"read_timeout": _STALL}, {})
    )
    return reading, writing


def _settings(address: StoreAddress) -> Settings:
    return find_settings(address) if address.scheme == "s3" else Settings({})


def tag_of(meta: Any) -> ObjectTag | None:
    """Return the identity of the version that obstore describes; None if the server does not state it."""
    etag = _etag(meta)
    return ObjectTag(etag, meta.get("version")) if etag else None


def _etag(meta: Any) -> str:
    # As the server compares it: a proxy that compresses answers may have weakened it.
    return str(meta["e_tag"] or "").removeprefix("W/")
