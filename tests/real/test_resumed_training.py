from __future__ import annotations

import os
import sys
from pathlib import Path

import blobstore
from blobstore.operations.maintenance.verify import verify_models
from tests.real.resumed_training import SAVED, STEPS
from tests.support.clients import run_python


def test_a_killed_training_goes_on_with_the_same_losses_on_other_ranks(tmp_path: Path) -> None:
    ran = run_python((sys.executable, "-m", "tests.real.resumed_training", tmp_path), os.environ)
    assert ran.code == 0, ran.stderr[-5000:]
    losses = (tmp_path / "undisturbed").read_text().splitlines()
    assert len(losses) == STEPS
    assert len(set(losses)) == STEPS
    for name in ("from-store", "from-bucket"):
        assert (tmp_path / name).read_text().splitlines() == losses[SAVED:]
    assert verify_models(store=tmp_path / "store").faults == ()
    steps = blobstore.list(store=tmp_path / "store", read_metrics=True)
    last = {model.metrics["loss"] for model in steps if model.reference.tag == str(STEPS)}
    assert last == {float(losses[-1].split()[1])}
