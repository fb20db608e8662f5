"""Names that only the shared store has, in every command that takes the name of a model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from blobstore.cli import arguments
from blobstore.cli.main import program
from blobstore.core.digest import Digest
from blobstore.store.local import LocalStore
from tests.support.folders import contents
from tests.support.signing import key_files
from tests.unit.cli.running import need_libraries, run

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "teams.md"
# An @ marks a path; the model is ``dense``.
READ = {
    "list": ("dense",),
    "show": ("dense",),
    "info": ("dense",),
    "cat": ("dense", "merges.txt"),
    "diff": ("dense", "dense"),
    "compare": ("dense", "dense"),
    "run": ("dense", "--dry-run"),
    "link": ("dense", "@linked"),
    "export": ("dense", "@exported"),
    "bench": ("dense", "--device=none"),
    "verify": ("dense", "--signatures"),
    "push": ("dense", "@bucket"),
    "lock": ("dense", "-o", "@models.lock"),
    "pack": ("dense", "@out.bsar"),
    "du": ("dense",),
    "page": ("dense", "@page.html"),
    "history": ("dense",),
    "cp": ("dense", "mine"),
    "tag": ("dense", "v2"),
}
CHANGED = {
    "mv": ("dense", "mine"),
    "restore": ("dense",),
    "rm": ("dense",),
    "repair": ("dense", "--from", "@dense"),
    "freeze": ("dense",),
    "thaw": ("dense",),
    "sign": ("dense", "--key", "@key.pem"),
}
NEW = {"follow", "unpack"}
"""Commands whose names are given to new models, or are those of an archive."""


@pytest.fixture
def shared(
    stored: LocalStore, moe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LocalStore]:
    """The store with the model, below a store of the user, who changes nothing in it."""
    before = contents(stored.folder("manifests")) | contents(stored.folder("blobs"))
    monkeypatch.setenv("BLOBSTORE_SHARED", str(stored.root))
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "own"))
    run("create", moe, "other")
    yield stored
    assert before == contents(stored.folder("manifests")) | contents(stored.folder("blobs"))


def words(row: tuple[str, ...], folder: Path) -> list[str]:
    return [
        (folder / word[1:]).as_uri()
        if word == "@bucket"
        else str(folder / word[1:])
        if word.startswith("@")
        else word
        for word in row
    ]


def test_every_command_with_a_name_is_here_and_in_the_guide() -> None:
    context = click.Context(program)
    kinds = (type(arguments.MODEL), type(arguments.FORMER_NAME))
    named = {
        name
        for name in program.list_commands(context)
        if (command := program.get_command(context, name))
        for parameter in command.params
        if isinstance(parameter, click.Argument)
        and parameter.type != arguments.NEW_NAME
        and (isinstance(parameter.type, kinds) or parameter.type is arguments.NAMES_AND_REMOTE)
    }
    assert named == {*READ, *CHANGED, *NEW}
    assert {*CHANGED, "follow"} == arguments.CHANGES
    rows = re.findall(r"^\| (`.+?) \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    *read, changed = [set(re.findall(r"`([a-z]+)`", row)) for row in rows]
    assert set().union(*read) - {"open", "find", "serve"} == set(READ)
    assert changed == set(CHANGED)


@pytest.mark.parametrize("command", READ)
def test_commands_that_read_find_it(command: str, shared: LocalStore, tmp_path: Path) -> None:
    need_libraries(command)
    run(command, *words(READ[command], tmp_path))


@pytest.mark.parametrize("command", CHANGED)
def test_commands_that_change_it_say_where_it_is(
    command: str, shared: LocalStore, tmp_path: Path
) -> None:
    need_libraries(command)
    if command == "sign":
        key_files(tmp_path)
    error = run(command, *words(CHANGED[command], tmp_path), exit_code=3).stderr
    assert f"the shared store '{shared.root}' has it: give that as the store" in error
    assert "name of yours with 'blobstore cp dense:latest NAME'" in error


def test_it_is_found_by_its_id(shared: LocalStore) -> None:
    ident = Digest.of(shared.read_manifest("dense")).short
    assert run("info", ident).stdout == run("info", "dense").stdout
    assert "'dense:latest'" in run("rm", ident, exit_code=3).stderr


def test_several_names_may_be_of_both_stores(shared: LocalStore, tmp_path: Path) -> None:
    run("push", "dense", "other", (tmp_path / "bucket").as_uri())
    run("pack", "dense", "other", tmp_path / "out.bsar")
    run("export", "dense", "other", tmp_path / "exported")
    run("lock", "dense", "other", "-o", tmp_path / "models.lock")
    run("verify", "dense", "other")
    run("list", "dense", "other")


def test_what_counts_for_one_store_takes_names_of_one(shared: LocalStore, tmp_path: Path) -> None:
    for command in (("du", "dense", "other"), ("page", "dense", "other", tmp_path / "p.html")):
        assert "the shared store" in run(*command, exit_code=3).stderr


def test_a_name_that_was_one_of_the_users_has_its_own_history(shared: LocalStore) -> None:
    run("cp", "other", "dense")
    run("rm", "dense")
    assert len(run("history", "dense").stdout.splitlines()) == 2
    run("restore", "dense")
    assert shared.root.name not in run("info", "dense").stdout


def test_a_lost_name_of_the_store_itself_is_reported_though_the_shared_store_has_one(
    shared: LocalStore, tmp_path: Path
) -> None:
    run("cp", "other", "dense")
    LocalStore(tmp_path / "own").manifest_path("dense").unlink()
    run("rm", "other")
    assert "is lost" in run("verify", exit_code=4).stdout


def test_shells_complete_it_where_it_is_found(shared: LocalStore) -> None:
    def completed(command: str) -> list[str]:
        shell = ShellComplete(program, {}, "blobstore", "")
        return [item.value for item in shell.get_completions([command], "")]

    assert completed("show") == ["dense", "other"]
    assert completed("rm") == ["other"]
