"""No output has the namespace ``library`` unless the user has typed it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from blobstore.cli.main import program
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.stub_registry import StubRegistry
from tests.unit.cli.running import run


@pytest.fixture
def name(store: LocalStore, tmp_path: Path, registry: StubRegistry) -> str:
    """Pull a model without a namespace; return its name, which is its address."""
    origin = LocalStore(tmp_path / "origin")
    put(origin, "llama", {"x": 1, "y": 2})
    remote = registry.put(origin, plan_ollama(origin.read_manifest("llama")), "llama", "latest")
    put(store, "own", {"z": 3})
    pulled = run("pull", f"http://{remote}")
    assert pulled.stdout.startswith(f"pulled {remote} from http://{remote}: ")
    return remote


COMMANDS = (
    ("pull", "{}"),
    ("pull", "{}", "--dry-run"),
    ("pull", "http://{}"),
    ("list",),
    ("list", "{}"),
    ("list", "-v"),
    ("list", "oci://{}"),
    ("info", "{}"),
    ("info", "oci://{}"),
    ("show", "{}"),
    ("show", "{}", "--layers"),
    ("show", "oci://{}"),
    ("du",),
    ("du", "{}"),
    ("find", "x"),
    ("verify",),
    ("history", "{}"),
    ("diff", "{}", "{}"),
    ("push", "{}", "--dry-run"),
    ("cp", "{}", "h.x/copy"),
    ("lock", "--out", "{folder}/models.lock"),
    ("pack", "{}", "own", "{folder}/x.bsar"),
    ("unpack", "{folder}/x.bsar", "--as", "h.y"),
    ("unpack", "--list", "{folder}/x.bsar"),
    ("export", "*", "{folder}/exported"),
    ("freeze", "{}"),
    ("page", "{folder}/page.html"),
    ("rm", "h.x/copy"),
    ("gc",),
    ("repair", "--from", "http://{}"),
)
WRONG = (
    ("show", "{}x"),
    ("list", "{}x"),
    ("create", "{folder}/none", "{}"),
    ("cp", "own", "{}"),
    ("cp", "own", "OWN"),
    ("push", "own"),
    ("pull", "own"),
    ("pull", "{}x"),
    ("unpack", "{folder}/x.bsar", "absent"),
)


def test_no_output_has_the_namespace_that_nobody_typed(
    store: LocalStore, name: str, tmp_path: Path
) -> None:
    host = name.partition("/")[0]
    for command in (*COMMANDS, *WRONG):
        words = [word.format(name, folder=tmp_path) for word in command]
        done = CliRunner(catch_exceptions=False).invoke(program, words)
        assert (done.exit_code == 0) is (command in COMMANDS), (words, done.output)
        # What was made may be there already; that is an error without the word, too.
        more = CliRunner(catch_exceptions=False).invoke(program, [*words, "--json"])
        assert "library" not in done.output + more.output, words
    assert "library" not in (tmp_path / "page.html").read_text()
    assert re.search(rf'"name": "{host}/llama:latest"', run("list", "--json").stdout)
