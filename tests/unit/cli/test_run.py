from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest

from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_process

needs_server = pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")


@needs_server
def test_the_command_names_the_model_and_the_store_and_passes_arguments_on(
    stored: LocalStore,
) -> None:
    words = ("--with", "mlx-lm", "--dry-run", "--json", "--", "--port=9", "--host", "x")
    found = json.loads(run("run", "dense", *words).stdout)
    assert found["address"] == "http://x:9"
    assert found["command"] == [
        sys.executable,
        *("-m", "blobstore.integrations.mlx_lm.server", "dense:latest"),
        *("--store", str(stored.root), "--port=9", "--host", "x"),
    ]
    run("run", "dense", "--json", exit_code=2)
    run("run", "desne", "--dry-run", exit_code=3)


@needs_server
@pytest.mark.slow
def test_the_server_takes_the_place_of_the_command(stored: LocalStore) -> None:
    done = run_process("run", "dense", "--with", "mlx-lm", "--", "--help")
    assert done.returncode == 0
    assert b"python -m blobstore.integrations.mlx_lm.server NAME" in done.stdout
    assert b"curl http://127.0.0.1:8080/v1/chat/completions" in done.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_what_to_install_is_said(stored: LocalStore) -> None:
    result = run("run", "dense", "--with", "vllm", exit_code=1)
    assert "no inference server is installed: vllm; install 'vllm'" in result.stderr
