"""Fixtures of the attacks on checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.checkpoints import Reader, deflated_file, legacy_file, zip_file


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with Reader(tmp_path_factory.mktemp("reader")) as reader:
        yield reader


@pytest.fixture(params=[zip_file, deflated_file, legacy_file], ids=["zip", "deflated", "legacy"])
def written(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    """Return a function that writes a pickle and storages as a checkpoint, one per container format."""
    write: Callable[..., bytes] = request.param
    return write
