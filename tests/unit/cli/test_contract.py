"""What every command promises: its JSON, its numbers, its errors, and the store that it uses."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from blobstore.cli.main import program
from blobstore.core.digest import Digest
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.signatures.bundle import statement, write_bundle
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.gguf_files import gguf_file
from tests.support.models import dense_tensors, write_folder
from tests.support.stub_registry import StubRegistry
from tests.unit.cli.conftest import DENSE_CONFIG
from tests.unit.cli.running import need_libraries, run, run_json

# The arguments of each command. An @ marks a path in the prepared folder, a % a file that has the argument.
ARGUMENTS = {
    "create": ("@dense", "new"),
    "ingest": ("@list.txt", "--executor=threads:1"),
    "inspect": ("@checkpoint.pt",),
    "convert": ("@checkpoint.pt", "@out.safetensors"),
    "list": (),
    "show": ("dense",),
    "info": ("dense",),
    "cat": ("dense", "merges.txt"),
    "find": ("merges.txt",),
    "du": (),
    "page": ("dense", "@page.html"),
    "diff": ("dense", "tuned"),
    "compare": ("dense", "same"),
    "run": ("dense", "--dry-run"),
    "link": ("dense", "@out.bsar"),
    "export": ("dense", "@out.bsar"),
    "bench": ("dense", "--device=cpu"),
    "cp": ("dense", "new"),
    "tag": ("dense", "new"),
    "mv": ("dense", "new"),
    "history": ("again",),
    "restore": ("again",),
    "rm": ("dense",),
    "verify": (),
    "repair": ("dense", "--from", "@dense"),
    "gc": ("--older-than=0s",),
    "freeze": ("dense",),
    "thaw": ("cold",),
    "sign": ("dense", "--key", "@key.pem"),
    "push": ("dense", "%remote", "--layout=ollama"),
    "pull": ("%remote", "new"),
    "login": ("%host", "--username=alice", "--password-stdin"),
    "logout": ("%host",),
    "lock": ("dense", "-o", "@new.lock"),
    "sync": ("@models.lock",),
    "follow": ("new", "%remote", "--once"),
    "pack": ("dense", "@out.bsar"),
    "unpack": ("@models.bsar",),
    "completion": ("bash",),
}
STORELESS = ("convert", "inspect", "login", "logout", "completion")
STDIN = {"login": "secret"}
TEXT_ONLY = ("completion",)
UNTIL_STOPPED = ("serve",)  # which has tests of its own
# Commands that find a missing blob, and their exit code then.
DAMAGED = {"verify": 4, "repair": 0, "du": 4, "show": 4}
EXIT_CODES = {"diff": 1, "diff GLOB": 1, **DAMAGED}
# Other forms of commands, whose JSON has other keys.
VARIANTS = {
    "diff GLOB": ("diff", "[dt]*"),
    "compare GLOB": ("compare", "[dt]*"),
    "create --dry-run": ("create", "@dense", "new", "--dry-run", "--quantize", "int8"),
    "create --all": ("create", "--all", "@all"),
    "list PATTERN": ("list", "den*"),
    "show --layers": ("show", "dense", "--layers"),
    "show --source": ("show", "dense", "--source"),
    "show PATH": ("show", "@dense"),
    "show FILE.gguf": ("show", "@model.gguf"),
    "show oci://": ("show", "%address"),
    "list oci://": ("list", "%address"),
    "du NAME": ("du", "dense"),
    "du oci://": ("du", "%address"),
    "push GLOB": ("push", "tun*", "dense", "%place"),
    "push --as": ("push", "dense", "@versions", "--as=slime"),
    "pull --all": ("pull", "--all", "%place"),
    "verify --remote": ("verify", "--remote", "%remote"),
    "show FILE.bsar": ("show", "@models.bsar"),
    "show FOLDER": ("show", "@all"),
    "export GLOB": ("export", "*e*", "@folders"),
    "cp --to": ("cp", "dense", "--to", "@other"),
    "cp GLOB --to": ("cp", "*e*", "--to", "@other"),
    "verify --signatures": ("verify", "tuned", "--signatures"),
    "unpack --list": ("unpack", "@models.bsar", "--list"),
    "unpack --verify-only": ("unpack", "@models.bsar", "--verify-only"),
}
# Names of models, and what a person types instead.
TYPOS = {"dense": "desne", "again": "agian", "cold": "clod"}
# Keys that are names, and what the document says instead.
NAMES = {"dense:latest": "NAME", "model.safetensors": "FILE"}
# The keys of the JSON of each command, as the document lists them; "[]" stands for the items of a list.
DOCUMENT = (Path(__file__).parents[3] / "docs" / "reference" / "json.md").read_text(
    encoding="utf-8"
)
JSON = {
    match[1]: match[2].split()
    for match in re.finditer(r"^### (.+)\n\n```text\n((?:.*\n)*?)```$", DOCUMENT, re.MULTILINE)
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with sources, an archive, a store with several models, and the address of one in a registry."""
    folder = tmp_path_factory.mktemp("contract")
    files = {"config.json": DENSE_CONFIG, "merges.txt": b"a b\n"}
    tensors = dense_tensors()
    write_folder(folder / "dense", tensors, files=files)
    changed = {
        name: array + array if array.dtype.kind == "f" else array for name, array in tensors.items()
    }
    write_folder(folder / "tuned", changed, files={**files, "extra.json": b"{}"})
    shutil.copytree(folder / "dense", folder / "all" / "one")
    (folder / "list.txt").write_text(f'"{folder / "dense"}" listed\n')
    torch.save(
        {"model": {"a": torch.ones(2, 3)}, "ema": {"e": torch.ones(1)}}, folder / "checkpoint.pt"
    )
    (folder / "model.gguf").write_bytes(gguf_file([], [("a", 0, [1], bytes(4))]))
    store = folder / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOBSTORE_HOME", str(store))
        for arguments in (
            ("create", folder / "dense", "dense"),
            ("create", folder / "dense", "same"),
            ("create", folder / "tuned", "tuned"),
            ("pack", "tuned", folder / "models.bsar"),
            ("cp", "dense", "again"),
            ("cp", "tuned", "again", "--force"),
        ):
            run(*arguments)
        put(LocalStore(store), "cold", {"x": 1})
        put(LocalStore(store), "gone", {"y": 2})
        digest = Digest.of(LocalStore(store).read_manifest("tuned"))
        bundle = write_bundle(statement("tuned", {}, digest), b"no signature", "")
        LocalStore(store).keep_signature(digest, bundle, is_verified=True)
        with contextlib.suppress(pytest.skip.Exception):  # the library is not installed
            from tests.support.signing import key_files

            key_files(folder)
        run("freeze", "cold")
        run("lock", "dense", "-o", folder / "models.lock")
        run("rm", "gone")
    with StubRegistry() as registry:
        origin = LocalStore(store)
        plan = plan_ollama(origin.read_manifest("dense"))
        address = registry.put(origin, plan, "team/dense", "latest")
        (folder / "host").write_text(registry.host)
        (folder / "remote").write_text(address)
        (folder / "place").write_text(f"file://{folder}/bucket")
        run("push", "dense", f"file://{folder}/bucket", "--store", store)
        (folder / "address").write_text(f"oci://{address}")
        yield folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the prepared folder, in which a command may change everything."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    return shutil.copytree(prepared, tmp_path / "folder", symlinks=True)


def arguments_of(command: str, folder: Path) -> list[str]:
    words = VARIANTS.get(command) or (command, *ARGUMENTS[command])
    forms = {"@": lambda name: str(folder / name), "%": lambda name: (folder / name).read_text()}
    return [forms[word[0]](word[1:]) if word[0] in forms else word for word in words]


def paths_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key in a JSON value, with ``[]`` for the items of a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            path = f"{prefix}.{NAMES.get(key, key)}".lstrip(".")
            yield path
            yield from paths_in(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from paths_in(item, f"{prefix}[]")


def run_in(folder: Path, command: str) -> Any:
    need_libraries(command)
    if command in DAMAGED:
        (folder / "store" / "blobs" / Digest.of(b"a b\n").file_name).unlink()
    store = () if command in STORELESS else ("--store", folder / "store")
    words = (*arguments_of(command, folder), *store)
    return run_json(*words, exit_code=EXIT_CODES.get(command, 0), stdin=STDIN.get(command))


def numbers_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key whose value counts bytes or blobs, with that value."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from numbers_in(item)
    if isinstance(value, dict):
        for key, item in value.items():
            if re.fullmatch(r"(.*_)?bytes(_.*)?|blobs|files|links|shards", key):
                yield key, item


def test_every_command_has_a_contract() -> None:
    commands = program.list_commands(click.Context(program))
    assert list(ARGUMENTS) == [name for name in commands if name not in UNTIL_STOPPED], (
        "ARGUMENTS has a row for each command, in the order of the help"
    )
    assert [name for name in (*ARGUMENTS, *VARIANTS) if name not in TEXT_ONLY] == list(JSON)


def test_the_glossary_has_every_key_and_no_other() -> None:
    rows = re.findall(r"^\| (`.+?`) \|", DOCUMENT, re.MULTILINE)
    known = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    parts = {
        part.removesuffix("[]") for keys in JSON.values() for key in keys for part in key.split(".")
    }

    assert sorted(known) == sorted(parts - {"NAME", "FILE"})


@pytest.mark.parametrize("command", JSON)
def test_json_has_the_documented_keys_and_exact_numbers(command: str, folder: Path) -> None:
    found = run_in(folder, command)
    assert sorted(set(paths_in(found))) == JSON[command]
    for key, value in numbers_in(found):
        assert value is None or isinstance(value, int | list), key
    assert found.get("seconds", 0) >= 0


@pytest.mark.parametrize("command", ARGUMENTS)
def test_text_is_plain_and_goes_to_standard_output(command: str, folder: Path) -> None:
    need_libraries(command)
    store = () if command in STORELESS else ("--store", folder / "store")
    words = (*arguments_of(command, folder), *store)
    result = run(*words, exit_code=1 if command == "diff" else 0, stdin=STDIN.get(command))
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.output
    assert not result.stdout.startswith("{")
    assert all(line.startswith("note: ") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    "command",
    [name for name in ARGUMENTS if TYPOS.keys() & {*ARGUMENTS[name]}] + ["verify", "list"],
)
def test_a_model_that_does_not_exist_is_not_found_and_near_names_are_suggested(
    command: str, folder: Path
) -> None:
    words = arguments_of(command, folder) + ["dense"] * (command in {"verify", "list"})
    arguments = [TYPOS.get(word, word) for word in words]
    meant = next(word for word in words if word in TYPOS)
    result = run(*arguments, "--store", folder / "store", "--json", exit_code=3)
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("ModelNotFound", 3)
    assert error["message"].endswith(f"; did you mean '{meant}'?")
    assert result.stderr == f"blobstore: error: {error['message']}\n"
    assert not (folder / "out.bsar").exists()


@pytest.mark.parametrize(
    "command", [name for name in ARGUMENTS if "dense" in ARGUMENTS[name]] + ["verify"]
)
def test_a_model_can_be_named_by_a_glob_or_its_id(command: str, folder: Path) -> None:
    need_libraries(command)
    store = ("--store", folder / "store")
    run("rm", "same", *store)  # an ID must have one name
    plain = arguments_of(command, folder) + ["dense"] * (command == "verify")
    if command == "compare":
        plain[2] = "tuned"
    ident = run_json("list", "dense", *store)["models"][0]["digest"].removeprefix("sha256:")

    for text in ("dens[e]*", ident[:12], f"sha256:{ident[:7]}"):
        copy = shutil.copytree(folder, folder.with_name(text[:5]), symlinks=True)
        arguments = [text if word == "dense" else word for word in plain]
        arguments = [word.replace(str(folder), str(copy)) for word in arguments]
        run(*arguments, "--store", copy / "store", exit_code=1 if command == "diff" else 0)


def has_dry_run(command: str) -> bool:
    found = program.get_command(click.Context(program), command)
    return found is not None and any("--dry-run" in option.opts for option in found.params)


def everything(folder: Path) -> dict[Path, bytes | None]:
    """Return all that is in a folder, with the bytes of files.

    Pushes take the lock of their notes on remotes, and create its file, in dry runs too.
    """
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if "remotes" not in path.parts
    }


@pytest.mark.parametrize("command", [name for name in ARGUMENTS if has_dry_run(name)])
def test_a_dry_run_writes_nothing(command: str, folder: Path) -> None:
    before = everything(folder)
    run(*arguments_of(command, folder), "--dry-run", "--store", folder / "store")
    assert everything(folder) == before
