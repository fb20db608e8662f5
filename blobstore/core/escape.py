"""The one escaper: text from files made safe for a terminal, a log line or an error message.

Names in model files are hostile input: they can hold escape sequences, line breaks, bidirectional
overrides and megabytes. Everything that shows such text to a person passes through here.
"""

from __future__ import annotations

MAX_SHOWN = 200
"""Characters that :func:`quote` shows of a text before it shortens it."""


def escape(text: str, limit: int | None = None) -> str:
    r"""Return ``text`` with every character escaped that is not plainly visible.

    Control characters, line and paragraph separators, bidirectional marks, private and
    unassigned code points and lone surrogates become ``\xNN``, ``\uNNNN`` or ``\UNNNNNNNN``. With
    ``limit``, a longer text keeps its two ends around an ellipsis, ``limit`` characters in all
    before escaping.
    """
    if limit is not None and len(text) > limit:
        tail = (limit - 1) // 3
        text = f"{text[: limit - 1 - tail]}\u2026{text[len(text) - tail :]}"
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def quote(text: object, limit: int = MAX_SHOWN) -> str:
    """Return ``text`` escaped, shortened to ``limit`` characters and in single quotes."""
    try:
        shown = str(text)
    except RecursionError:  # a decoded JSON value may be nested as deeply as the parser can go
        shown = "(nested too deeply to show)"
    return f"'{escape(shown, limit)}'"
