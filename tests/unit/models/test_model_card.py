from __future__ import annotations

import subprocess
import sys

import pytest

from blobstore.models.model_card import card_field


@pytest.mark.parametrize(
    "text",
    ["---\nlicense: mit\n---\n", "---\nlicense: mit\n---", "---\r\nlicense: mit\r\n---\r\nText"],
    ids=["line break", "end of the file", "carriage returns"],
)
def test_fields_are_read_up_to_the_line_that_ends_them(text: str) -> None:
    assert card_field({"README.md": text}, "license") == ["mit"]


@pytest.mark.parametrize(
    "text", ["", "license: mit", "---\nlicense: mit\n", "---\nlicense: mit\n---x"]
)
def test_a_card_without_complete_fields_has_none(text: str) -> None:
    assert card_field({"README.md": text}, "license") == []


def test_a_card_of_line_breaks_alone_takes_linear_time() -> None:
    code = (
        "from blobstore.models.model_card import card_field\n"
        "assert card_field({'README.md': '---' + '\\n' * 2**20}, 'license') == []"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
