"""The fields of a model card: the YAML between two lines of ``---`` at its start.

A card is a stranger's text, and its fields are short texts and lists of such texts. Only these are read, in the
spellings of YAML that cards use. A field with another value (a mapping, an anchor, a type, a text of several lines)
is left out, because half of it would be another value.
"""

from __future__ import annotations

import json
import re
from itertools import islice
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

Fields = dict[str, str | list[str]]
_MAX_LINES: Final = 5000
_MAX_LINE: Final = 4000
"""Characters of a line that is read."""
_MAX_TEXT: Final = 500
"""Characters of a value."""
_FENCE = re.compile(r"---[ \t]*")
_KEY = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_-]{0,99}):(?:[ \t]+(.*)|)")
_ITEM = re.compile(r"[ \t]*-(?:[ \t]+(.*)|)")
_QUOTED = r'"(?:[^"\\]|\\.)*+"|\'(?:[^\']|\'\')*+\''
_FLOW = re.compile(rf"\s*((?:{_QUOTED}|[^,\"'\[\]{{}}][^,\[\]{{}}]*+)?)\s*(,|$)")
_WHOLE_QUOTED = re.compile(rf"({_QUOTED})[ \t]*(?:#.*)?")
_COMMENT = re.compile(r"(?:^|[ \t])#.*")
_PLAIN = re.compile(r"(?![&*!|>%@`\"'\[\]{},#?]|[-:](?: |$)).*(?<!:)")
_NOTHING = ("", "~", "null", "Null", "NULL")


def front_matter(text: str) -> Fields:
    """Return the texts and lists of texts at the start of a card, by the names of their fields.

    It is empty if there are no fields, if they do not end, or if a field occurs twice.
    """
    lines = iter(text.removeprefix("\ufeff").split("\n", _MAX_LINES))
    if not _FENCE.fullmatch(next(lines).rstrip("\r")):
        return {}
    sections: dict[str, list[str]] = {}
    name = None
    for line in map(str.rstrip, islice(lines, _MAX_LINES - 1)):
        if _FENCE.fullmatch(line):
            found = {key: _value(lines) for key, lines in sections.items()}
            return {key: value for key, value in found.items() if value}
        if match := _KEY.fullmatch(line):
            name, rest = match.groups()
            if name in sections:
                return {}
            sections[name] = [rest or ""]
        elif name is not None:
            sections[name].append(line)
    return {}


def _value(lines: Sequence[str]) -> str | list[str] | None:
    """Return the value after a name, on its line and the following ones; None for forms that are not read."""
    first = _without_comment(lines[0].strip())
    rest = [line for line in lines[1:] if line.strip() and not line.lstrip().startswith("#")]
    if first is None:
        return None
    if rest:
        items = [_ITEM.fullmatch(line) for line in rest]
        return None if first else _texts([item and (item[1] or "").strip() for item in items])
    if not first.startswith("["):
        return _text(first)
    parts, at = [], 1
    while (match := _FLOW.match(first[:-1], at)) is not None:
        parts.append(match[1].strip())
        at = match.end()
        if not match[2]:
            return _texts(parts) if first.endswith("]") else None
    return None


def _texts(items: Sequence[str | None]) -> list[str] | None:
    texts = [None if item is None else _text(_without_comment(item)) for item in items]
    return None if None in texts else [text for text in texts if text]


def _without_comment(text: str) -> str | None:
    if len(text) > _MAX_LINE:
        return None
    if text.startswith(("'", '"')):
        match = _WHOLE_QUOTED.fullmatch(text)
        return match[1] if match else None
    return _COMMENT.sub("", text).rstrip()


def _text(spelled: str | None) -> str | None:
    """Return the text that a scalar is; empty for none, and None for what is not read."""
    if spelled is None or len(spelled) > _MAX_TEXT:
        return None
    if spelled.startswith('"'):
        try:
            spelled = json.loads(spelled)  # the escapes that both languages have
        except ValueError:
            return None
    elif spelled.startswith("'"):
        spelled = spelled[1:-1].replace("''", "'")
    elif spelled in _NOTHING:
        return ""
    elif ": " in spelled or not _PLAIN.fullmatch(spelled):
        return None
    return spelled if isinstance(spelled, str) and spelled.isprintable() else None
