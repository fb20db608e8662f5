"""All commands on the page about vLLM work, in their order."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

pytest.importorskip("vllm", reason="vLLM does not run on this machine")

from tests.support.pages import ROOT, commands, in_python, program
from tests.support.ports import free_port
from tests.vllm.models import saved

PAGE = ROOT / "docs" / "guides" / "serving" / "vllm.md"
EAGER = "--enforce-eager --max-model-len 64"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return environment variables for the page's commands, in a folder with the page's model."""
    saved("llama", tmp_path / "llama-3.2-1b")
    monkeypatch.chdir(tmp_path)
    return {
        **os.environ,
        "BLOBSTORE_HOME": str(tmp_path / "store"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, check=False, env=environment, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextlib.contextmanager
def serving(command: str, port: str, environment: dict[str, str]) -> Iterator[None]:
    """Run one of the page's servers on another port, and check its exit status."""
    assert "--port 8000" in command
    line = in_python(f"{command.replace('8000', port)} {EAGER}")
    environment = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = Path("server.log")
    with (
        log.open("wb") as out,
        subprocess.Popen(line, env=environment, stdout=out, stderr=out) as server,
    ):
        try:
            while not is_up(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, log.read_text(errors="replace")
                time.sleep(0.1)
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
    assert server.returncode == 0, log.read_text(errors="replace")


def is_up(url: str) -> bool:
    try:
        with urlopen(url, timeout=120) as answer:
            return bool(answer.status == 200)
    except URLError:
        return False


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_the_page_on_vllm_is_right(environment: dict[str, str]) -> None:
    create, serve, *questions, link, _, serve_folder = commands(PAGE)
    assert "created llama-3.2:1b" in run(in_python(create), environment)
    # Compiling the model for the processor would take a while, and compute a little otherwise.
    example = program(PAGE).replace("max_model_len=64", "max_model_len=64, enforce_eager=True")
    Path("example.py").write_text(example, encoding="utf-8")
    generated = run([sys.executable, "example.py"], environment).splitlines()[-1].strip()
    assert len(generated.split()) == 8
    run(in_python(link), environment)
    for command in (serve, serve_folder):
        port = str(free_port())
        with serving(command, port, environment):
            listed, completed = (
                run(["curl", "-sf", *shlex.split(line.replace("8000", port))[1:]], environment)
                for line in questions
            )
        assert '"id":"llama-3.2:1b"' in listed
        assert json.loads(completed)["choices"][0]["text"].strip() == generated


def test_the_server_reports_in_one_line_what_the_store_lacks(environment: dict[str, str]) -> None:
    done = subprocess.run(
        in_python("python -m blobstore.integrations.vllm.server nothing"),
        capture_output=True,
        check=False,
        env=environment,
        text=True,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("blobstore: error: no model 'nothing:latest' in the store ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--load-format=auto", "--model", "--model_loader_extra_config"])
def test_the_server_rejects_another_source_of_the_weights(
    option: str, environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [*in_python("python -m blobstore.integrations.vllm.server m"), option, "x"],
        capture_output=True,
        check=False,
        env=environment,
        text=True,
    )
    assert done.returncode == 2
    assert "is not an option here: the model is NAME" in done.stderr
