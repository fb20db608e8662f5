"""All commands on the pages about serving work, in their order."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm does not run on this machine")

import torch
import transformers

from tests.real.tiny import write_tokenizer
from tests.support.clients import forking, run_python
from tests.support.pages import ROOT, commands, in_python, program
from tests.support.ports import free_port

PAGES = ROOT / "docs" / "guides" / "serving"
SERVER = "python -m blobstore.integrations.mlx_lm.server "


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return environment variables for the pages' commands, in a folder with the pages' model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "llama-3.2-1b")
    write_tokenizer(tmp_path / "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    return {
        **os.environ,
        "BLOBSTORE_HOME": str(tmp_path / "store"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    done = run_python(command, environment)
    assert done.code == 0, done.stdout + done.stderr
    return done.stdout


def test_the_page_on_transformers_is_right(environment: dict[str, str]) -> None:
    (create,) = commands(PAGES / "transformers.md")
    assert "created llama-3.2:1b" in run(in_python(create), environment)
    shown = run(
        [
            sys.executable,
            "-c",
            f"{program(PAGES / 'transformers.md')}\nprint(type(model), model.dtype)",
        ],
        environment,
    )
    generated, described = shown.splitlines()
    assert len(re.findall(r"w\d+", generated)) >= 8
    assert described.endswith("LlamaForCausalLM'> torch.float32")


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_the_page_on_mlx_lm_is_right(environment: dict[str, str]) -> None:
    create, serve, *questions = commands(PAGES / "mlx-lm.md")
    assert "created llama-3.2:1b" in run(in_python(create), environment)
    generated = run([sys.executable, "-c", program(PAGES / "mlx-lm.md")], environment)
    assert len(generated.split()) == 8

    assert serve.startswith(SERVER)
    port = str(free_port())
    assert all("127.0.0.1:8080/" in question for question in questions)
    assert "--port 8080" in serve
    command = in_python(serve.replace("8080", port))
    server = forking().start("python", *command[1:], environment=environment)
    try:
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert server.is_running()
            time.sleep(0.05)
        answers = [
            subprocess.run(
                ["curl", "-sf", *shlex.split(question.replace("8080", port))[1:]],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for question in questions
        ]
    finally:
        server.send(signal.SIGTERM)
        server.wait()
    assert '"id": "llama-3.2:1b"' in answers[0]
    assert f'"text": "{generated.strip()}"' in answers[1]


def is_up(url: str) -> bool:
    try:
        with urlopen(url, timeout=120) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False
