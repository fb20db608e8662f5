"""Globs of names: ``*``, ``?`` and ``[…]``. ``*`` matches ``/`` too, and letters match in their case only."""

from __future__ import annotations

import functools
import re
from fnmatch import translate
from typing import TYPE_CHECKING, Final

from blobstore.core.escape import quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_GLOB: Final = 1000
"""Characters of a glob. Translating one takes time that grows with the square of its length."""
_NEVER: Final = "(?!)"


def glob_matches(name: str, glob: str) -> bool:
    """Return whether a glob matches a complete name.

    Raises:
        UsageError: the glob is too long.
    """
    return any_glob((glob,)).match(name) is not None


def any_glob_matches(name: str, globs: Iterable[str]) -> bool:
    """Return whether at least one of the globs matches a complete name.

    Raises:
        UsageError: a glob is too long.
    """
    return any_glob(tuple(globs)).match(name) is not None


@functools.lru_cache(maxsize=512)
def any_glob(globs: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the names that at least one of the globs matches.

    Raises:
        UsageError: a glob is too long.
    """
    for glob in globs:
        if len(glob) > MAX_GLOB:
            raise UsageError(
                f"the pattern {quote(glob)} has {len(glob)} characters; at most {MAX_GLOB} are allowed"
            )
    return re.compile("|".join(map(translate, globs)) or _NEVER)
