from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import blobstore
from blobstore.operations.maintenance.verify import verify_models
from tests.real.resumed_trainer import KILLED, STEPS
from tests.support.clients import run_python


def test_a_killed_run_of_the_trainer_goes_on_as_if_undisturbed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="it is in the test group")
    ran = run_python((sys.executable, "-m", "tests.real.resumed_trainer", tmp_path), os.environ)
    assert ran.code == 0, ran.stderr[-5000:]
    undisturbed, from_store, from_bucket = (
        json.loads((tmp_path / f"{name}.json").read_text())
        for name in ("undisturbed", "from-store", "from-bucket")
    )
    losses = {entry["loss"] for entry in undisturbed if "loss" in entry}
    assert len(losses) == STEPS
    # The last entry is of the best model, which the runs load at their end.
    assert from_store == from_bucket == undisturbed

    plain, two_ranks = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("plain", "two-ranks")
    )
    assert len(plain) == len(two_ranks)
    for alone, together in zip(plain, two_ranks, strict=True):
        assert together == pytest.approx(alone, rel=1e-4)

    store = tmp_path / "store"
    models = {
        model.reference.tag: model for model in blobstore.list(store=store, read_metrics=True)
    }
    steps = [f"step-{number}" for number in range(1, KILLED + 1)]
    names = [*steps, "best", "last"]
    assert sorted(models) == sorted([*names, *(f"{name}.state" for name in names)])
    assert models["best"].digest == models["step-1"].digest
    assert models["last"].digest == models[steps[-1]].digest
    assert models["last"].metrics["loss"] in losses
    assert verify_models(store=store).faults == ()
