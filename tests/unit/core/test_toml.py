from __future__ import annotations

import tomllib

import pytest

from blobstore.core import toml


@pytest.mark.parametrize("text", ["", "é", 'a"b\\', "\x00\n\x7f", "\U0001f600", "\u202e"])
def test_a_text_is_read_back(text: str) -> None:
    written = toml.dumps_text(text)
    assert written.isascii()
    assert written.isprintable()
    assert toml.loads(f"x = {written}") == {"x": text} == tomllib.loads(f"x = {written}")


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        toml.dumps_text("\ud83d")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a." * 100_000 + "b = 1", "more than 16 parts"),
        ("[" + 'a . "b\\"c" . ' * 10 + "d]", "more than 16 parts"),
        ("x = {" + "'a'." * 20 + "b = 1}", "more than 16 parts"),
        ("x = 1" + "0" * 5000, "limit"),
        ("x = " + "[" * 100_000, "nested too deeply"),
        ("#" * (toml.MAX_SIZE + 1), "more than 4194304 characters"),
        ("x", "Expected '='"),
    ],
    ids=["dotted", "header", "inline", "integer", "nested", "long", "other"],
)
def test_what_takes_much_memory_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        toml.loads(text)


@pytest.mark.parametrize("text", ["'", '"', '"\\"', "a", "\\", "a . ", "a" + " " * 100])
def test_a_key_is_looked_for_in_linear_time(text: str) -> None:
    # In quadratic time, this would take minutes.
    with pytest.raises(ValueError, match="."):
        toml.loads(text * (10**5 // len(text)))


def test_keys_of_some_parts_and_texts_with_dots_are_read() -> None:
    assert toml.loads("a.b.c = '" + "a" * 100 + ".b/" * 20 + "'")["a"]["b"]["c"].endswith("/")
