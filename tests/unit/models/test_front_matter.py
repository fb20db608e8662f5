"""The fields at the start of a model card."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blobstore.models.front_matter import front_matter

CARD = """---
pipeline_tag: text-generation
library_name: "transformers"  # a comment
license: 'mit'
quoted: 'it''s "so"'
language:
- en
- 'de'   # a comment
base_model:
  - org/base

  # a comment
  - org/other
tags: [tiny, "a, b", 'c']
datasets: []
empty:
link: https://example.org/#part
---
# Not a field
license: apache-2.0
"""


def test_texts_and_lists_of_texts_are_read() -> None:
    expected = {
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "license": "mit",
        "quoted": 'it\'s "so"',
        "language": ["en", "de"],
        "base_model": ["org/base", "org/other"],
        "tags": ["tiny", "a, b", "c"],
        "link": "https://example.org/#part",
    }
    assert front_matter(CARD) == expected
    assert front_matter("\ufeff" + CARD.replace("\n", "\r\n")) == expected


def test_what_is_read_is_what_yaml_says() -> None:
    yaml = pytest.importorskip("yaml")
    stated = yaml.safe_load(CARD.split("---\n")[1])
    assert front_matter(CARD) == {name: value for name, value in stated.items() if value}


@pytest.mark.parametrize(
    "value",
    [
        "&anchor text",
        "*anchor",
        "!!python/object/apply:os.system [x]",
        "|\n  several\n  lines",
        "> folded",
        "a text\n  on two lines",
        "{flow: mapping}",
        "\n  nested: mapping",
        "\n- name: mapping",
        "\n- - list",
        "\n- a\n  b",
        "[a, [b]]",
        "[a, {b: c}]",
        "[a, b",
        "[a,\n  b]",
        "'not closed",
        '"closed" and more',
        '"\\x1b[31m"',
        '"\\u001b[31m"',
        "mit\n- gpl",
        "a: b",
        "@text",
        "x" * 501,
    ],
)
def test_a_value_that_is_not_read_is_left_out(value: str) -> None:
    assert front_matter(f"---\nodd: {value}\nlicense: mit\n---\n") == {"license": "mit"}


@pytest.mark.parametrize(
    "text",
    ["", "license: mit", "---\nlicense: mit\n", "---\nlicense: mit\n---x", "\n---\na: b\n---"],
)
def test_a_card_without_fields_that_end_has_none(text: str) -> None:
    assert front_matter(text) == {}


def test_a_field_that_occurs_twice_makes_all_doubtful() -> None:
    assert front_matter("---\nlicense: mit\ntags: [a]\nlicense: gpl\n---\n") == {}


def test_hostile_cards_take_linear_time() -> None:
    program = """
        from blobstore.models.front_matter import front_matter
        many = 2**20
        for text in ("'", '"', "#", " ", "[", "x,", "[x,", "- ", "\\n", "\\n- x", "\\na: b"):
            front_matter("---\\na: " + text * many + "\\n---\\n")
            front_matter("---\\na: [" + text * 1000 + "]\\n---\\n")
        """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    subprocess.run(command, check=True, timeout=240)


@given(st.text(alphabet="---\n: []'\"#&*!ab,\\\t", max_size=200))
def test_any_text_is_a_card(text: str) -> None:
    for value in front_matter("---\n" + text + "\n---\n").values():
        assert isinstance(value, str | list)
