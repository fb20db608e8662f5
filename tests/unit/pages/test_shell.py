from __future__ import annotations

import json
import re

import pytest

from blobstore.pages.shell import encode, render_page

ATTACKS = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "\u2028alert(1)\u2029",
    "&lt;/script&gt;",
)


@pytest.mark.parametrize("text", ATTACKS)
def test_no_text_can_end_the_element_that_holds_the_data(text: str) -> None:
    encoded = encode({text: [text]})

    assert not set("<>&\u2028\u2029") & set(encoded)
    assert json.loads(encoded) == {text: [text]}


@pytest.mark.parametrize("text", ATTACKS)
def test_the_title_is_text(text: str) -> None:
    page = render_page(text, {})

    assert page.count("<script") == 2
    assert text not in page or "<" not in text


def test_the_policy_allows_the_own_script_and_style_alone() -> None:
    page = render_page("x", {})
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)

    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy[1].split(";"))
    assert rules["default-src"] == "'none'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["script-src"])
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", rules["style-src"])
    assert rules["trusted-types"] == "'none'"
    assert "connect-src" not in rules
    assert "connect-src 'self'" in render_page("x", {}, is_live=True)


def test_a_page_takes_under_100_kilobytes_without_data() -> None:
    assert len(render_page("x", {}).encode()) < 100_000
