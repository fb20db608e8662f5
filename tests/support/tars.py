"""Entries of tars, whose headers may say anything."""

from __future__ import annotations

import tarfile
from typing import Any


def entry(name: str, data: bytes = b"", **fields: Any) -> bytes:
    """Return an entry; ``fields`` are those of :class:`tarfile.TarInfo` to set otherwise."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)
