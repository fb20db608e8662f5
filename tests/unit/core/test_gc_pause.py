from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from blobstore.core import gc_pause
from blobstore.core.gc_pause import OldGarbage, gc_paused


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


class Cycle:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.self = self


def old_garbage() -> weakref.ref[Cycle]:
    cycle = Cycle()
    gc.collect(1)  # from now on, only a full collection looks at it
    return weakref.ref(cycle)


def test_old_garbage_is_kept_while_a_server_runs_and_young_one_is_not() -> None:
    usual = gc.get_threshold()
    with pytest.raises(KeyError), OldGarbage.kept():
        assert gc.get_threshold()[:2] == usual[:2]
        assert gc.get_threshold()[2] > 10**6
        raise KeyError
    assert gc.get_threshold() == usual


def test_old_garbage_is_collected_when_it_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with OldGarbage.kept():
        found, some = OldGarbage(), old_garbage()
        found.collect(is_idle=True)
        monkeypatch.setattr(gc_pause, "_IDLE_SECONDS", 0)
        found.collect(is_idle=False)
        assert some() is not None
        found.collect(is_idle=True)
        assert some() is None
        some = old_garbage()
        monkeypatch.setattr(gc_pause, "_IDLE_SECONDS", 1000)
        monkeypatch.setattr(gc_pause, "_BUSY_SECONDS", 0)
        found.collect(is_idle=True)
        assert some() is not None
        found.collect(is_idle=False)
        assert some() is None
        monkeypatch.setattr(gc_pause, "_BUSY_SECONDS", 1000)
        some = old_garbage()
        found.collect(is_idle=False)
        assert some() is not None
