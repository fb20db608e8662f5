from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from blobstore.core import gc_pause
from blobstore.core.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def _nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(gc_pause._Program, "has_frozen", False)
    gc.unfreeze()
    yield
    gc.freeze()  # as for all other tests


@pytest.mark.parametrize("was_enabled", [True, False])
def test_pauses_garbage_collection_and_restores_its_state(was_enabled: bool) -> None:
    try:
        (gc.enable if was_enabled else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_enables_garbage_collection_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), gc_paused():
        _ = 1 / 0
    assert gc.isenabled()


@pytest.mark.slow
def test_objects_that_the_program_has_frozen_stay_frozen() -> None:
    frozen: list[list[int]] = [[]]
    gc.freeze()
    for _ in range(2):
        with gc_paused():
            made: list[list[int]] = [[] for _ in range(1000)]
        assert not any(item is frozen for item in gc.get_objects())  # which omits frozen objects
        assert any(item is made for item in gc.get_objects())


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting them looks at each: milliseconds for a program that has loaded torch."""
    counted: list[int] = []

    def count() -> int:
        counted.append(1)
        return 1

    monkeypatch.setattr(gc, "get_freeze_count", count)
    for _ in range(3):
        with gc_paused():
            pass
    assert counted == [1]


def test_objects_created_during_the_pause_are_not_frozen() -> None:
    with gc_paused():
        made: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() == 0
    assert len(made) == 1000
