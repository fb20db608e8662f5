"""What is known of a file in object storage or on a web server before it is downloaded."""

from __future__ import annotations

from typing import NamedTuple

from blobstore.errors import DamagedSource


class RemoteFile(NamedTuple):
    """What is known of a file before it is fetched."""

    size: int
    version: str
    """The ETag, or when it was written; empty if the server says neither, so that no download can be continued."""
    has_ranges: bool = True
    """Whether the server sends parts of it."""


def changed(what: str) -> DamagedSource:
    """Return the error of a file that is no longer the version that was listed."""
    return DamagedSource(f"{what} changed while it was downloaded; run the same command again")
