"""Runs each fuzzer on its seeds, without the library that makes other inputs of them."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FUZZERS = sorted(path.name for path in Path(__file__).parent.glob("fuzz_*.py"))


@pytest.mark.parametrize("name", FUZZERS)
def test_the_target_takes_its_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], Any]] = []

    def fuzz() -> None:
        ((arguments, target),) = calls
        assert all(argument.startswith("-") for argument in arguments[1:-2])
        seeds = list(Path(arguments[-1]).iterdir())
        assert seeds
        for seed in seeds:
            target(seed.read_bytes())
        target(b"")

    atheris = SimpleNamespace(
        instrument_imports=lambda include: contextlib.nullcontext(),
        Setup=lambda arguments, target: calls.append((arguments, target)),
        Fuzz=fuzz,
    )
    path = Path(__file__).parent / name
    monkeypatch.setitem(sys.modules, "atheris", atheris)  # type: ignore[arg-type]
    monkeypatch.delitem(sys.modules, "tests.fuzz.harness", raising=False)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    monkeypatch.delitem(sys.modules, "tests.fuzz.harness")
