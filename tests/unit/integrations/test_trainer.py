"""A run that goes on from what the callback has kept is in tests/real/test_resumed_trainer.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import blobstore
from blobstore.errors import BlobDamaged
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
    blobstore.save({"w": torch.ones(1)}, "run:last", files=files, store=store)
    with pytest.raises(BlobDamaged, match="run:last: trainer_state.json does not say which step"):
        StoreCallback("run", store).restore(tmp_path / "out")
    assert not (tmp_path / "out").exists()
