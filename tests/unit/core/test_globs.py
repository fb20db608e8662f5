"""Globs of names."""

from __future__ import annotations

import pytest

from blobstore.core.globs import MAX_GLOB, any_glob_matches, glob_matches
from blobstore.errors import UsageError


@pytest.mark.parametrize(
    ("name", "glob", "expected"),
    [
        ("team/a", "team/*", True),
        ("team/a/b", "*", True),
        ("a", "[ab]", True),
        ("A", "a", False),
        ("ab", "a", False),
        ("a\nb", "a?b", True),
        ("[", "[", True),
    ],
)
def test_a_glob_matches_a_complete_name(name: str, glob: str, expected: bool) -> None:
    assert glob_matches(name, glob) is expected


def test_no_globs_match_nothing() -> None:
    assert not any_glob_matches("a", ())
    assert any_glob_matches("a", ("b", "a"))


@pytest.mark.parametrize("glob", ["[" * 100_000, "*a" * 100_000])
def test_a_glob_that_would_take_seconds_is_refused(glob: str) -> None:
    with pytest.raises(UsageError, match=f"has {len(glob)} characters; at most {MAX_GLOB}"):
        glob_matches("a", glob)


@pytest.mark.parametrize("glob", ["[" * MAX_GLOB, "*a" * (MAX_GLOB // 2), "[!" * (MAX_GLOB // 2)])
def test_the_longest_globs_end(glob: str) -> None:
    assert not glob_matches("a" * 400 + "b", glob)
