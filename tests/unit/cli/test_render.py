from __future__ import annotations

import time

import pytest

from blobstore.cli import render
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.unit.cli.running import LAUNCHER, on_terminal

RED = b"\x1b[31m"


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


def test_a_terminal_sees_damage_in_red(stored: LocalStore) -> None:
    layer = stored.resolve(Reference.parse("dense")).layers[0]
    (stored.folder("blobs") / layer.digest.file_name).unlink()
    shown = on_terminal(LAUNCHER, "show", "dense").splitlines()
    assert [line.startswith(RED) and b"error:" not in line for line in shown].count(True) == 1
    assert shown[2].startswith(RED + b"empty")
    assert b"\x1b" not in on_terminal(LAUNCHER, "show", "dense", NO_COLOR="1")
