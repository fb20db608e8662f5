from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.support.clients import run_python


def test_a_killed_rank_leaves_earlier_steps_whole_and_nothing_half(tmp_path: Path) -> None:
    ran = run_python((sys.executable, "-m", "tests.faults.killed_ranks", tmp_path), os.environ)
    assert ran.code == 0, ran.stderr[-5000:]
