"""Conversions of the arguments that public functions accept besides their own types."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.schemes import check_path
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from blobstore.core.schemes import Role

_SIZE = re.compile(
    r"(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[kmgt]?i?)b?", re.ASCII | re.IGNORECASE
)
_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)},
}
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def local_path(path: str | os.PathLike[str], role: Role = "target") -> Path:
    """Return a path with a leading ``~`` expanded, as shells do.

    Raises:
        UsageError: it begins with ``scheme://``, which no path does.
    """
    check_path(path, role)
    # Unlike Path.expanduser, this keeps "~" where there is no home folder.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def one_or_more(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the strings of an argument. One string is not the collection of its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def parse_bytes(text: str) -> int:
    """Return the bytes that ``5GB``, ``500MiB`` or a plain number spell.

    Raises:
        UsageError: it spells none.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise UsageError(f"{quote(text)} is not a size such as 5GB or 500MiB")
    return int(float(match["number"]) * unit)


def bytes_of(value: float | str) -> int:
    """Return the bytes of an argument, which is a number or spells a size. Raises UsageError."""
    if isinstance(value, str):
        return parse_bytes(value)
    if not math.isfinite(value):
        raise UsageError(f"{value} is not a number of bytes")
    return int(value)


def parse_seconds(text: str) -> float:
    """Return the seconds that ``30m``, ``1h``, ``1.5d`` or ``0s`` spell. A number without a unit is an error.

    Raises:
        UsageError: it spells none.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{quote(text)} is not a time such as 30m, 1h or 2d")
    return float(match["number"]) * _SECONDS[match["unit"]]


def seconds_of(value: float | str, argument: str) -> float:
    """Return the seconds of an argument, which is a number or spells a duration.

    Raises:
        UsageError: it is neither, or below 0.
    """
    if isinstance(value, str):
        return parse_seconds(value)
    if not (isinstance(value, int | float) and value >= 0):
        raise UsageError(
            f"{argument} must be 0 seconds or more, or a text such as '1h', got {value!r}"
        )
    return value
