"""Parts of URLs."""

from __future__ import annotations

import contextlib
from urllib.parse import unquote, urlsplit


def last_part(url: str) -> str:
    """Return the last part of the path of a URL, or else its host."""
    with contextlib.suppress(ValueError):
        parts = urlsplit(url)
        return unquote(parts.path).rstrip("/").rpartition("/")[2] or parts.netloc
    return ""
