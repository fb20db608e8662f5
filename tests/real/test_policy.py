"""The quantization policy decides right for real architectures, as reviewed line by line."""

from __future__ import annotations

import pytest

from tests.real.policy_tables import FOLDER, MODELS, source_of, table_of


@pytest.mark.parametrize("name", MODELS)
def test_decides_what_was_reviewed(name: str) -> None:
    assert table_of(source_of(name)) == (FOLDER / f"{name}.txt").read_text()


def test_every_table_is_that_of_an_architecture() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(MODELS)
