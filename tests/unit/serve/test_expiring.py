"""Values that hold for a while."""

from __future__ import annotations

from blobstore.serve.expiring import Expiring, bounded


def test_a_value_holds_for_its_seconds() -> None:
    known = Expiring[str, int](10)
    known.set("holds", 1, 1000)
    known.set("over", 2, 0)
    assert known.get("holds") == 1
    assert known.get("over") is None
    assert known.get("unknown") is None


def test_a_value_that_is_popped_is_known_no_more_and_may_be_old() -> None:
    known = Expiring[str, int](10)
    known.set("over", 2, 0)
    assert known.pop("over") == 2
    assert known.pop("over") is None


def test_no_more_values_are_kept_than_allowed() -> None:
    known = Expiring[int, int](5)
    for number in range(12):
        known.set(number, number, 1000)
        assert len(known) <= 5
        assert known.get(number) == number


def test_a_dictionary_that_is_full_begins_again() -> None:
    known = {"a": 1, "b": 2}
    assert bounded(known, 3) is known
    assert len(known) == 2
    assert bounded(known, 2) is known
    assert not known
