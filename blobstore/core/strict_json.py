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
from typing import Any, Final, NoReturn

MAX_VALUES: Final = 4_000_000
"""Values of a document, more than a manifest of 64 MiB has. An empty object takes 3 bytes as text, 64 in memory."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_GO_ESCAPES = {
    ord("<"): "\\u003c",
    ord(">"): "\\u003e",
    ord("&"): "\\u0026",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


def loads(data: bytes | memoryview, max_values: int = MAX_VALUES) -> Any:
    """Parse UTF-8 JSON text of about ``max_values`` values at most, so that its size bounds the memory.

    Raises:
        ValueError: the text is not strict JSON; the message gives the reason, and the position if
            it is known.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 at byte {error.start}") from None
    # Those in strings count too: this is a limit of memory, far from what documents have.
    if len(text) > max_values and sum(map(text.count, ",[{")) > max_values:
        raise ValueError(f"it has more than {max_values:,} values")
    # A callback per integer would double the time for large headers, and only "-0" needs one.
    decoder = _CAREFUL if "-0" in text else _USUAL
    try:
        value = decoder.decode(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON at character {error.pos}: {error.msg}") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds a lone surrogate") from None
    return value


def dumps(value: Any) -> str:
    """Return ``value`` as compact JSON with the escapes of Go's ``encoding/json``."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_GO_ESCAPES)


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
_USUAL = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
_CAREFUL = json.JSONDecoder(
    object_pairs_hook=_unique,
    parse_constant=_refuse,
    parse_float=_finite,
    parse_int=lambda digits: -0.0 if digits == "-0" else int(digits),
)
