"""The command that prints the table of faults."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.faults.outcomes import Effort, Outcome, table
from tests.faults.processes import ROOT


def test_the_table_shows_losses() -> None:
    lost = Outcome("cut", injected=1200, names_lost=1, bytes_lost=2048, others=3)
    skipped = Outcome("trace", skipped="strace is not installed")
    assert table([lost, skipped]).splitlines()[2:] == [
        "| cut | 1,200 | 1 | 2,048 | 3 |",
        "| trace | not run: strace is not installed | | | |",
    ]


def test_one_injection_is_made_even_without_time() -> None:
    assert list(Effort(3, seconds=0)) == [0]
    assert list(Effort(3)) == [0, 1, 2]


def test_prints_json_of_the_kinds_that_are_asked_for() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--only", "model", "--budget", "0s", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    (row,) = json.loads(done.stdout)
    assert row["fault"] == "random protocol against a dictionary (steps)"
    assert row["injected"] > 0
    assert done.returncode == bool(row["violations"]), done.stderr
