from __future__ import annotations

import json
from pathlib import Path

import pytest

from blobstore.cli.progress import _facts, _Phase, progress_bar
from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, on_terminal, on_terminal_with_pipe

HIDE_CURSOR = b"\x1b[?25l"


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("blobstore.cli.progress.time.monotonic", lambda: now)
    with progress_bar() as progress:
        assert progress is not None
        for second in range(26):
            now = 100.0 + second
            progress("layer\x1b", second * 10**6, 10**8)

    assert capsys.readouterr().err.splitlines() == [
        "progress: 10.0 MB of 100 MB (10%), 1.0 MB/s: layer\\x1b",
        "progress: 20.0 MB of 100 MB (20%), 1.0 MB/s: layer\\x1b",
    ]


def test_progress_without_a_total_says_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blobstore.cli.progress._LINE_SECONDS", 0)
    with progress_bar() as progress:
        assert progress is not None
        progress("searching for bases: 12 of 200 models", 0, 0)
    assert capsys.readouterr().err == "progress: searching for bases: 12 of 200 models\n"


def test_create_shows_progress_on_a_terminal_and_clears_it(store: LocalStore, dense: Path) -> None:
    shown = on_terminal(LAUNCHER, "create", dense, "dense")
    assert shown.startswith(HIDE_CURSOR)
    assert b"finishing" in shown
    last = shown.rpartition(b"\x1b[2K")[2]
    assert last.startswith(b"created dense:latest: 9 tensors in ")
    assert last.count(b"\n") == 1


def test_progress_stays_out_of_a_piped_result(store: LocalStore, dense: Path) -> None:
    shown, output = on_terminal_with_pipe(LAUNCHER, "create", dense, "dense", "--json")
    assert HIDE_CURSOR in shown
    assert json.loads(output)["name"] == "dense:latest"
    assert output.count(b"\n") == 1


@pytest.mark.parametrize("command", [["create", "SOURCE", "again"], ["verify"]])
def test_a_dumb_terminal_gets_no_bar(stored: LocalStore, dense: Path, command: list[str]) -> None:
    arguments = [dense if word == "SOURCE" else word for word in command]
    assert b"\x1b" not in on_terminal(LAUNCHER, *arguments, TERM="dumb")
    assert HIDE_CURSOR in on_terminal(LAUNCHER, *arguments)


def test_progress_is_escaped_and_fits_the_line() -> None:
    code = (
        "from blobstore.cli.progress import progress_bar\n"
        "with progress_bar() as progress:\n"
        "    progress('\\x1b]0;t\\x07[b]\\n\\u202e' + 'x' * 70_000, 1, 2)\n"
    )
    shown = on_terminal(code)

    assert b"\\x1b]0;t\\x07[b]" in shown
    assert b"\x1b]0" not in shown
    assert b"\x07" not in shown
    assert "\u202e" not in shown.decode()
    # One line, which the terminal does not wrap.
    assert b"\n" not in shown
    assert shown.count(b"\x1b[?7l") == shown.count(b"\x1b[?7h") == 1


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (60, "\u2501\u2501         25.0 MB of 100 MB  "),
        (80, "\u2501\u2501         25.0 MB of 100 MB  12.5 MB/s 0:00:06 "),
        (
            120,
            "\u2501\u2501\u2501\u2501\u2501\u2501                   25.0 MB of 100 MB  12.5 MB/s ETA 0:00:06 ",
        ),
    ],
)
def test_the_bar_says_as_much_as_the_terminal_has_columns(columns: int, expected: str) -> None:
    assert _facts(25 * 10**6, 100 * 10**6, 12_500_000, columns) == expected


def test_the_bar_knows_no_time_before_it_knows_a_speed_or_a_total() -> None:
    assert "-:--:--" in _facts(0, 100, 0, 80)
    assert "-:--:--" in _facts(100, 0, 50, 80)


def test_every_phase_has_its_own_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("blobstore.cli.progress.time.monotonic", lambda: now)
    phase = _Phase()
    now = 110.0
    assert phase.rate(500, 1000) == 0
    now = 112.0
    assert phase.rate(700, 1000) == 100
    assert phase.rate(0, 2000) == 0
