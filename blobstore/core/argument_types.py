"""Checks the types of arguments that are easily guessed wrong, where a program calls the library."""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import inspect
import os
import types
import typing
from importlib import import_module
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.errors import InvalidCall, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NOUNS: Final = {
    str: "text",
    int: "whole number",
    float: "number",
    tuple: "pair",
    os.PathLike: "Path",
    collections.abc.Callable: "function",
    collections.abc.Mapping: "dict",
}
"""What errors call types."""


def check_type(name: str, value: object, kind: type, others: str = "") -> None:
    """Check that an argument is of a class of options; ``others`` says what else is taken. Raises UsageError."""
    if not isinstance(value, kind):
        raise UsageError(
            f"{name} is {quote(value)}, a value of type {type(value).__name__}; expected "
            f"blobstore.{kind.__name__}{others}"
        )


def wrong_type(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> InvalidCall | None:
    """Return the error of an argument, or an item of it, whose type is not the annotated one; None if all are right."""
    try:
        hints = typing.get_type_hints(function, localns=dict(_imported_for_types(function)))
    except NameError:  # of a library that is not installed
        return None
    bound = inspect.signature(function).bind(*args, **kwargs)
    for word, value in bound.arguments.items():
        if not _takes(hints[word], value):
            kind = quote(type(value).__name__)
            if isinstance(value, list | tuple | set) and value:
                kind += f" of {', '.join(sorted({quote(type(one).__name__) for one in value}))}"
            return InvalidCall(
                f"{word} is {' or '.join(f'a {noun}' for noun in _nouns(hints[word]))}, got {kind}"
            )
    return None


def _imported_for_types(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yield what the module of a function imports for type checkers alone."""
    module = inspect.getmodule(function)
    blocks = ast.parse(inspect.getsource(module)).body if module else ()
    for node in (it for block in blocks if isinstance(block, ast.If) for it in block.body):
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            with contextlib.suppress(ImportError, AttributeError):
                home = getattr(node, "module", None)
                found = import_module(home or one.name)
                yield one.asname or one.name, getattr(found, one.name) if home else found


def _takes(hint: Any, value: Any) -> bool:
    """Return whether a value may be what an annotation says. Items are looked at in lists, tuples and sets alone."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return any(_takes(one, value) for one in inner)
    if not isinstance(origin, type) or hint is Any or getattr(origin, "_is_protocol", False):
        return True
    if not isinstance(value, (int, float) if origin is float else origin):
        return False
    if isinstance(value, tuple) and origin is tuple:
        return len(inner) == len(value) and all(map(_takes, inner, value))
    if len(inner) == 1 and isinstance(value, collections.abc.Collection):
        return all(_takes(inner[0], item) for item in value)
    return True


def _nouns(hint: Any) -> Iterator[str]:
    """Yield what errors call each type that an annotation takes."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        yield from dict.fromkeys(chain.from_iterable(map(_nouns, inner)))
    elif len(inner) == 1 and origin not in _NOUNS:
        yield f"list of {' or '.join(f'{noun}s' for noun in _nouns(inner[0]))}"
    elif origin is not type(None):
        yield _NOUNS.get(origin, getattr(origin, "__name__", ""))
