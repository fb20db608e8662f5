"""A file system whose files share blocks, for tests on one that cannot: Linux's rules, by copying."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from types import SimpleNamespace
from typing import Any

import pytest

BLOCK = 4096


def share_blocks(
    monkeypatch: pytest.MonkeyPatch, *, block: int = BLOCK, fails: int = 0
) -> list[int]:
    """Let requests to share blocks succeed, or fail; return the list of the lengths shared."""
    shared: list[int] = []

    def ioctl(target: int, request: int, argument: bytes) -> int:
        assert request == 0x4020940D
        if fails:
            raise OSError(fails, os.strerror(fails))
        source, begin, length, offset = struct.unpack("=qQQQ", argument)
        # What linux/fs/remap_range.c demands: whole blocks, the last one up to the file's end.
        at_end = begin + length == os.fstat(source).st_size
        if begin % block or offset % block or not length or not (at_end or length % block == 0):
            raise OSError(errno.EINVAL, "misaligned")
        os.pwrite(target, os.pread(source, length, begin), offset)
        shared.append(length)
        return 0

    def fstatvfs(_: int) -> Any:
        return SimpleNamespace(f_bsize=block)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    monkeypatch.setattr(os, "fstatvfs", fstatvfs)
    return shared
