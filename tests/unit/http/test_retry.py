from __future__ import annotations

from blobstore.http.retry import Patience


def test_waits_grow_and_end() -> None:
    patience = Patience(attempts=6, first=0.5, longest=3)

    assert [patience.delay(failures, 0, 1.0) for failures in range(1, 7)] == [0.5, 1, 2, 3, 3, None]
    assert patience.delay(1, 0, 0.0) == 0.25


def test_server_that_asks_for_patience_gets_it_within_a_limit() -> None:
    patience = Patience(longest=60)

    assert patience.delay(1, 45, 0.5) == 45
    assert patience.delay(1, 61, 0.5) is None
    assert patience.delay(1, 1e19, 0.5) is None


def test_wait_for_any_number_of_failures_is_finite() -> None:
    assert Patience(attempts=10**6).delay(10**5, 0, 1.0) == 60
