"""A run of the Trainer of transformers: its steps become tags, and the best one a folder that transformers loads."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import blobstore
from blobstore.integrations.torch_checkpoint import export_trainer
from blobstore.store.local import LocalStore
from tests.real.tiny import make
from tests.unit.cli.running import run, run_json

STEPS = 4


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the Trainer writes, with a checkpoint after each step."""
    pytest.importorskip("accelerate", reason="it is in the test group")
    folder = tmp_path_factory.mktemp("training") / "out"
    trainer(folder).train()
    return folder


def trainer(folder: Path) -> transformers.Trainer:
    """Return a Trainer, which saves each of its steps."""
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=STEPS,
        save_steps=1,
        per_device_train_batch_size=1,
        use_cpu=True,
        disable_tqdm=True,
        logging_strategy="no",
        report_to=[],
    )
    rows = [
        {"input_ids": torch.arange(start, start + 8), "labels": torch.arange(start, start + 8)}
        for start in range(STEPS)
    ]
    return transformers.Trainer(make("llama"), arguments, train_dataset=rows)


def tags(store: LocalStore) -> list[str]:
    return sorted(reference.tag for reference in store.references())


def test_a_training_goes_on_from_the_exported_state_as_if_undisturbed(
    out: Path, tmp_path: Path
) -> None:
    store = LocalStore(tmp_path / "store")
    blobstore.create(out / "checkpoint-2", "run:2", store=store, state=True)
    export_trainer("run:2", tmp_path / "checkpoint-2", store=store)
    trainer(tmp_path / "again").train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    last = f"checkpoint-{STEPS}"
    found, expected = (
        load_file(folder / last / "model.safetensors") for folder in (tmp_path / "again", out)
    )
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    assert not (tmp_path / "again" / "checkpoint-2").exists()


def test_steps_become_tags_and_the_best_one_a_folder_that_transformers_loads(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(tmp_path / "store")
    monkeypatch.setenv("BLOBSTORE_HOME", str(store.root))
    steps = [f"checkpoint-{number}" for number in range(1, STEPS + 1)]

    run("create", "--all", out, "run")
    assert tags(store) == steps

    changes = run_json("diff", "run:*", exit_code=1)["steps"]
    assert [(row["a"], row["b"]) for row in changes] == [
        (f"run:{one}", f"run:{other}") for one, other in pairwise(steps)
    ]
    weights = load_file(out / "checkpoint-1" / "model.safetensors")
    assert {row["tensors"] for row in changes} == {len(weights)}
    assert all(row["differing"] and row["bytes"] for row in changes)

    run("tag", "run:checkpoint-1", "run:best")
    run("tag", "run:checkpoint-2", "run:best")
    run("rm", "run:*", "--keep-last", 1)
    assert tags(store) == ["best", "checkpoint-2", "checkpoint-4"]
    run("gc", "--older-than", "0s")
    run("verify")

    run("export", "run:best", tmp_path / "hub")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    saved = load_file(out / "checkpoint-2" / "model.safetensors")
    assert {name: loaded.state_dict()[name].equal(tensor) for name, tensor in saved.items()} == (
        dict.fromkeys(saved, True)
    )
