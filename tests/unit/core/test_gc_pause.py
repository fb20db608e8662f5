from __future__ import annotations

import gc

import pytest

from blobstore.core.gc_pause import gc_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_put_off_and_then_as_it_was(was_enabled: bool) -> None:
    try:
        (gc.enable if was_enabled else gc.disable)()
        with gc_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_garbage_collection_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), gc_paused():
        _ = 1 / 0
    assert gc.isenabled()


def test_what_a_program_has_frozen_stays_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            made: list[list[int]] = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= frozen
        assert len(made) == 1000
    finally:
        gc.unfreeze()


def test_objects_that_were_made_meanwhile_are_not_frozen() -> None:
    with gc_paused():
        made: list[list[int]] = [[] for _ in range(1000)]
    assert gc.get_freeze_count() == 0
    assert len(made) == 1000
