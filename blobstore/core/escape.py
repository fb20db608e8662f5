"""Escapes text from files for terminals, logs and error messages.

Names in model files are hostile input: they can contain escape sequences, line breaks, bidirectional
overrides, or megabytes of text. All such text passes through this module before it is shown.
"""

from __future__ import annotations

import re
import shlex
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

MAX_SHOWN = 200
"""Characters of a text that :func:`quote` shows before it shortens the text."""
_MAX_COMPARED = 2000
_SECRETS = re.compile(r"(?:^|(?<=//))[^/?#]*@(?!sha256:)|[?#].*", re.DOTALL)
"""The parts of an address that may be passwords, tokens or signatures."""


def escape(text: str, limit: int | None = None) -> str:
    r"""Return ``text`` with all characters escaped that are not printable.

    Control characters, line and paragraph separators, bidirectional marks, private and
    unassigned code points and lone surrogates become ``\xNN``, ``\uNNNN`` or ``\UNNNNNNNN``. A text
    longer than ``limit`` characters keeps only its start and end, with an ellipsis between them.
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
    except RecursionError:  # a decoded JSON value may be nested as deeply as the parser allows
        shown = "(nested too deeply to show)"
    return f"'{escape(shown, limit)}'"


def shell_word(text: str) -> str:
    """Return a text as one word of a command, for advice that a person may copy into a shell.

    It is the text itself unless that has characters that :func:`escape` changes.
    """
    return shlex.quote(escape(text))


def cli_command(*words: object) -> str:
    """Return a command of blobstore in single quotes, for advice, with each word quoted for a shell.

    Every advised command that has names of the user is made here. A word in capitals, such as ``NAME``, stands
    for what only the user knows.
    """
    return f"'{' '.join(('blobstore', *(shell_word(str(word)) for word in words)))}'"


def without_secrets(url: str) -> str:
    """Return a URL, or an address without a scheme, without user name, password, query and fragment."""
    return _SECRETS.sub("", url)


def quote_url(url: str) -> str:
    """Return a URL, or an address without a scheme, as :func:`quote` does, without what may be secret."""
    return quote(without_secrets(url))


def quote_place(text: str) -> str:
    """Quote a path, a name or an address: an address as :func:`quote_url`, others as :func:`quote`."""
    return quote_url(text) if "://" in text else quote(text)


def join_some(parts: Sequence[str], limit: int) -> str:
    """Join the first ``limit`` texts with commas, and add the number of the others."""
    shown = ", ".join(parts[:limit])
    return f"{shown} and {len(parts) - limit} more" if len(parts) > limit else shown


def did_you_mean(text: str, names: Collection[str]) -> str:
    """Return a question about the names that are most like a text, or nothing."""
    return question(most_like(text, names, 0.8))


def question(names: Sequence[str]) -> str:
    """Return the question whether one of the names is meant; empty without names."""
    return f"did you mean {' or '.join(map(quote, names))}?" if names else ""


def most_like(text: str, names: Collection[str], cutoff: float) -> list[str]:
    """Return at most two names that are most like a text; ``cutoff`` is how much of both must be equal."""
    from difflib import get_close_matches

    text = text[:MAX_SHOWN]
    if len(names) > _MAX_COMPARED:  # to compare texts takes long
        start, end = text[: len(text) // 2 or 1], text[len(text) // 2 :]
        similar = (name for name in names if name.startswith(start) or name.endswith(end))
        names = list(islice(similar, _MAX_COMPARED))
    if same := [name for name in names if name.casefold() == text.casefold()]:
        return same[:2]
    near = get_close_matches(text, names, n=2, cutoff=cutoff)
    # A tensor may be asked for by the name of its module.
    return near or [name for name in names if name.startswith(f"{text}.")][:2]


def bytes_text(size: float) -> str:
    """Return a number of bytes with three digits: ``768 B``, ``90.9 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:  # the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
