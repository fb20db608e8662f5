from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.core.escape import (
    MAX_SHOWN,
    did_you_mean,
    escape,
    quote,
    quote_place,
    quote_url,
    shell_word,
)


@pytest.mark.parametrize("text", ["", "model.layers.0.weight", "é ü 漢字 😀", "it's", 'a "b" \\ c'])
def test_does_not_change_printable_text(text: str) -> None:
    assert escape(text) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", "\\x1b[2J"),
        ("a\nb\r\tc", "a\\nb\\r\\tc"),
        ("\x00", "\\x00"),
        ("\x7f\x85\x9b", "\\x7f\\x85\\x9b"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\u202e\u2066\u200f\u061c", "\\u202e\\u2066\\u200f\\u061c"),
        ("\u200b\ufeff\xad", "\\u200b\\ufeff\\xad"),
        ("\ud800\udcff", "\\ud800\\udcff"),
        ("\ue000", "\\ue000"),
        ("\U000e0041", "\\U000e0041"),
        ("\u0378", "\\u0378"),
        ("\xa0\u3000", "\\xa0\\u3000"),
    ],
)
def test_escapes_characters_that_a_terminal_would_interpret_or_hide(text: str, shown: str) -> None:
    assert escape(text) == shown


@pytest.mark.slow
@given(st.text(st.characters()), st.none() | st.integers(1, 50))
def test_the_result_is_printable_and_encodable(text: str, limit: int | None) -> None:
    shown = escape(text, limit)
    assert shown.isprintable()
    shown.encode()


@given(st.text(alphabet="abc", min_size=1), st.integers(1, 50))
def test_shortens_to_the_limit_and_keeps_both_ends(text: str, limit: int) -> None:
    shown = escape(text, limit)
    assert len(shown) == min(len(text), limit)
    if len(text) > limit:
        head, _, tail = shown.partition("\u2026")
        assert text.startswith(head)
        assert text.endswith(tail)
        assert len(head) >= len(tail)
    else:
        assert shown == text


def test_keeps_twice_as_much_of_the_start_as_of_the_end() -> None:
    assert escape("a" * 500 + "b" * 500, 10) == "aaaaaa\u2026bbb"


def test_quotes_and_shortens() -> None:
    assert quote("a\nb") == "'a\\nb'"
    assert len(quote("x" * 70_000)) == MAX_SHOWN + 2
    assert quote(["a", 1]) == "'['a', 1]'"
    assert quote(None) == "'None'"


def test_quotes_a_value_that_is_nested_too_deeply_to_show() -> None:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    assert quote(value) == "'(nested too deeply to show)'"


NAMES = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "a\nb"]


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("model.norm.weigth", "did you mean 'model.norm.weight'?"),
        ("norm.weight", ""),
        ("model.layers.0.mlp.upproj.weight", "did you mean 'model.layers.0.mlp.up_proj.weight'?"),
        ("lmhead.weight", "did you mean 'lm_head.weight'?"),
        ("a\nbb", "did you mean 'a\\nb'?"),
        ("LM_Head.weight", "did you mean 'lm_head.weight'?"),
        ("lm_head", "did you mean 'lm_head.weight'?"),
        ("", ""),
        ("x" * 10_000, ""),
    ],
)
def test_suggests_names_that_are_alike(text: str, question: str) -> None:
    assert did_you_mean(text, NAMES) == question


def test_suggests_the_nearest_of_many_names() -> None:
    names = [f"layers.{layer}.mlp.up_proj.weight" for layer in range(100_000)]
    found = did_you_mean("layers.99999.mlp.up_prj.weight", names)
    assert found == "did you mean 'layers.99999.mlp.up_proj.weight'?"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host/a/b", "'https://host/a/b'"),
        ("https://alice:secret@host:1/a?sig=secret#secret", "'https://host:1/a'"),
        ("https://secret@host#secret?x", "'https://host'"),
        ("https://a@secret@host/x@y", "'https://host/x@y'"),
        ("//secret@host", "'//host'"),
        ("https://host/a?x=\nsecret", "'https://host/a'"),
    ],
)
def test_urls_are_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert quote_url(url) == shown


def test_only_addresses_are_shown_without_what_may_be_secret() -> None:
    assert quote_place("s3://secret@host/a?secret") == "'s3://host/a'"
    assert quote_place("a@b?c") == "'a@b?c'"


@pytest.mark.parametrize("text", ["a", "it's", "a b", "$(x)", "*", "'; x;'", "", "a\nb", "\u202e"])
def test_a_word_of_a_shell_stays_one_word(text: str) -> None:
    assert shlex.split(shell_word(text)) == [escape(text)]
