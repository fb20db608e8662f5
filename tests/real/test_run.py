"""A chat with a server that ``run`` has started, by the request that it prints."""

from __future__ import annotations

import json
import shlex
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import blobstore
from tests.real import tiny
from tests.support.ports import free_port
from tests.support.processes import start
from tests.unit.cli.running import command_line, environment

SECONDS = 300
HELLO = "w1 w2 w3"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model of 64 positions, which end its answers."""
    tiny.make("llama").save_pretrained(tmp_path / "chat")
    tiny.write_tokenizer(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path / "chat"


def ask(words: list[str]) -> Any:
    """Send the request of a line of curl, with another message; return the answer, or None if nobody listens."""
    program, url, *options = words
    assert program == "curl"
    headers = dict([options[options.index("-H") + 1].split(": ")])
    body = json.loads(options[options.index("-d") + 1])
    body["messages"][0]["content"] = HELLO
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return json.load(response)
    except urllib.error.URLError as error:
        assert isinstance(error.reason, ConnectionRefusedError)
        return None


def test_transformers_answers_the_request_that_run_prints(folder: Path, tmp_path: Path) -> None:
    blobstore.create(folder, "chat", store=tmp_path / "store")
    command = command_line(
        *("run", "chat", "--store", tmp_path / "store", "--with", "transformers"),
        *("--", "--port", free_port(), "--device", "cpu"),
    )
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    log = tmp_path / "log"
    answer, end = None, time.monotonic() + SECONDS
    with log.open("wb") as opened:
        server = start(command, stdout=opened, stderr=opened, env=environment(**variables))
    try:
        while answer is None and time.monotonic() < end:
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
            lines = log.read_text().splitlines()
            if len(lines) > 1 and lines[1].startswith("note: curl"):
                answer = ask(shlex.split(lines[1].removeprefix("note: ")))
    finally:
        server.kill()
        server.wait()

    assert answer is not None, log.read_text()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    network: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    asked = tokenizer(HELLO, return_tensors="pt")
    with torch.no_grad():
        count = answer["usage"]["completion_tokens"]
        expected = network.generate(**asked, max_new_tokens=count, do_sample=False)
    text = tokenizer.decode(expected[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text
    assert answer["choices"][0]["message"]["content"] == text
