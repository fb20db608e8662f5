"""The markers that tests get by what they use, and the fast subset."""

from __future__ import annotations

import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support import stub_registry
from tests.support.markers import COLLECTED, TESTS, is_fast, mark, reached
from tests.support.stub_registry import StubRegistry


@pytest.fixture
def registry() -> object:
    return StubRegistry


def run() -> None:
    subprocess.run(["true"], check=True)


class Runner:
    @property
    def done(self) -> None:
        return run()


def in_a_method() -> None:
    _ = Runner().done


def in_a_function_inside() -> Callable[[], object]:
    return lambda: [run]


def by_a_local_import() -> None:
    import torch

    torch.zeros(1)


def by_a_name() -> str:
    return "mlx"


def by_a_module() -> object:
    return stub_registry.StubRegistry


def by_a_text() -> str:
    return str(Counter("subprocess"))


@pytest.mark.parametrize(
    ("function", "module"),
    [
        (run, "subprocess"),
        (in_a_method, "subprocess"),
        (in_a_function_inside, "subprocess"),
        (lambda: torch, "torch"),
        (by_a_local_import, "torch"),
        (by_a_name, "mlx"),
        (by_a_module, "tests.support.stub_registry"),
    ],
)
def test_finds_what_a_function_uses(function: Callable[[], object], module: str) -> None:
    assert module in reached(function)


def test_finds_nothing_else() -> None:
    assert reached(by_a_text) == {"tests", "tests.test_markers", "collections", "str"}


def test_a_fixture_counts(registry: object, request: pytest.FixtureRequest) -> None:
    mark(request.node)
    assert request.node.get_closest_marker("network")
    assert not request.node.get_closest_marker("slow")


@pytest.mark.parametrize("framework", ["torch", "mlx"])
def test_a_parameter_counts(framework: str, request: pytest.FixtureRequest) -> None:
    mark(request.node)
    assert request.node.get_closest_marker(f"needs_{framework}")


def test_the_fast_subset_has_tests_of_every_package(request: pytest.FixtureRequest) -> None:
    """Of every folder of which all files were collected."""
    found = defaultdict[Path, list[pytest.Function]](list)
    for item in request.config.stash[COLLECTED]:
        mark(item)
        found[item.path.parent].append(item)
    slow = [
        folder.relative_to(TESTS)
        for folder, items in found.items()
        if TESTS / "unit" in (folder, *folder.parents)
        and {item.path for item in items} == set(folder.glob("test_*.py"))
        and not any(map(is_fast, items))
    ]

    assert slow == []
