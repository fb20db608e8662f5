"""Zip archives made by hand, so that any field can be wrong."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LOCAL = (
    ("sign", "4s"),
    ("version", "H"),
    ("flags", "H"),
    ("method", "H"),
    ("time", "I"),
    ("crc", "I"),
    ("stored", "I"),
    ("size", "I"),
    ("name_size", "H"),
    ("extra_size", "H"),
)
LISTED = (
    ("sign", "4s"),
    ("made_by", "H"),
    *LOCAL[1:],
    ("comment_size", "H"),
    ("disk", "H"),
    ("attributes", "H"),
    ("mode", "I"),
    ("header", "I"),
)
END = (
    ("sign", "4s"),
    ("disk", "H"),
    ("first_disk", "H"),
    ("count_here", "H"),
    ("count", "H"),
    ("size", "I"),
    ("start", "I"),
    ("comment_size", "H"),
)
LOCATOR = (("sign", "4s"), ("disk", "I"), ("at", "Q"), ("disks", "I"))
END64 = (
    ("sign", "4s"),
    ("length", "Q"),
    ("made_by", "H"),
    ("version", "H"),
    ("disk", "I"),
    ("first_disk", "I"),
    ("count_here", "Q"),
    ("count", "Q"),
    ("size", "Q"),
    ("start", "Q"),
)


@dataclass
class Member:
    """A file to put into an archive; ``local`` and ``listed`` replace fields of its headers."""

    name: bytes = b"a"
    content: bytes = b"content"
    method: int = 0
    data: bytes | None = None
    local: Mapping[str, int | bytes] = field(default_factory=dict)
    local_name: bytes | None = None
    local_extra: bytes = b""
    listed: Mapping[str, int | bytes] = field(default_factory=dict)
    extra: bytes = b""
    comment: bytes = b""
    before: bytes = b""
    after: bytes = b""


def deflated(content: bytes) -> bytes:
    """Return the raw deflate stream of ``content``."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(content) + packer.flush()


def extra_field(kind: int, content: bytes) -> bytes:
    """Return one extra field."""
    return struct.pack("<HH", kind, len(content)) + content


def make_zip(
    members: Sequence[Member],
    *,
    comment: bytes = b"",
    is_wide: bool = False,
    end: Mapping[str, int | bytes] | None = None,
    locator: Mapping[str, int | bytes] | None = None,
    end64: Mapping[str, int | bytes] | None = None,
    before_end: bytes = b"",
    before_locator: bytes = b"",
) -> bytes:
    """Return an archive of ``members``; the mappings replace fields of its end records."""
    body, directory = b"", b""
    for member in members:
        body += member.before
        local, listed = _member(member, len(body))
        body += local
        directory += listed
    directory += before_end
    counted = {
        "count_here": len(members),
        "count": len(members),
        "size": len(directory) - len(before_end),
        "start": len(body),
    }
    out = body + directory
    if is_wide:
        at = len(out)
        out += _pack(END64, {"sign": b"PK\6\6", "length": 44, **counted}, end64)
        out += before_locator
        out += _pack(LOCATOR, {"sign": b"PK\6\7", "at": at, "disks": 1}, locator)
    return (
        out
        + _pack(END, {"sign": b"PK\5\6", **counted, "comment_size": len(comment)}, end)
        + comment
    )


def _member(member: Member, at: int) -> tuple[bytes, bytes]:
    data = member.data
    if data is None:
        data = deflated(member.content) if member.method == 8 else member.content
    name = member.name if member.local_name is None else member.local_name
    common = {
        "method": member.method,
        "crc": zlib.crc32(member.content),
        "stored": len(data),
        "size": len(member.content),
    }
    local = _pack(
        LOCAL,
        {
            "sign": b"PK\3\4",
            **common,
            "name_size": len(name),
            "extra_size": len(member.local_extra),
        },
        member.local,
    )
    listed = _pack(
        LISTED,
        {
            "sign": b"PK\1\2",
            **common,
            "name_size": len(member.name),
            "extra_size": len(member.extra),
            "comment_size": len(member.comment),
            "header": at,
        },
        member.listed,
    )
    return (
        local + name + member.local_extra + data + member.after,
        listed + member.name + member.extra + member.comment,
    )


def _pack(
    layout: Sequence[tuple[str, str]],
    values: Mapping[str, int | bytes],
    replaced: Mapping[str, int | bytes] | None,
) -> bytes:
    values = {**values, **(replaced or {})}
    assert values.keys() <= {name for name, _ in layout}
    return b"".join(struct.pack(f"<{kind}", values.get(name, 0)) for name, kind in layout)


@contextlib.contextmanager
def opened(data: bytes) -> Iterator[tuple[int, int]]:
    """Give the descriptor and the size of a file of these bytes."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield file.fileno(), os.fstat(file.fileno()).st_size
