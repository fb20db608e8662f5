"""What the attacks on checkpoints share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.checkpoints import Reader, deflated_file, legacy_file, zip_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with Reader(tmp_path_factory.mktemp("reader")) as reader:
        yield reader


@pytest.fixture(params=[zip_file, deflated_file, legacy_file], ids=["zip", "deflated", "legacy"])
def written(request: pytest.FixtureRequest) -> Callable[..., bytes]:
    """Give a function that writes a checkpoint of a pickle and storages, in every container."""
    write: Callable[..., bytes] = request.param
    return write
