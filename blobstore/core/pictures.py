"""Pictures of objects for notebooks. The code that draws them is registered from above, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Final

_PAINTERS: Final[dict[str, tuple[str, str]]] = {}


def register(kind: str, module: str, function: str) -> None:
    """Name the function that draws objects of a kind; its module is imported when a picture is needed."""
    _PAINTERS[kind] = module, function


def draw(kind: str, value: object) -> str:
    """Return a picture of an object as HTML; empty if nothing draws objects of its kind."""
    if kind not in _PAINTERS:
        return ""
    module, function = _PAINTERS[kind]
    picture: str = getattr(import_module(module), function)(value)
    return picture
