"""A run of the Trainer that is killed, and goes on from what its callback has kept.

A program of its own: ``python -m tests.real.resumed_trainer FOLDER``. It writes what each run has logged.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

import blobstore
from blobstore.integrations.trainer import StoreCallback

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


def train(_: int, folder: Path, name: str, callbacks: list[Any], store: Path | None) -> None:
    """Train a model with dropout; go on from a store if one is given."""
    torch.set_num_threads(1)
    transformers.set_seed(0)
    sizes: Any = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 32}
    arguments = transformers.TrainingArguments(
        str(folder / name),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.01,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        greater_is_better=True,  # the first one, which a run that goes on must have
        use_cpu=True,
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
    (folder / f"{name}.json").write_text(json.dumps([*logged, {"best": best}], sort_keys=True))


def main() -> None:
    """Train."""
    folder = Path(sys.argv[1])
    store, other = folder / "store", folder / "other"
    (folder / "bucket").mkdir()

    def run(name: str, callbacks: list[Any], store: Path | None = None) -> None:
        # Forked, so that torch is imported once.
        start_processes(train, (folder, name, callbacks, store), nprocs=1, start_method="fork")

    run("undisturbed", [])
    try:
        run("killed", [StoreCallback("run", store), Kill()])
    except ProcessExitedException as error:
        assert error.exit_code == -signal.SIGKILL
    run("from-store", [], store)
    for model in blobstore.list(store=store):
        address = f"file://{folder}/bucket/{model.reference}"
        blobstore.push(model.reference, address, store=store)
        blobstore.pull(address, str(model.reference), store=other)
    run("from-bucket", [], other)


if __name__ == "__main__":
    main()
