"""Targets of requests, among them hostile ones."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.serve.targets import MAX_FIELDS, InvalidTarget, logged_path, parse_form, parse_target


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("/org/m?token=secret", "/org/m"),
        ("http://user:secret@host/org/m?token=secret", "/org/m"),
        ("HTTP://secret@host", "/"),
        ("user:secret@host:80", "/"),
        ("http:secret@host/org", "/org"),
        ("/http://host/m", "/http://host/m"),
        ("*", "/"),
        ("", "/"),
    ],
)
def test_the_log_has_no_secret_of_a_target(target: str, path: str) -> None:
    assert logged_path(target) == path


def test_segments_and_query_are_decoded_apart() -> None:
    target = parse_target("/api/models/a/tree/refs%2Fpr%2F1/caf%C3%A9?recursive=true&limit=5&x=a+b")
    assert target.segments == ("api", "models", "a", "tree", "refs/pr/1", "café")
    assert target.query == {"recursive": ["true"], "limit": ["5"], "x": ["a b"]}
    assert target.first("limit") == "5"
    assert target.first("none", "default") == "default"


@pytest.mark.parametrize(
    "target",
    [
        "",
        "*",
        "a",
        "http://host/a",
        "/a b",
        "/a%",
        "/a%2",
        "/a%zz",
        "/%ff",
        "/%00",
        "/%0d%0aSet-Cookie:a",
        "/a\r\nb",
        "/a#b",
        "/é",
        "/a\\b",
        "/" + "a" * 9000,
        "/?" + "a&" * (MAX_FIELDS + 1),
    ],
)
def test_a_malformed_target_is_refused(target: str) -> None:
    with pytest.raises(InvalidTarget):
        parse_target(target)


@given(st.text())
def test_any_text_is_parsed_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidTarget):
        assert all(part.isprintable() for part in parse_target(f"/{text}").segments)
    with contextlib.suppress(InvalidTarget):
        parse_form(text)
