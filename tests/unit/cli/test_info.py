from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from blobstore import save
from blobstore.store.local import LocalStore
from tests.support.models import write_folder
from tests.support.ollama_store import add_gguf_model
from tests.unit.cli.running import run, run_json

CARD = b"---\nlicense: apache-2.0\nbase_model:\n- org/base\n---\n# A model\n"


def rows(*arguments: object) -> dict[str, str]:
    lines = run("info", *arguments).stdout.splitlines()
    return {line[:14].strip(): line[14:] for line in lines}


def test_prints_one_page(store: LocalStore, dense: Path) -> None:
    (dense / "README.md").write_bytes(CARD)
    run("create", dense, "dense")
    run("cp", "dense", "team/copy")
    found = rows("dense")

    assert found["name"] == "dense:latest"
    assert found["also named"] == "team/copy:latest"
    assert found["ID"] == run("list", "dense").stdout.split()[5]
    assert found["source"] == "a folder"
    assert found["architecture"] == "TinyForCausalLM (tiny)"
    assert found["license"] == "apache-2.0"
    assert found["base"] == "org/base"
    assert found["files"] == "README.md, config.json, merges.txt, tokenizer.json"
    (model,) = run_json("du", "dense")["models"]
    info = run_json("info", "dense")
    # Removing one of two names frees nothing; removing both frees all.
    assert model["unique_bytes"] == 0
    assert info["disk"] == {
        "blobs": model["blobs"],
        "bytes": model["bytes"],
        "unique_bytes": model["bytes"],
    }


def test_shows_types_and_options(store: LocalStore, tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.up_proj.weight": np.ones((64, 256), np.float32),
        "model.norm.weight": np.ones(64, np.float32),
    }
    folder = write_folder(tmp_path / "model", tensors)
    run("create", folder, "model", "--quantize", "int8", "--policy", "uniform")
    info = run_json("info", "model")

    assert sum(item["tensors"] for item in info["types"]) == info["tensors"]
    assert {item["type"] for item in info["types"]} == {"int8 g64", "F32"}
    assert info["source"]["options"]["quantize"] == "int8"
    assert "int8" in run("info", "model").stdout


@pytest.mark.parametrize(
    ("file", "content", "key", "value"),
    [
        ("LICENSE", b"\n  The License\nmore", "license", "The License"),
        ("README.md", b"---\nlicense: other\nlicense_name: llama3\n---\n", "license", "llama3"),
        ("README.md", b"license: none\n", "license", None),
        ("config.json", b'{"_name_or_path": "org/x"}', "bases", ["org/x"]),
        ("adapter_config.json", b'{"base_model_name_or_path": "o/y"}', "bases", ["o/y"]),
        ("README.md", b"---\nlicense: \xff\n", "license", None),
    ],
)
def test_reads_license_and_base_from_cards_and_configs(
    store: LocalStore, dense: Path, file: str, content: bytes, key: str, value: object
) -> None:
    (dense / "config.json").write_bytes(b"{}")
    (dense / file).write_bytes(content)
    if file == "adapter_config.json":  # which goes with the weights of an adapter only
        (dense / "model.safetensors").rename(dense / "adapter_model.safetensors")
    run("create", dense, "dense")

    assert run_json("info", "dense")[key] == value


def test_escapes_what_a_card_says(store: LocalStore, dense: Path) -> None:
    (dense / "LICENSE").write_bytes(b"\x1b]0;x\x07" + b"y" * 10_000)
    run("create", dense, "dense")

    line = rows("dense")["license"]
    assert line.startswith("\\x1b]0;x\\x07y")
    assert len(line) < 300


def test_describes_a_model_of_ollama(store: LocalStore) -> None:
    add_gguf_model(store, "llama3:8b")
    info = run_json("info", "llama3:8b")
    assert (info["format"], info["tensors"], info["source"]) == ("gguf", 3, None)
    assert rows("llama3:8b")["source"] == "unknown"


def test_a_missing_blob_is_reported(stored: LocalStore) -> None:
    blob = stored.resolve("dense").layers[0]
    (stored.folder("blobs") / blob.digest.file_name).unlink()

    result = run("info", "dense", exit_code=4)

    assert result.stdout.startswith("name ")
    assert "blobstore: error: model dense:latest: layer " in result.stderr
    assert json.loads(run("info", "dense", "--json", exit_code=4).stdout)["faults"]


def test_metrics_are_shown(store: LocalStore) -> None:
    metrics = {"loss": 1.2345678, "step\x1b[1m": 1000}
    save({"w": np.zeros(3)}, "run:1", files={"metrics.json": metrics}, store=store)
    assert rows("run:1")["metrics"] == "loss 1.23457, step\\x1b[1m 1000"
    assert run_json("info", "run:1")["metrics"] == metrics
    assert "metrics: loss 1.23457, step" in run("show", "run:1").stdout
    assert run_json("show", "run:1")["metrics"] == metrics
