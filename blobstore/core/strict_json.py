"""JSON for headers and manifests: a strict parser and a canonical encoder.

The standard parser accepts more than these formats allow. This one requires UTF-8 without a byte order
mark, and rejects duplicate keys, ``NaN``, ``Infinity``, numbers beyond a double, and lone surrogates,
even in values that are not used. It does not read ``-0`` as the integer 0. The encoder writes the same
bytes as Go's ``encoding/json``, because Ollama's digests depend on them.
"""

from __future__ import annotations

import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_MEMORY: Final = 768 * 2**20
"""Estimated bytes that a document takes while it is parsed, more than a plain manifest of 64 MiB needs."""
_MEMORY = {",": 80, ":": 120, "{": 250, "[": 90}
"""Estimated bytes for what follows a character. Those in strings count too: documents are far from the limit."""
_SPACE = re.compile(r"[ \t\r\n]*")
_PAIRED = re.compile(
    r"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+", re.DOTALL
)
"""Text whose escapes of surrogates come in pairs. Encoding the values takes several times their memory."""
_GO_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def loads(data: bytes | memoryview, max_memory: int = MAX_MEMORY) -> Any:
    """Parse UTF-8 JSON text that takes about ``max_memory`` bytes of memory at most.

    Raises:
        ValueError: the text is not strict JSON; the message gives the reason, and the position if
            it is known.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start}") from None
    _check_memory(text, max_memory)
    # A callback per integer would double the time for large headers, and only "-0" needs one.
    decoder = _CAREFUL if "-0" in text else _USUAL
    try:
        value = decoder.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at character {error.pos}: {error.msg}") from None
    if "\\u" in text and _PAIRED.fullmatch(text) is None:
        raise ValueError("a string holds a lone surrogate")
    return value


def loads_any(data: bytes | str) -> Any:
    """Parse JSON as the standard parser does, if that takes little memory: a file of another program.

    Configs of models may hold ``Infinity``, for one.

    Raises:
        ValueError: the text is not JSON, nested too deeply, or would take much memory.
    """
    text = (
        data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    )
    _check_memory(text, MAX_MEMORY)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def elements(data: bytes) -> Iterator[Any]:
    """Yield the elements of a JSON array, each parsed when it is asked for, so that a caller can count them first.

    Raises:
        ValueError: as :func:`loads_any`, or the text is not an array.
    """
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    sign, at = _sign(text, 0, "[")
    if _sign(text, at, "")[0] == "]":
        sign, at = _sign(text, at, "]")
    while sign != "]":
        try:
            value, at = _ANY.raw_decode(text, _space_end(text, at))
        except RecursionError:
            raise ValueError("nested too deeply") from None
        yield value
        sign, at = _sign(text, at, ",]")
    if _space_end(text, at) != len(text):
        raise ValueError(f"not valid JSON at character {at}: extra data")


def _sign(text: str, at: int, allowed: str) -> tuple[str, int]:
    """Return the next character after white space, and the position after it; any character if ``allowed`` is empty."""
    at = _space_end(text, at)
    sign = text[at : at + 1]
    if allowed and (not sign or sign not in allowed):
        raise ValueError(f"not valid JSON at character {at}: expected one of {allowed}")
    return sign, at + 1


def _space_end(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at


def memory_of(data: bytes) -> int:
    """Return about how many bytes of memory it takes to parse text, or a piece of one, in UTF-8."""
    return 2 * len(data) + sum(
        data.count(character.encode()) * size for character, size in _MEMORY.items()
    )


def dumps(value: Any) -> str:
    """Return ``value`` as compact JSON with the escapes of Go's ``encoding/json``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_GO_ESCAPES)


def _check_memory(text: str, max_memory: int) -> None:
    if len(text) * _MEMORY["{"] > max_memory and _memory(text) > max_memory:
        raise ValueError(f"it would take more than {max_memory >> 20} MiB of memory")


def _memory(text: str) -> int:
    """Return about how many bytes parsing takes: for the text, its copy as strings, and the values."""
    return 2 * sys.getsizeof(text) + sum(
        text.count(character) * size for character, size in _MEMORY.items()
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:200]!r} occurs twice in one object")
    return found


def _refuse(token: str) -> NoReturn:
    raise ValueError(f"not valid JSON: {token}")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits[:50])


# Created once, because that often takes longer than parsing a header.
_ANY = json.JSONDecoder()
_USUAL = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
_CAREFUL = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_refuse,
    parse_float=_finite,
    parse_int=lambda digits: -0.0 if digits == "-0" else int(digits),
)
