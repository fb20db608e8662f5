"""Lightning's Trainer saves into a store, and resumes from it."""

from __future__ import annotations

from pathlib import Path

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig

import blobstore
from blobstore.remotes.catalog import read_remote_catalog
from blobstore.store.local import LocalStore

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # those of Lightning about torch, and about itself


class Net(lightning.LightningModule):
    """One matrix, with hyperparameters, an optimizer that has moments, and a scheduler."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 2)

    def training_step(self, batch: tuple[torch.Tensor], number: int) -> torch.Tensor:
        loss: torch.Tensor = self.linear(batch[0]).square().mean() / (number + 1)
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def train(folder: Path, store: LocalStore, epochs: int, resumed: str | None = None) -> Net:
    from blobstore.integrations.lightning import StoreCheckpointIO

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, save_last=True)],
        plugins=[StoreCheckpointIO("run", store)],
    )
    net = Net()
    rows = torch.arange(32, dtype=torch.float32).view(8, 4)
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=4)
    trainer.fit(net, batches, ckpt_path=resumed)
    return net


def test_a_resumed_training_ends_as_one_that_was_not_stopped(
    store: LocalStore, tmp_path: Path
) -> None:
    whole = train(tmp_path / "whole", LocalStore(tmp_path / "other"), 2)
    first = train(tmp_path / "first", store, 1)
    names = ["run:epoch-0-step-2", "run:epoch-0-step-2.state", "run:last", "run:last.state"]
    assert sorted(one.name for one in blobstore.list(store=store)) == names
    with blobstore.open("run:last", store=store, framework="torch") as model:
        assert model["linear.weight"].equal(first.linear.weight)
    resumed = train(tmp_path / "second", store, 2, "last.ckpt")
    assert resumed.linear.weight.equal(whole.linear.weight)
    assert not resumed.linear.weight.equal(first.linear.weight)


def test_a_checkpoint_that_is_not_kept_loses_its_names(store: LocalStore, tmp_path: Path) -> None:
    train(tmp_path, store, 2)
    assert not store.has_model("run:epoch-0-step-2")
    assert not store.has_model("run:epoch-0-step-2.state")
    assert store.has_model("run:epoch-1-step-4")


def test_a_checkpoint_in_object_storage_is_loaded_and_loses_its_names(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    from blobstore.integrations.lightning import StoreCheckpointIO

    address = f"file://{tmp_path}/bucket"
    (tmp_path / "bucket").mkdir()
    plugin = StoreCheckpointIO("run", address)
    for step in (1, 2):
        plugin.save_checkpoint({"state_dict": {"w": torch.ones(step)}}, f"a/step={step}.ckpt")
    plugin.remove_checkpoint("b/step=1.ckpt")
    assert plugin.load_checkpoint("step=2.ckpt")["state_dict"]["w"].tolist() == [1, 1]
    names = ["run:step-2", "run:step-2.state"]
    assert [one.address for one in read_remote_catalog(address)] == [
        f"{address}/{name}" for name in names
    ]
