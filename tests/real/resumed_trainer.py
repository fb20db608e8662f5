"""A run of the Trainer that is killed, and goes on from what its callback has kept.

A program of its own: ``python -m tests.real.resumed_trainer FOLDER``. It writes what each run has logged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

import blobstore
from blobstore.integrations.trainer import StoreCallback
from tests.support.ports import free_port

STEPS, KILLED = 6, 4
"""The run is killed after this step, which it has saved."""


class Kill(transformers.TrainerCallback):
    """Kills the program."""

    def on_step_begin(
        self, args: Any, state: transformers.TrainerState, *_: Any, **__: Any
    ) -> None:
        """Kill it after the last step that is to be saved."""
        if state.global_step == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


class Run(NamedTuple):
    """A run of the Trainer."""

    name: str
    callbacks: list[Any]
    store: Path | None = None
    """It goes on from there."""
    ranks: int = 1
    dropout: float = 0.1
    """Of which the random numbers depend on the number of ranks."""


def train(rank: int, folder: Path, run: Run, port: int) -> None:
    """Train a model on one rank."""
    name, callbacks, store, ranks, dropout = run
    if ranks > 1:
        os.environ.update(RANK=f"{rank}", LOCAL_RANK=f"{rank}", WORLD_SIZE=f"{ranks}")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}")
    torch.set_num_threads(1)
    transformers.set_seed(0)
    sizes: Any = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 32}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    arguments = transformers.TrainingArguments(
        str(folder / name),
        max_steps=STEPS,
        per_device_train_batch_size=2 // ranks,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        greater_is_better=True,  # the first one, which a run that goes on must have
        use_cpu=True,
        ddp_backend="gloo" if ranks > 1 else None,
        disable_tqdm=True,
        report_to=[],
    )
    tokens = torch.arange(64 * 8).remainder(31).reshape(64, 8)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=callbacks,
    )
    checkpoint = StoreCallback("run", store).restore(folder / name) if store else None
    trainer.train(resume_from_checkpoint=checkpoint)
    timed = ("runtime", "per_second")
    logged = [
        {key: value for key, value in entry.items() if not key.endswith(timed)}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]
    model: Any = trainer.model
    best = model.transformer.wte.weight.double().sum().item()
    if rank:
        return
    (folder / f"{name}.json").write_text(json.dumps([*logged, {"best": best}], sort_keys=True))


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    store, other = folder / "store", folder / "other"
    (folder / "bucket").mkdir()

    def start(*values: Any, **options: Any) -> None:
        run = Run(*values, **options)
        # Forked, so that torch is imported once.
        start_processes(train, (folder, run, free_port()), nprocs=run.ranks, start_method="fork")

    def kill(*values: Any, **options: Any) -> None:
        try:
            start(*values, **options)
        except ProcessExitedException as error:
            assert error.exit_code == -signal.SIGKILL

    start("undisturbed", [])
    kill("killed", [StoreCallback("run", store), Kill()])
    start("from-store", [], store)
    for model in blobstore.list(store=store):
        address = f"file://{folder}/bucket/{model.reference}"
        blobstore.push(model.reference, address, store=store)
        blobstore.pull(address, str(model.reference), store=other)
    start("from-bucket", [], other)
    # On two ranks, each with half of a batch.
    ranks = folder / "ranks"
    start("plain", [], dropout=0.0)
    kill("plain-killed", [StoreCallback("run", ranks), Kill()], dropout=0.0)
    start("two-ranks", [], ranks, ranks=2, dropout=0.0)


if __name__ == "__main__":
    main()
