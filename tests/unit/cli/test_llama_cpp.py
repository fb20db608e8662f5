"""The words for servers of llama.cpp. What else they get is tested with the command ``run``."""

from __future__ import annotations

from pathlib import Path

import pytest

from blobstore.cli import llama_cpp
from blobstore.cli.llama_cpp import MODULE, PROGRAM, ollama_words
from blobstore.gguf.roles import ROLES
from blobstore.store.local import LocalStore
from tests.support.ollama_store import add_gguf_model


@pytest.mark.parametrize(
    ("params", "named"),
    [
        (rb'{"stop":["good","\u001b[2J"]}', "the parameter stop"),
        (rb'{"stop":["\u0000"]}', "the parameter stop"),
        (b'{"stop":1}', "the parameter stop"),
        (b'{"stop":[[]]}', "the parameter stop"),
        (b'{"seed":true}', "the parameter seed"),
        (b'{"seed":{}}', "the parameter seed"),
        (b'{"seed":null}', "the parameter seed"),
        (b'{"unknown":1}', "the parameter unknown"),
        (b"[]", "damaged ollama/params.json"),
        (b"{", "damaged ollama/params.json"),
        (b'{"seed":NaN}', "damaged ollama/params.json"),
        (b"\xff", "damaged ollama/params.json"),
        (b" " * (1 << 20) + b"{}", "damaged ollama/params.json"),
    ],
)
def test_parameters_that_cannot_be_words_are_named(
    store: LocalStore, params: bytes, named: str
) -> None:
    manifest = add_gguf_model(store, "m", params=params)
    unused: list[str] = []
    assert list(ollama_words(PROGRAM, store, manifest, unused)) == []
    assert unused == ["template", named]


def test_a_server_gets_the_parameters_that_it_has_options_for(store: LocalStore) -> None:
    manifest = add_gguf_model(store, "m", params=b'{"num_ctx":4096,"temperature":0.5}')
    for server, words in (
        (PROGRAM, ["--ctx-size", "4096", "--temp", "0.5"]),
        (MODULE, ["--n_ctx", "4096"]),
    ):
        unused: list[str] = []
        assert list(ollama_words(server, store, manifest, unused)) == words
        assert ("the parameter temperature" in unused) == (server == MODULE)


def test_an_older_program_gets_only_the_options_that_its_help_has(
    store: LocalStore, tmp_path: Path
) -> None:
    manifest = add_gguf_model(store, "m", params=b'{"num_ctx":4096,"num_predict":5,"stop":["x"]}')
    program = tmp_path / PROGRAM
    for text, words in (
        (
            "-c, --ctx-size N\\n-n, --predict, --n-predict N",
            ["--ctx-size", "4096", "--predict", "5"],
        ),
        ("no help", ["--ctx-size", "4096", "--predict", "5", "--reverse-prompt", "x"]),
    ):
        program.write_text(f"#!/bin/sh\necho '{text}'\n")
        program.chmod(0o755)
        unused: list[str] = []
        assert list(ollama_words(PROGRAM, store, manifest, unused, str(program))) == words
        assert ("the parameter stop" in unused) == (len(words) == 4)


def test_the_guide_lists_the_roles_with_their_options() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/import.md").read_text(encoding="utf-8")
    table = guide.partition("## GGUF files by role")[2].partition("\n\nA projector")[0]
    rows = [[*map(str.strip, row.split("|")[1:-1])] for row in table.splitlines() if "|" in row][2:]
    assert tuple(row[0] for row in rows) == ROLES
    options = {row[0]: row[-1].strip("`") for row in rows if row[-1]}
    assert options == llama_cpp._FILES[PROGRAM]
