"""A run that goes on from what the callback has kept is in tests/real/test_resumed_trainer.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import blobstore
from blobstore.errors import BlobDamaged, InvalidReference, UsageError
from blobstore.store.local import LocalStore


@pytest.mark.parametrize(
    "content",
    [
        b'{"global_step": "../../x", "best_global_step": null}',
        b'{"global_step": 1, "best_global_step": "../../x"}',
        b'{"global_step": 1}',
        b"[]",
        b"{",
    ],
)
def test_a_step_that_does_not_say_which_it_is_is_not_restored(
    store: LocalStore, tmp_path: Path, content: bytes
) -> None:
    pytest.importorskip("transformers", reason="it is in the test group")
    from blobstore.integrations.trainer import StoreCallback

    files = {"trainer_state.json": content}
    blobstore.save({"w": torch.ones(1)}, "run:best", files=files, store=store)
    with pytest.raises(BlobDamaged, match="run:best: trainer_state.json does not say which step"):
        StoreCallback("run", store).restore(tmp_path / "out", "best")
    assert not (tmp_path / "out").exists()


def test_a_step_has_the_random_states_of_all_processes(store: LocalStore, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="it is in the test group")
    from blobstore.integrations.trainer import StoreCallback

    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    save_file({"w": torch.ones(1)}, folder / "model.safetensors")
    torch.save({"cpu": torch.zeros(1)}, folder / "rng_state_0.pth")

    class Processes:
        def wait_for_everyone(self) -> None:
            torch.save({"cpu": torch.ones(1)}, folder / "rng_state_1.pth")

    args: Any = SimpleNamespace(output_dir=str(tmp_path), distributed_state=Processes())
    state: Any = SimpleNamespace(
        is_world_process_zero=True, global_step=1, log_history=[], best_global_step=None
    )
    StoreCallback("run", store).on_save(args, state, args)
    loaded = blobstore.load("run:step-1", store=store)
    assert loaded["rng_state_1"]["cpu"].tolist() == [1]


def test_a_run_that_could_not_be_kept_is_refused_before_the_training() -> None:
    pytest.importorskip("transformers", reason="it is in the test group")
    from blobstore.integrations.trainer import StoreCallback

    with pytest.raises(UsageError, match="'s3://bucket/runs' is an address, not the path"):
        StoreCallback("run", "s3://bucket/runs")
    with pytest.raises(InvalidReference, match="not a model name"):
        StoreCallback("run:step")
