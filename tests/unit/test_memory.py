from __future__ import annotations

import gc

import pytest

from blobstore.memory import collector_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_garbage_collection_is_put_off_and_then_as_it_was(was_enabled: bool) -> None:
    try:
        (gc.enable if was_enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_garbage_collection_goes_on_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), collector_paused():
        _ = 1 / 0
    assert gc.isenabled()
