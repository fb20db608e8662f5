"""The example server, run in real processes and queried over HTTP."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import blobstore
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.real.tiny import write_tokenizer
from tests.support.clients import forking
from tests.support.damage import flip
from tests.support.serve_process import Process

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "docs" / "examples" / "serve.py"
PAGE = ROOT / "docs" / "guides" / "serving" / "example.md"
PROMPT = "w1 w2 w3"
CONTEXT = 4096
COMPLETIONS = "/v1/completions"
needs_maps = pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel in Linux's way")


class Models(NamedTuple):
    """A store with the models ``a``, ``b``, ``large`` and ``damaged``, and the answers of ``a`` and ``b``."""

    store: LocalStore
    texts: dict[str, str]
    nbytes: dict[str, int]

    def blobs(self, name: str) -> set[str]:
        return {self.store.blob_path(layer.digest) for layer in weights(self.store, name)}


class Server(NamedTuple):
    process: Process
    port: int

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        connection = self.begin(method, path, body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, json.loads(content)

    def begin(self, method: str, path: str, body: object = None) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, None if body is None else data)
        return connection

    def complete(self, **asked: Any) -> Any:
        status, answer = self.ask("POST", COMPLETIONS, {"prompt": PROMPT, **asked})
        assert status == 200, answer
        return answer

    def swap(self, name: str) -> tuple[int, Any]:
        return self.ask("PUT", "/model", {"name": name})

    def metrics(self) -> dict[str, float]:
        connection = self.begin("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def private_memory(self, blobs: set[str]) -> int:
        """Return the private bytes of this process in maps of ``blobs``."""
        smaps = Path(f"/proc/{self.process.pid}/smaps").read_text(encoding="utf-8")
        regions = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", smaps, flags=re.MULTILINE)
        private = re.compile(r"^Private_(?:Clean|Dirty):\s+(\d+) kB", re.MULTILINE)
        of_blobs = [region for region in regions if any(blob in region for blob in blobs)]
        assert len(of_blobs) >= len(blobs)
        return sum(int(size) * 1024 for region in of_blobs for size in private.findall(region))

    def mapped(self, blobs: set[str]) -> set[str]:
        maps = Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")
        return {blob for blob in blobs if blob in maps}


def weights(store: LocalStore, name: str) -> list[Descriptor]:
    layers = store.resolve(Reference.parse(name)).layers
    return [layer for layer in layers if layer.media_type.endswith("tensor")]


def make(folder: Path, dtype: torch.dtype, seed: int, hidden_size: int = 64) -> Path:
    """Write a model with reproducible random weights."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        eos_token_id=None,
    )
    model: Any = transformers.LlamaForCausalLM._from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def continuation(folder: Path, max_tokens: int) -> str:
    """Return the text that transformers itself generates from a folder."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    ids = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)
    text: str = tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :])
    return text


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    folder = tmp_path_factory.mktemp("models")
    store = LocalStore(folder / "store")
    kinds = {"a": (torch.float32, 1), "b": (torch.bfloat16, 2), "damaged": (torch.float32, 3)}
    for name, (dtype, seed) in kinds.items():
        blobstore.create(make(folder / name, dtype, seed), name, store=store)
    large = make(folder / "large", torch.float32, 4, hidden_size=1024)
    blobstore.create(large, "large", store=store)
    layer = max(weights(store, "damaged"), key=lambda item: item.size)
    flip(Path(store.blob_path(layer.digest)))
    texts = {f"{name}:latest": continuation(folder / name, 16) for name in "ab"}
    nbytes = {
        name: sum(spec.nbytes for spec in blobstore.open(name, store=store).specs.values())
        for name in ("a", "b", "large")
    }
    return Models(store, texts, nbytes)


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[Server]:
    """Run a server whose log and temporary files are in ``folder``."""
    (folder / "temporary").mkdir(parents=True)
    log = folder / "log"
    log.touch()
    nursery = forking()
    command = ("python", PROGRAM, *arguments, "--port", "0")
    pid = nursery.fork(command, log, log, environment=environment(folder))
    process = Process(pid, nursery)
    try:
        while not (found := re.search(r"running on http://\S+:(\d+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield Server(process, int(found[1]))
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in log.read_text()


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "TMPDIR": str(folder / "temporary"),
    }


@pytest.fixture(scope="module")
def shared(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server") / "shared"
    store = str(models.store.root)
    names = ("a", "b", "damaged", "large", "missing")
    with running(folder, *names, "--store", store, "--verify", "digest") as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    """Return the shared server, switched to the model ``a`` if it serves another."""
    if shared.ask("GET", "/health")[1]["model"] != "a:latest":
        assert shared.swap("a")[0] == 200
    return shared


@pytest.mark.parametrize("name", ["a", "b"])
def test_generates_the_same_as_transformers_from_the_folder(
    name: str, server: Server, models: Models
) -> None:
    assert server.swap(name)[0] == 200
    answer = server.complete(max_tokens=16)
    full = f"{name}:latest"
    choice = {"index": 0, "text": models.texts[full], "finish_reason": "length"}
    assert answer["model"] == full
    assert answer["choices"] == [choice]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 16}
    assert server.complete(model=name, max_tokens=16) == answer
    listed = [item["id"] for item in server.ask("GET", "/v1/models")[1]["data"]]
    assert listed[0] == full
    assert sorted(listed) == [
        f"{item}:latest" for item in ("a", "b", "damaged", "large", "missing")
    ]
    assert server.ask("GET", "/health") == (200, {"status": "ok", "model": full})


def events(lines: Iterator[bytes]) -> Iterator[Any]:
    for line in lines:
        if line.startswith(b"data: {"):
            yield json.loads(line.removeprefix(b"data: "))
        elif line != b"\n":
            yield line


def test_streams_the_same_text(server: Server, models: Models) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 16, "stream": True}
    connection = server.begin("POST", COMPLETIONS, asked)
    response = connection.getresponse()
    *pieces, last, done = events(iter(response))
    connection.close()
    assert response.getheader("content-type", "").startswith("text/event-stream")
    assert done == b"data: [DONE]\n"
    assert "".join(item["choices"][0]["text"] for item in pieces) == models.texts["a:latest"]
    assert len(pieces) > 8
    assert last["choices"][0]["finish_reason"] == "length"
    assert last["usage"]["completion_tokens"] == 16


def test_no_request_fails_while_models_are_swapped(server: Server, models: Models) -> None:
    ends = Event()
    answers: list[Any] = []

    def ask() -> list[Any]:
        answered = []
        while not ends.is_set():
            answered.append(server.complete(max_tokens=16))
        return answered

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            for name in "baba":
                assert server.swap(name)[0] == 200
                answers.append(server.complete(max_tokens=16))
        finally:
            ends.set()
        answers += [answer for thread in asking for answer in thread.result()]

    assert {answer["model"] for answer in answers} == {"a:latest", "b:latest"}
    for answer in answers:
        assert answer["choices"][0]["text"] == models.texts[answer["model"]]


@needs_maps
def test_a_model_is_freed_with_its_last_request(server: Server, models: Models) -> None:
    asked = {"prompt": PROMPT, "max_tokens": CONTEXT - 3, "stream": True}
    last_request = server.begin("POST", COMPLETIONS, asked)
    response = last_request.getresponse()
    assert next(events(iter(response)))["model"] == "a:latest"
    assert server.swap("b")[0] == 200
    assert server.complete(max_tokens=16)["choices"][0]["text"] == models.texts["b:latest"]
    assert server.mapped(models.blobs("a")) == models.blobs("a")
    response.close()
    last_request.close()
    while server.mapped(models.blobs("a")):  # until it notices that nobody listens
        time.sleep(0.01)
    assert server.mapped(models.blobs("b")) == models.blobs("b")


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("missing", 404, "no model 'missing:latest' in the store"),
        ("damaged", 422, r"damaged:latest: layer 'model\..* run 'blobstore repair "),
        (
            "other",
            404,
            "other:latest is not among a:latest, b:latest, damaged:latest, large:latest",
        ),
        ("..", 400, "not a model name"),
    ],
)
def test_a_swap_that_fails_leaves_the_model_in_place(
    name: str, status: int, message: str, server: Server, models: Models
) -> None:
    found, answer = server.swap(name)
    assert found == status
    assert re.search(message, answer["error"]["message"]), answer
    assert len(answer["error"]["message"].splitlines()) == 1
    assert server.ask("GET", "/health")[1]["model"] == "a:latest"
    assert server.complete(max_tokens=16)["choices"][0]["text"] == models.texts["a:latest"]


def test_swaps_run_one_after_another(server: Server, models: Models) -> None:
    with ThreadPoolExecutor() as pool:
        swaps = list(pool.map(server.swap, "abab"))
    assert [status for status, _ in swaps] == [200] * 4
    assert [answer["model"][0] for _, answer in swaps] == list("abab")
    answer = server.complete(max_tokens=16)
    assert answer["choices"][0]["text"] == models.texts[answer["model"]]


def test_a_truncated_blob_ends_the_server_with_a_last_word(models: Models, tmp_path: Path) -> None:
    store = shutil.copytree(models.store.root, tmp_path / "store")
    with running(tmp_path / "server", "a", "--store", str(store)) as server:
        for path in Models(LocalStore(store), {}, {}).blobs("a"):
            Path(path).chmod(0o600)
            os.truncate(path, 0)
        with pytest.raises(ConnectionError):
            server.ask("POST", COMPLETIONS, {"prompt": PROMPT})
        # While one of torch's threads reports its fault, another may fault.
        assert server.process.wait() in {-signal.SIGBUS, -signal.SIGSEGV}
    assert "Fatal Python error: Bus error\n" in (tmp_path / "server" / "log").read_text()


def test_metrics_count_loads_and_requests(server: Server, models: Models) -> None:
    server.swap("missing")
    before = server.metrics()
    server.swap("missing")
    seconds = server.swap("b")[1]["load_seconds"]
    server.complete(max_tokens=5)

    found = server.metrics()

    def grown(name: str) -> float:
        return found[f"blobstore_model_{name}"] - before.get(f"blobstore_model_{name}", 0)

    assert found['blobstore_model_load_seconds{model="b:latest"}'] == seconds > 0
    assert found['blobstore_model_load_seconds{model="a:latest"}'] > 0
    assert found['blobstore_model_ready_bytes{model="b:latest"}'] == models.nbytes["b"]
    assert found['blobstore_model_is_served{model="a:latest"}'] == 0
    assert found['blobstore_model_is_served{model="b:latest"}'] == 1
    assert grown('failed_loads_total{model="missing:latest"}') == 1
    assert grown('requests_total{model="b:latest"}') == 1
    assert grown('generated_tokens_total{model="b:latest"}') == 5
    if sys.platform == "linux":
        assert found["blobstore_process_private_bytes"] > 0


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"prompt": ', 400, "not JSON"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b'{"prompt": "\\ud800"}', 400, "surrogates"),
        (b"[]", 400, "expected a JSON object"),
        ({"prompt": 1}, 400, "prompt (str)"),
        ({"prompt": "w1", "max_tokens": True}, 400, "max_tokens (int)"),
        ({"prompt": "w1", "n": 2}, 400, "expected a JSON object"),
        ({}, 400, "0 tokens"),
        ({"prompt": "w1", "max_tokens": 0}, 400, "1 tokens and 0 more"),
        ({"prompt": "w1", "max_tokens": CONTEXT}, 400, f"1 to {CONTEXT} in all"),
        ({"prompt": "w1", "max_tokens": CONTEXT, "stream": True}, 400, "in all"),
        ({"prompt": "w1 " * CONTEXT}, 400, "in all"),
        ({"prompt": "w1", "model": "b"}, 404, "the model served now is a:latest"),
        ({"prompt": "w1", "model": "//"}, 400, "not a model name"),
        (b" " * (2**20 + 1), 413, "at most 1048576 bytes"),
    ],
)
def test_rejects_invalid_requests(body: object, status: int, message: str, server: Server) -> None:
    found, answer = server.ask("POST", COMPLETIONS, body)
    assert (found, answer["error"]["code"]) == (status, status)
    assert message in answer["error"]["message"]


def test_a_request_that_is_cut_off_is_not_an_error(server: Server) -> None:
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("POST", COMPLETIONS)
    connection.putheader("Content-Length", "100")
    connection.endheaders(b'{"prompt": ')
    connection.close()
    assert server.ask("GET", "/health")[0] == 200
    # That nothing was raised, the end of the server's fixture checks.


def test_a_prompt_of_the_longest_length_is_answered(server: Server) -> None:
    answer = server.complete(prompt="w1 " * (CONTEXT - 1), max_tokens=1)
    assert answer["usage"] == {"prompt_tokens": CONTEXT - 1, "completion_tokens": 1}


@needs_maps
def test_finishes_requests_before_it_stops(models: Models, tmp_path: Path) -> None:
    folder = tmp_path / "server"
    store = str(models.store.root)
    before = sorted(models.store.root.rglob("*"))
    # A busy machine may need longer for the rest of the answer than the server waits by default.
    with running(folder, "a", "b", "--store", store, "--grace", "3600") as server:
        asked = {"prompt": PROMPT, "max_tokens": 200, "stream": True}
        connection = server.begin("POST", COMPLETIONS, asked)
        answer = events(iter(connection.getresponse()))
        next(answer)
        server.process.send_signal(signal.SIGTERM)
        *_, last, done = answer
        connection.close()
        assert last["usage"]["completion_tokens"] == 200
        assert done == b"data: [DONE]\n"
        assert server.process.wait() == 0
    assert list((folder / "temporary").iterdir()) == []
    assert sorted(models.store.root.rglob("*")) == before


@needs_maps
def test_a_second_process_shares_the_memory_of_the_model(
    server: Server, models: Models, tmp_path: Path
) -> None:
    blobs, size = models.blobs("large"), models.nbytes["large"]
    assert server.swap("large")[0] == 200
    with running(tmp_path / "second", "large", "--store", str(models.store.root)) as second:
        assert server.complete(max_tokens=4)["choices"] == second.complete(max_tokens=4)["choices"]
        assert server.mapped(blobs) == second.mapped(blobs) == blobs
        assert second.private_memory(blobs) < 0.05 * size
        second.process.send_signal(signal.SIGINT)
        assert second.process.wait() == 0
    # As a check of the measure: what nobody else has mapped is private.
    assert server.private_memory(blobs) > 0.9 * size


def test_a_first_model_that_is_missing_is_one_line(models: Models, tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    store = str(models.store.root)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "missing", "--store", store, "--port", "0"],
        capture_output=True,
        check=False,
        env=environment(tmp_path),
        text=True,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("serve: error: ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_the_page_on_the_example_is_right(tmp_path: Path) -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    install, *commands = [shlex.split(line) for block in blocks for line in block.splitlines()]
    *creations, serve = [command for command in commands if command[0] != "curl"]
    store = ["--store", str(tmp_path / "store")]
    for seed, command in enumerate(creations):
        make(tmp_path / command[2], torch.bfloat16, seed)
        create = [sys.executable, "-m", "blobstore.cli", *command[1:], *store]
        subprocess.run(create, cwd=tmp_path, env=environment(tmp_path), check=True)
    assert install[:2] == ["pip", "install"]
    assert serve[:2] == ["python", str(PROGRAM.relative_to(ROOT))]
    assert serve[-2:] == ["--port", "8000"]

    with running(tmp_path / "server", *serve[2:-2], *store) as server:
        answers = [
            subprocess.run(
                [part.replace(":8000/", f":{server.port}/") for part in command],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
            for command in commands
            if command[0] == "curl"
        ]

    text, stream, swap, *_, metrics = answers
    assert len(json.loads(text)["choices"][0]["text"].split()) == 8
    assert stream.endswith("data: [DONE]\n\n")
    assert json.loads(swap)["model"] == "llama-3.2:1b-tuned"
    shown = set(re.findall(r"`(blobstore_\w+)`", PAGE.read_text()))
    assert shown == set(re.findall(r"^blobstore_\w+", metrics, re.MULTILINE)) | {
        "blobstore_model_failed_loads_total"
    }
