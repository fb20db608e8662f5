from __future__ import annotations

import threading

from blobstore.compression.scratch import scratch


def test_gives_the_same_memory_for_a_name_and_another_for_another() -> None:
    first = scratch("test one", 1000)
    first[:] = 7
    assert scratch("test one", 1000).tobytes() == b"\7" * 1000
    scratch("test two", 1000)[:] = 9
    assert scratch("test one", 900).tobytes() == b"\7" * 900


def test_grows_when_more_is_asked_for() -> None:
    assert len(scratch("test grows", 10)) == 10
    assert len(scratch("test grows", 1 << 20)) == 1 << 20
    assert len(scratch("test grows", 10)) == 10


def test_begins_where_a_page_begins() -> None:
    assert all(scratch(f"test page {size}", size).ctypes.data % 4096 == 0 for size in (1, 70_000))


def test_is_a_thread_s_own() -> None:
    places = [scratch("test thread", 100).ctypes.data]
    thread = threading.Thread(target=lambda: places.append(scratch("test thread", 100).ctypes.data))
    thread.start()
    thread.join()
    assert places[0] != places[1]
