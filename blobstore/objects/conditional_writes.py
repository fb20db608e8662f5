"""Writes of small objects that fail if another process has written in the meantime: names are given by them."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.errors import Conflict, RemoteError
from blobstore.objects.client import ObjectClient, ObjectTag, tag_of
from blobstore.objects.response_rules import READ_FORMER, WRITE_CHANGED, WRITE_NEW

if TYPE_CHECKING:
    from blobstore.objects.address import StoreAddress

_PROBE: Final = ".blobstore/probe"
_ATTEMPTS: Final = 5
_PAUSE: Final = 0.1
"""Seconds before a write that was refused is repeated for the first time; twice as many before the next."""
_NO_VERSION: Final = ObjectTag('"0"', "0")
"""The tag of no object that exists."""


class ConditionalClient(ObjectClient):
    """A client that replaces objects only if they are what the caller has read."""

    def __init__(self, address: StoreAddress) -> None:
        """Send nothing yet. Raises as :class:`ObjectClient`."""
        super().__init__(address)
        self._is_proven = False

    def replace(self, key: str, data: bytes, tag: ObjectTag | None) -> None:
        """Replace the version ``tag`` of a small object. If ``tag`` is None, the object must not exist.

        Raises:
            Conflict: another process was faster.
            RemoteError: the server ignores conditions, or fails.
        """
        self.check_conditions()
        for attempt in range(_ATTEMPTS):
            if attempt:  # nobody had written: the server asks to try again, as S3 does with 409
                interrupts.sleep(_PAUSE * 2 ** (attempt - 1))
            if self._is_written(key, data, tag):
                return
            meta = self._head(key, READ_FORMER)
            is_same = meta is None if tag is None else meta and tag_of(meta) == tag
            if not is_same:
                # The response to a write that succeeded may have been lost, and the write repeated.
                if meta is not None and meta["size"] == len(data):
                    found = self.get(key, len(data), READ_FORMER)
                    if found is not None and found.data == data:
                        return
                raise Conflict(f"{self._name(key)} was written by another process")
        raise RemoteError(
            f"{self._name(key)}: the server refuses to write it, although nobody else has written it",
            advice="try again, and check that the credentials allow s3:GetObject, and that no proxy "
            "changes the header ETag",
        )

    def check_conditions(self) -> None:
        """Check, once, that the server refuses to write an object whose condition is not met.

        Names are safe only then. Nothing is remembered beyond this process, as a server may be replaced.

        Raises:
            RemoteError: it writes the object nevertheless.
        """
        if self._is_proven or self.address.scheme == "file":
            return
        # The first write creates the object if it is missing. After that, neither condition can be
        # met.
        is_new = self._is_written(_PROBE, b"", None)
        if (is_new and self._is_written(_PROBE, b"", None)) or self._is_written(
            _PROBE, b"", _NO_VERSION
        ):
            raise RemoteError(
                f"{quote(self.address)}: the server ignores conditional requests, so that two "
                "processes could overwrite each other's models",
                advice="use a server that supports If-None-Match and If-Match",
            )
        self._is_proven = True

    def _is_written(self, key: str, data: bytes, tag: ObjectTag | None) -> bool:
        """Write an object if its condition is met, and return whether it was."""
        mode: Any = "create"
        if tag is not None:
            mode = {"e_tag": tag.etag} | ({"version": tag.version} if tag.version else {})

        def send() -> bool:
            if tag is not None and self.address.scheme == "file":
                return self._is_file_replaced(key, data, tag)
            self._put(key, data, mode=mode, use_multipart=False)
            return True

        return self._send(WRITE_NEW if tag is None else WRITE_CHANGED, key, send) is True

    def _is_file_replaced(self, key: str, data: bytes, tag: ObjectTag) -> bool:
        """Replace a file, under a lock, because obstore compares no ETags of files."""
        folder = Path("/", self.address.prefix, ".blobstore")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "names.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._api.head(self._reading, key)["e_tag"] != tag.etag:
                return False
            self._put(key, data, use_multipart=False)
            return True
