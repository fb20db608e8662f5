"""vLLM, with its own loader, gets its model from ``blobstore serve`` as from the Hub."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM does not run on this machine")

import transformers

from blobstore.operations.create.create import create
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.store.local import LocalStore
from tests.support.ports import free_port
from tests.support.serve_process import Serving, serving
from tests.vllm.models import PROMPTS, expected, saved

OPTIONS = ["--enforce-eager", "--max-model-len=64", "--num-gpu-blocks-override=64", "--seed=0"]


@contextlib.contextmanager
def vllm(server: Serving, folder: Path, model: str) -> Iterator[str]:
    """Run ``vllm serve`` with an empty cache; return its address."""
    port = free_port()
    environment = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(folder / "hub"),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": "",
    }
    program = Path(sys.executable).with_name("vllm")
    command = [str(program), "serve", model, f"--port={port}", *OPTIONS]
    log = folder / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, cwd=folder)
    try:
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def is_up(url: str) -> bool:
    try:
        with urlopen(url, timeout=120) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


def test_vllm_loads_a_frozen_model_from_a_server(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "llama")
    store = LocalStore(tmp_path / "store")
    create(folder, "team/llama", store=store)
    freeze_models(["team/llama"], store=store)
    wanted = {
        "model": "team/llama",
        "prompt": PROMPTS[0]["prompt_token_ids"],
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    with serving(store, tmp_path) as server, vllm(server, tmp_path, "team/llama") as url:
        asked = Request(
            f"{url}/v1/completions",
            json.dumps(wanted).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(asked, timeout=60) as answer:
            text = json.load(answer)["choices"][0]["text"]
        assert any("vllm" in entry["agent"] for entry in server.log() if "agent" in entry)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert text.split() == str(tokenizer.decode(expected("llama").tokens[0])).split()
