"""Says which argument of a call that has failed is of another type than its annotation."""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import inspect
import types
import typing
from importlib import import_module
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import InvalidCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def wrong_type(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> InvalidCall | None:
    """Return the error of an argument, or an item of it, whose type is not the annotated one; None if all are right."""
    arguments = inspect.signature(function).bind(*args, **kwargs).arguments
    try:
        hints = type_hints(function)
        if typing.get_origin(options := hints.get("options")) is typing.Unpack:
            hints |= type_hints(*typing.get_args(options))
            arguments |= arguments.pop("options", {})
    except NameError:  # of a library that is not installed
        return None
    for word, value in arguments.items():
        if not _takes(hints[word], value):
            many = value if isinstance(value, list | tuple | set) else ()
            kinds = [value, *{type(one): one for one in many}.values()]
            got = " of ".join(quote(type(one).__name__) for one in kinds)
            return InvalidCall(f"{word} must be {inspect.formatannotation(hints[word])}, got {got}")
    return None


def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a function or TypedDict, also of types that its module imports for type checkers alone.

    Raises:
        NameError: one of them is of a library that is not installed.
    """
    return typing.get_type_hints(annotated, localns=dict(_imported_for_types(annotated)))


def _imported_for_types(annotated: Any) -> Iterator[tuple[str, Any]]:
    module = inspect.getmodule(annotated)
    blocks = ast.parse(inspect.getsource(module)).body if module else ()
    for node in (it for block in blocks if isinstance(block, ast.If) for it in block.body):
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            with contextlib.suppress(ImportError, AttributeError):
                home = getattr(node, "module", None)
                found = import_module(home or one.name)
                yield one.asname or one.name, getattr(found, one.name) if home else found


def _takes(hint: Any, value: Any) -> bool:
    """Return whether a value, with its items, may be what an annotation says."""
    origin, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return any(_takes(one, value) for one in inner)
    if not isinstance(origin, type) or hint is Any or getattr(origin, "_is_protocol", False):
        return True
    kinds: Any = (int, float) if origin is float else origin
    if not isinstance(value, kinds):
        return False
    if origin is tuple:
        return len(inner) == len(value) and all(map(_takes, inner, value))
    if len(inner) == 1 and isinstance(value, collections.abc.Collection):
        return all(_takes(inner[0], item) for item in value)
    return True
