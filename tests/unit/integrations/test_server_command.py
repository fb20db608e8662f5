"""The frame of the commands that serve: options, errors and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.errors import ModelNotFound
from blobstore.integrations.server_command import Asked, run_server


def serve(asked: list[Asked], *arguments: str) -> int:
    return run_server("some.module", "a server", "some serve", asked.append, arguments)


def test_gives_the_model_the_store_and_the_server_s_own_options(tmp_path: Path) -> None:
    asked: list[Asked] = []
    options = ("--store", str(tmp_path), "--verify", "digest", "--read", "pread")
    assert serve(asked, "m:1", *options, "--port", "80", "--prefetch", "read") == 0
    (one,) = asked
    assert one.name == "m:1"
    assert one.store.root == tmp_path
    assert one.opening == {"verify": "digest", "read": "pread", "prefetch": "read"}
    assert one.rest == ["--port", "80"]


def test_opens_as_the_library_does_where_nothing_is_said() -> None:
    asked: list[Asked] = []
    assert serve(asked, "m") == 0
    assert asked[0].opening == {"verify": "size", "read": "mmap", "prefetch": None}


def test_does_not_guess_what_an_option_is_short_for() -> None:
    asked: list[Asked] = []
    assert serve(asked, "m", "--ver", "digest") == 0
    assert asked[0].rest == ["--ver", "digest"]


def test_an_empty_store_is_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Asked] = []
    assert serve(asked, "m", "--store", "") == 2
    assert capsys.readouterr().err == "blobstore: error: the store's folder is empty text\n"
    assert asked == []


def test_an_error_is_one_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: Asked) -> None:
        message = "no model\x1b[31m"
        raise ModelNotFound(message)

    assert run_server("some.module", "a server", "some serve", fail, ["m"]) == 3
    assert capsys.readouterr().err == "blobstore: error: no model\\x1b[31m\n"


def test_ctrl_c_ends_it_as_a_signal_would() -> None:
    def interrupt(_: Asked) -> None:
        raise KeyboardInterrupt

    assert run_server("some.module", "a server", "some serve", interrupt, ["m"]) == 130


@pytest.mark.parametrize("wrong", [[], ["m", "--verify", "much"], ["m", "--read", "ahead"]])
def test_says_how_it_is_used(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve([], *wrong)
    assert capsys.readouterr().err.startswith("usage: python -m some.module NAME [--store DIR]")
