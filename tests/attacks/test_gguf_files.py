"""Hostile GGUF files: each command says in one line what is wrong, and memory follows what the files hold."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import blobstore
from blobstore.cli.main import program
from blobstore.errors import BlobstoreError
from blobstore.gguf.file import read_file_header
from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.support.gguf_files import ARRAY, TEXT, gguf_file, text, texts
from tests.support.hostile_gguf import F32_TENSOR, HOSTILE, NAME
from tests.support.ollama_store import add_gguf_model
from tests.support.samples import samples
from tests.unit.cli.running import run

NOT_GGUF = {"empty", "other magic"}
"""Files that no command takes for GGUF, unless they are named so."""
TEMPLATE = "{{ cycler.__init__.__globals__.os.system('touch owned') }}\x1b]0;owned\x07"


def written(folder: Path, data: bytes, name: str = "x.gguf") -> Path:
    (folder / name).write_bytes(data)
    return folder / name


def message_of(action: Callable[[], object]) -> str:
    """Return the one line that an action is refused with."""
    with pytest.raises(BlobstoreError) as caught:
        action()
    message = str(caught.value)
    assert message.isprintable()
    assert len(message) < 2000
    return message


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_is_refused(case: str, tmp_path: Path) -> None:
    path = written(tmp_path, HOSTILE[case][0])
    store = LocalStore(tmp_path / "store")
    messages = [
        message_of(lambda: blobstore.create(path, "m", store=store)),
        message_of(lambda: blobstore.open(path)),
    ]
    if case not in NOT_GGUF:
        messages.append(run("show", path, exit_code=4).stderr)
    assert not store.has_model("m")
    for message in messages:
        assert "x.gguf" in message
        assert message.count("\n") <= 1


@pytest.mark.parametrize("case", HOSTILE)
def test_a_layer_of_an_ollama_folder_is_refused(case: str, tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "ollama")
    add_gguf_model(store, "m", HOSTILE[case][0])
    assert media_types.MODEL in message_of(lambda: blobstore.open("m", store=store))
    assert media_types.MODEL in run("verify", "--store", store.root, exit_code=4).stdout
    commands: list[list[object]] = [
        ["list"],
        ["show", "m"],
        ["info", "m"],
        ["page", tmp_path / "p.html"],
    ]
    for command in commands:
        words = [str(word) for word in (*command, "--store", store.root)]
        done = CliRunner(catch_exceptions=False).invoke(program, words)
        assert done.exit_code in {0, 4}, done.output
        assert "\x1b" not in done.output


def test_any_shorter_file_is_refused_by_every_reader(tmp_path: Path) -> None:
    values = [NAME, ("t", ARRAY, texts(["a", "b"]))]
    data = gguf_file(values, [F32_TENSOR, ("b", 12, [256], bytes(144))])
    store = LocalStore(tmp_path / "store")
    sizes = range(len(data) - 16)
    for size in random.Random(0).sample(sizes, samples(len(sizes))):
        path = written(tmp_path, data[:size])
        message_of(lambda path=path: blobstore.create(path, "m", store=store))  # type: ignore[misc]
        message_of(lambda path=path: blobstore.open(path))  # type: ignore[misc]


def test_a_template_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    values = [NAME, ("tokenizer.chat_template", TEXT, text(TEMPLATE))]
    path = written(tmp_path, gguf_file(values, [F32_TENSOR]))
    store = LocalStore(tmp_path / "store")
    blobstore.create(path, "m", store=store)
    add_gguf_model(store, "ollama", path.read_bytes())
    outputs = [run("show", path).stdout]
    for name in ("m", "ollama"):
        outputs += [
            run(command, name, "--store", store.root).stdout for command in ("show", "info")
        ]
    run("page", "page.html", "--store", store.root)
    outputs.append((tmp_path / "page.html").read_text())
    blobstore.export("m", tmp_path / "out", store=store)
    assert not (tmp_path / "owned").exists()
    assert not any("\x1b" in output or "\x07" in output for output in outputs)


def test_memory_follows_the_header(tmp_path: Path) -> None:
    """Counts and lengths in a file of some bytes allocate nothing; tokens are kept as they lie."""
    tokens = [f"token{number}" for number in range(100_000)]
    data = gguf_file([NAME, ("tokens", ARRAY, texts(tokens))], [F32_TENSOR])
    path = written(tmp_path, data)
    tracemalloc.start()
    try:
        read_file_header(path)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
        for content, _ in HOSTILE.values():
            path = written(tmp_path, content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            message_of(lambda path=path: blobstore.open(path))  # type: ignore[misc]
            assert tracemalloc.get_traced_memory()[1] - before < 1 << 20
    finally:
        tracemalloc.stop()
