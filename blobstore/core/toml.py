"""TOML: the standard parser for files that are not trusted, and texts for files that it reads back."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any, Final

MAX_SIZE: Final = 4 * 2**20
"""Characters of a file. The parser takes up to a thousand bytes for some of them."""
_PART: Final = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_LONG_KEY: Final = re.compile(
    rf"(?<![A-Za-z0-9_\\-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{16}}", re.ASCII
)
"""A key of many parts, of which the parser keeps every beginning. In a string, it is refused too."""
_ESCAPED: Final = re.compile(r"[^\x20-\x7e]")
_MAX_SHORT: Final = 0xFFFF
"""The last character that ``\\uXXXX`` can name."""


def loads(text: str) -> dict[str, Any]:
    """Parse a file.

    Raises:
        ValueError: it is not TOML, or would take much time or memory. The message gives the reason.
    """
    if len(text) > MAX_SIZE:
        raise ValueError(f"it has more than {MAX_SIZE} characters")
    if _LONG_KEY.search(text):
        raise ValueError("a key has more than 16 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps_text(text: str) -> str:
    """Return a text as a basic string in ASCII.

    Raises:
        UnicodeEncodeError: it has a lone surrogate, which no string of TOML can have.
    """
    text.encode()

    def escaped(match: re.Match[str]) -> str:
        code = ord(match[0])
        return f"\\u{code:04x}" if code <= _MAX_SHORT else f"\\U{code:08x}"

    # A string of JSON is one of TOML, but for surrogates and the character DEL.
    return _ESCAPED.sub(escaped, json.dumps(text, ensure_ascii=False))
