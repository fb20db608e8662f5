"""Eight ranks save and load a step in all placements; tests of other numbers are in ``test_training_steps``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.clients import run_python


def test_eight_ranks_save_and_load_all_placements(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "tests.real.step_grid", tmp_path / "grid", "8")
    ran = run_python(command, os.environ)
    assert ran.code == 0, ran.stderr[-5000:]
    assert ran.stdout.strip() == ("16 cells of 4 steps, 0 wrong values, 15 digests of 15 tensors")
