from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.core.arguments import local_path, one_or_more


def test_expands_the_home_folder_at_the_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/people/me")
    assert local_path("~/models") == Path("/people/me/models")
    assert local_path(Path("~/models")) == Path("/people/me/models")
    assert local_path("./~/models") == Path("~/models")
    assert local_path("models~") == Path("models~")


def test_an_unknown_user_is_not_expanded() -> None:
    assert local_path("~nobody-of-that-name/x") == Path("~nobody-of-that-name/x")


def test_a_string_is_one_argument() -> None:
    assert one_or_more("*.onnx") == ("*.onnx",)
    assert one_or_more(["*.onnx", "*.bin"]) == ("*.onnx", "*.bin")
    assert one_or_more(()) == ()
