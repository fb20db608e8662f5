from __future__ import annotations

import pytest

from blobstore.manifests.file_names import is_valid_name, is_valid_part


@pytest.mark.parametrize("name", [".", "..", "a/b", "a b", "é.json", "", "a\n", "a" * 256])
def test_rejects_parts_that_a_store_cannot_hold(name: str) -> None:
    assert not is_valid_part(name)


@pytest.mark.parametrize("name", ["config.json", "1_Pooling", "a" * 255, "..."])
def test_accepts_plain_names(name: str) -> None:
    assert is_valid_part(name)


def test_a_name_has_up_to_three_parts() -> None:
    assert is_valid_name("a/b/c.json")
    for name in ("a/b/c/d.json", "/a", "a//b", "a/../b", "a/"):
        assert not is_valid_name(name)
