"""Texts from files, as the page shows them. The page's script writes them as text, never as markup."""

from __future__ import annotations

from blobstore.core.escape import escape

MAX_TEXT = 160
"""Characters of a name on the page; longer ones lose their middle."""


def shown(value: object, limit: int = MAX_TEXT) -> str:
    """Return a text of printable characters."""
    return escape(str(value), limit)
