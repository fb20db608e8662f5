"""The commands on a folder of Ollama's, whose models are GGUF files."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.gguf.header import parse_header
from blobstore.store.local import LocalStore
from tests.support.gguf_files import gguf_file
from tests.support.ollama_store import F32, GGUF_FILE, add_gguf_model
from tests.unit.cli.running import run, run_json

NAMES = ["token_embd.weight", "output_norm.weight", "blk.0.ffn_gate_exps.weight"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, and another one whose norm has other values."""
    folder = tmp_path / "ollama"
    monkeypatch.setenv("BLOBSTORE_HOME", str(folder))
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    store = LocalStore(folder)
    add_gguf_model(store, "llama3:8b")
    norm = parse_header(GGUF_FILE, len(GGUF_FILE)).tensors["output_norm.weight"]
    other = bytearray(GGUF_FILE)
    other[norm.begin + 8 : norm.begin + 12] = bytes(4)
    add_gguf_model(store, "tuned", bytes(other))
    return folder


def test_models_and_tensors_are_listed(folder: Path) -> None:
    assert "llama3:8b" in run("list").stdout
    shown = run("show", "llama3:8b").stdout
    assert all(name in shown for name in NAMES)
    assert "q8_0" in shown
    assert "llama" in run("info", "llama3:8b").stdout
    assert [one["name"] for one in run_json("show", "llama3:8b")["tensors"]] == NAMES


def test_an_intact_folder_is_verified(folder: Path) -> None:
    assert run("verify").stdout.startswith("ok: 2 models")


def test_models_are_compared_by_their_values(folder: Path) -> None:
    shown = run("compare", "tuned", "llama3:8b", "--all").stdout
    assert all(name in shown for name in NAMES)
    found = run_json("compare", "tuned", "llama3:8b", "--all")
    errors = {one["name"]: one["relative_error"] for one in found["tensors"]}
    assert errors["output_norm.weight"] > 0
    assert not any(errors[name] for name in (NAMES[0], NAMES[2]))


def test_a_page_has_the_tensors(folder: Path, tmp_path: Path) -> None:
    run("page", tmp_path / "page.html", "--measure")
    page = (tmp_path / "page.html").read_text()
    assert "llama3:8b" in page
    assert NAMES[0] in page


def test_a_model_is_copied_to_another_store(folder: Path, tmp_path: Path) -> None:
    other = LocalStore(tmp_path / "other")
    run("cp", "llama3:8b", "--to", other.root)
    assert other.read_manifest("llama3:8b") == LocalStore(folder).read_manifest("llama3:8b")
    run("verify", "--store", other.root)


def test_a_model_is_split_by_its_name(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert "3 tensors" in run("create", "ollama://llama3:8b", "m", "--store", other).stdout
    run("export", "m", tmp_path / "out", "--store", other)
    assert (tmp_path / "out" / "model.gguf").read_bytes() == GGUF_FILE
    assert "ollama://llama3:8b" in run("info", "m", "--store", other).stdout
    assert "from ollama://llama3:8b" in run("show", "m", "--source", "--store", other).stdout
    given = run("export", "m", tmp_path / "back", "--layout", "ollama", "--store", other).stdout
    assert "as in the source" in given
    back = LocalStore(tmp_path / "back").read_manifest("m")
    assert back == LocalStore(folder).read_manifest("llama3:8b")
    run("export", "m", tmp_path / "back", "--layout", "ollama", "--single", exit_code=2)
    add_gguf_model(LocalStore(folder), "bad", gguf_file(tensors=[("x", F32, (2**59,), b"")]))
    done = run("create", "ollama://bad", "m", "--store", other, exit_code=4)
    assert "ollama-bad-latest-" in done.stderr
    assert "/model.gguf': the file ends at byte 64, in tensor 'x'" in done.stderr
