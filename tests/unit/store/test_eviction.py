"""The choice of the models that leave a cache."""

from __future__ import annotations

from typing import NamedTuple

from blobstore.store.eviction import choose_evicted


class Cached(NamedTuple):
    name: str
    used: float
    blobs: dict[str, int]
    other_size: int = 0


MODELS = [
    Cached("new", 3, {"c": 100, "shared": 50}),
    Cached("old", 1, {"a": 10, "shared": 50, "own": 1000}),
    Cached("files", 2, {}, 7),
]


def evicted(
    most: int, staying: str = "", kept: frozenset[str] = frozenset()
) -> tuple[dict[str, set[str]], int]:
    """Return the blobs that go by the names of their models, and the excess."""

    def freed(model: Cached, only: set[str]) -> set[str] | None:
        return None if model.name == staying else only - kept

    chosen, excess = choose_evicted(MODELS, {"own"}, most, freed)
    return {model.name: blobs for model, blobs in chosen}, excess


def test_blobs_of_other_models_do_not_count_and_stay() -> None:
    assert evicted(167) == ({}, 0)
    assert evicted(166) == ({"old": {"a"}}, 0)


def test_the_models_that_were_not_used_for_the_longest_time_go_first() -> None:
    assert evicted(156) == ({"old": {"a"}, "files": set()}, 0)


def test_a_blob_of_several_models_goes_with_the_last_of_them() -> None:
    assert evicted(0) == ({"old": {"a"}, "files": set(), "new": {"c", "shared"}}, 0)


def test_what_stays_is_in_excess() -> None:
    assert evicted(0, staying="new") == ({"old": {"a"}, "files": set()}, 150)
    assert evicted(0, kept=frozenset({"c"})) == (
        {"old": {"a"}, "files": set(), "new": {"shared"}},
        100,
    )
