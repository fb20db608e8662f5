"""Markers that follow from what a test uses, so that nobody forgets one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
# What a test uses if it starts processes, which take longer than all that most tests do.
PROCESSES = {"subprocess", "multiprocessing", "concurrent.futures.process", "distributed", "fork"}
SERVERS = {
    "socket",
    "socketserver",
    "http.server",
    "starlette",
    "uvicorn",
    *(
        f"tests.support.{name}"
        for name in (
            *("cold_registry", "hostile_s3", "hub_server", "objects", "raw_server", "registry"),
            *("serve_process", "stub_registry", "token_server"),
        )
    ),
}
FRAMEWORKS = {
    "needs_torch": {"torch", "transformers", "peft"},
    "needs_mlx": {"mlx", "mlx_lm"},
}
_LIBRARIES = set().union(*FRAMEWORKS.values())
# Where decorators, properties and hypothesis keep the function that they wrap.
WRAPPERS = ("__wrapped__", "__func__", "fget", "hypothesis", "inner_test")
# Outside of tests/unit, the tests of these files alone are fast.
FAST_FILES = {"test_markers.py"}
COLLECTED = pytest.StashKey[list[pytest.Function]]()
"""All tests that were collected, also those that are deselected later."""


def mark(item: pytest.Function) -> None:
    """Add the markers of a test: by its folder, and by what its code and its fixtures use."""
    used = _used_by(item)
    may_be_fast = TESTS / "unit" in item.path.parents or item.path.name in FAST_FILES
    if not may_be_fast or used & PROCESSES:
        item.add_marker("slow")
    if used & SERVERS:
        item.add_marker("network")
    for name, libraries in FRAMEWORKS.items():
        if used & libraries:
            item.add_marker(name)


def is_fast(item: pytest.Function) -> bool:
    """Return whether a test belongs to the fast subset."""
    return not any(item.get_closest_marker(name) for name in ("slow", "network"))


def _used_by(item: pytest.Function) -> set[str]:
    """Return the names of the modules that a test uses, with its fixtures and parameters, and of their packages."""
    fixtures = tuple(found[-1].func for found in item._fixtureinfo.name2fixturedefs.values())
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    named = {value for value in parameters if isinstance(value, str)}
    used = (named & _LIBRARIES) | _reached_by_all(item.function, fixtures)
    for value in parameters:
        used |= reached(value) if callable(value) and getattr(value, "__hash__", None) else set()
    return used


@functools.cache
def _reached_by_all(test: Any, fixtures: tuple[Any, ...]) -> set[str]:
    """Return the modules that a test and its fixtures use, once for all of its parameters."""
    return reached(test).union(*map(reached, fixtures))


@functools.cache
def reached(start: Any) -> set[str]:
    """Return the modules that a function uses, by itself and by functions of the tests that it calls.

    With each module, the packages that it is in.
    """
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, ModuleType):
            names.add(value.__name__)
            continue
        if type(value).__module__ in {"builtins", "functools", "hypothesis.core"}:
            waiting += [getattr(value, wrapper, None) for wrapper in WRAPPERS]
        module = getattr(value, "__module__", None)
        if isinstance(module, str):
            names.add(module)
            if module.startswith("tests."):
                waiting += _parts(value, names)
    return _with_packages(names)


def _with_packages(names: set[str]) -> set[str]:
    """Return modules and the packages that they are in."""
    return names.union(name[: dot.start()] for name in names for dot in re.finditer(r"\.", name))


def _parts(value: Any, names: set[str]) -> Iterator[Any]:
    """Yield what a function or class of the tests refers to; add to ``names`` what it imports."""
    if isinstance(value, type):
        yield from (*value.__bases__, *vars(value).values())
    if isinstance(value, FunctionType):
        for name in _names_in(value.__code__):
            if name in value.__globals__:
                yield value.__globals__[name]
            else:
                names.add(name)


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code uses, with those of the functions inside, and its texts."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
        elif isinstance(constant, str) and constant in ("torch", "mlx"):
            yield constant
