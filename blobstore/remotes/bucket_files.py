"""The files of a model in object storage: a folder, or one object."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import join_some, quote
from blobstore.core.workers import Cancelled
from blobstore.errors import DamagedSource, SourceNotFound
from blobstore.manifests.file_names import is_safe_name
from blobstore.objects.address import StoreAddress
from blobstore.objects.client import ObjectClient
from blobstore.remotes.remote_file import RemoteFile, changed

if TYPE_CHECKING:
    from collections.abc import Iterator

_PIECE: Final = 8 << 20
"""Bytes of an object that one request reads."""


class BucketFiles:
    """A folder in object storage, or one object."""

    def __init__(self, text: str) -> None:
        address = StoreAddress.parse(text)
        self.address = str(address)
        self._is_stopping = threading.Event()
        self._client = ObjectClient(address)
        listed = {one.key: RemoteFile(one.size, _bare(one.etag)) for one in self._client.list("")}
        if not listed and address.prefix:
            folder, _, name = address.prefix.rpartition("/")
            self._client = ObjectClient(StoreAddress(address.scheme, address.bucket, folder))
            size, tag = self._client.size(name), self._client.tag(name)
            if size is not None:
                self.address = str(StoreAddress(address.scheme, address.bucket, folder))
                listed[name] = RemoteFile(size, _bare(tag.etag) if tag else "")
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
                raise changed(what)
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


def _bare(etag: str) -> str:
    """Return an ETag without quotes, which the lists of Azure do not have."""
    return etag.strip('"')
