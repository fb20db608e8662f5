from __future__ import annotations

import math
from pathlib import Path

import pytest

from blobstore.core.arguments import bytes_of, local_path, one_or_more, seconds_of
from blobstore.errors import UsageError


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


def test_a_size_is_a_number_of_bytes_or_a_text() -> None:
    assert [bytes_of(one) for one in (5, 5.5, "5", "1.5KiB", "2 GB")] == [5, 5, 5, 1536, 2 * 10**9]
    for wrong in (math.nan, math.inf, "1 h", ""):
        with pytest.raises(UsageError):
            bytes_of(wrong)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(0, 0), (1.5, 1.5), ("0s", 0), ("30m", 1800), (" 1.5d ", 129600), ("2w", 1209600)],
)
def test_a_time_is_a_number_of_seconds_or_a_text(given: float | str, seconds: float) -> None:
    assert seconds_of(given, "older_than") == seconds


@pytest.mark.parametrize("given", [-1, float("nan"), "", "5", "-1h", "1y", "1" * 10 + "h", None])
def test_other_times_are_usage_errors(given: float | str) -> None:
    with pytest.raises(UsageError, match="older_than must be|is not a time such as 30m, 1h or 2d"):
        seconds_of(given, "older_than")
