from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from blobstore.cli import render
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, environment

HIDE_CURSOR = b"\x1b[?25l"
RED = b"\x1b[31m"


def on_terminal(code: str, *arguments: object, exit_code: int = 0, **variables: str) -> bytes:
    """Run Python code with a pseudo-terminal for input and output; return what it shows."""
    return _on_terminal(code, *arguments, piped=False, exit_code=exit_code, **variables)[0]


def _on_terminal(
    code: str, *arguments: object, piped: bool, exit_code: int = 0, **variables: str
) -> tuple[bytes, bytes]:
    """Return what the terminal shows and, if standard output is ``piped``, what went there."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=slave,
        stdout=subprocess.PIPE if piped else slave,
        stderr=slave,
        env=environment(**{"TERM": "xterm", "NO_COLOR": "", **variables}),
    )
    os.close(slave)
    shown = b""
    while data := _read(master):
        shown += data
    os.close(master)
    output, _ = process.communicate(timeout=60)
    assert process.returncode in (exit_code, 4), shown
    return shown, output


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_949, "99.9 kB"),
        (123_456, "123 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (90_900_000, "90.9 MB"),
        (5 * 10**9, "5.0 GB"),
        (2**63 - 1, "9.2 EB"),
        (10**30, "1000000000000 EB"),
    ],
)
def test_shows_bytes_in_decimal_units(count: int, text: str) -> None:
    assert render.human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (22_713_216, "22.7 M"), (671_026_419_200, "671 B")]
)
def test_shows_counts_in_short(count: int, text: str) -> None:
    assert render.human_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.014, "0.01 s"), (59.9, "59.90 s"), (200.5, "3 min 20 s")]
)
def test_shows_durations(seconds: float, text: str) -> None:
    assert render.human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (-1000, "just now"),
        (30, "just now"),
        (90, "1 minute ago"),
        (3 * 3600 + 60, "3 hours ago"),
        (90000, "1 day ago"),
        (15 * 86400, "2 weeks ago"),
        (70 * 86400, "2 months ago"),
        (800 * 86400, "2 years ago"),
    ],
)
def test_shows_ages(age: float, text: str) -> None:
    assert render.human_age(time.time() - age) == text


def test_long_cells_do_not_widen_their_column() -> None:
    long = "x" * 150
    lines = render.table(("A", "B"), [("a", "1"), (long, "2")], right=[1]).split("\n")
    assert lines == ["A".ljust(80) + "  B", "a".ljust(80) + "  1", f"{long}  2"]


LONG_NAME = "model.layers.0." + "x" * 60 + ".weight"
TABLE = f"""
from blobstore.cli import render
row = ("{LONG_NAME}", "[4096, 4096]", "16", "33.6 MB", "0123456789ab")
print(render.table(("NAME", "SHAPE", "BITS", "SIZE", "DIGEST"), [row], right=(2, 3)))
"""


def test_a_table_fits_the_terminal() -> None:
    heading, row = on_terminal(TABLE, NO_COLOR="1").decode().splitlines()

    assert heading.split() == ["NAME", "SHAPE", "SIZE"]
    assert len(row) == 80
    assert row.startswith("model.layers.0.x")
    assert row.endswith("x.weight  [4096, 4096]  33.6 MB")
    assert "\u2026" in row


def test_a_table_that_fits_keeps_its_columns() -> None:
    shown = on_terminal(TABLE.replace(LONG_NAME, "a"), NO_COLOR="1").decode()
    assert shown.split() == [
        *("NAME", "SHAPE", "BITS", "SIZE", "DIGEST"),
        *("a", "[4096,", "4096]", "16", "33.6", "MB", "0123456789ab"),
    ]


def test_a_piped_table_keeps_long_names(capsys: pytest.CaptureFixture[str]) -> None:
    exec(TABLE, {})
    assert LONG_NAME in capsys.readouterr().out


def test_errors_are_red_on_a_terminal(stored: LocalStore) -> None:
    assert b"\x1b[31m\x1b[1mblobstore: error:\x1b[0m no such" in on_terminal(
        LAUNCHER, "shwo", exit_code=2
    )
    assert b"\x1b" not in on_terminal(LAUNCHER, "shwo", exit_code=2, NO_COLOR="1")


def test_progress_without_a_terminal_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("blobstore.cli.render.time.monotonic", lambda: now)
    with render.progress_bar() as progress:
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
    monkeypatch.setattr(render, "_LINE_SECONDS", 0)
    with render.progress_bar() as progress:
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
    shown, output = _on_terminal(LAUNCHER, "create", dense, "dense", "--json", piped=True)
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
        "from blobstore.cli.render import progress_bar\n"
        "with progress_bar() as progress:\n"
        "    progress('evil\\x1b]0;title\\x07[bold]\\n\\u202e' + 'x' * 70_000, 1, 2)\n"
    )
    shown = on_terminal(code)

    assert b"evil\\x1b]0;title\\x07" in shown
    assert b"[bold]" in shown
    assert b"\x1b]0" not in shown
    assert b"\x07" not in shown
    assert "\u202e" not in shown.decode()
    # One line of text: the cursor never moves up by more than the line that is redrawn.
    assert shown.count(b"\x1b[1A") == 1


def test_a_terminal_sees_damage_in_red(stored: LocalStore) -> None:
    layer = stored.resolve(Reference.parse("dense")).layers[0]
    (stored.folder("blobs") / layer.digest.file_name).unlink()
    shown = on_terminal(LAUNCHER, "show", "dense").splitlines()
    assert [line.startswith(RED) and b"error:" not in line for line in shown].count(True) == 1
    assert shown[2].startswith(RED + b"empty")
    assert b"\x1b" not in on_terminal(LAUNCHER, "show", "dense", NO_COLOR="1")


def test_a_terminal_gets_the_manifest_escaped(stored: LocalStore) -> None:
    path = stored.manifest_path(Reference.parse("dense"))
    path.write_bytes(b'{"\x1b]0;x\x07": "\xe2\x80\xae\xff"}\n')
    shown = on_terminal(LAUNCHER, "show", "dense", "--manifest")
    assert shown == b'{"\\x1b]0;x\\x07": "\\u202e\\xff"}\r\n'
