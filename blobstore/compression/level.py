"""The compression level, the only setting that users have. This module imports nothing heavy."""

from typing import Literal, get_args

from blobstore.core.escape import quote
from blobstore.errors import UsageError

Level = Literal["fast", "small"]
"""``fast`` prefers quick encoding and decoding; ``small`` prefers the smallest result."""


def check_compression_level(level: str) -> None:
    """Check an argument.

    Raises:
        UsageError: there is no such level.
    """
    if level not in get_args(Level):
        raise UsageError(f"level must be fast or small, got {quote(level)}")
