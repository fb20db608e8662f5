from __future__ import annotations

import gc

import pytest

from blobstore.core.gc_pause import gc_paused


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


def test_objects_that_the_program_has_frozen_stay_frozen() -> None:
    frozen: list[list[int]] = [[]]
    gc.freeze()
    try:
        with gc_paused():
            made: list[list[int]] = [[] for _ in range(1000)]
        assert not any(item is frozen for item in gc.get_objects())  # which omits frozen objects
        assert any(item is made for item in gc.get_objects())
    finally:
        gc.unfreeze()


def test_objects_created_during_the_pause_are_not_frozen() -> None:
    with gc_paused():
        made: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() == 0
    assert len(made) == 1000
