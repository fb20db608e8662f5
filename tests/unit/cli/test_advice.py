"""Commands that messages advise are parsed, and run on the input that caused the message."""

from __future__ import annotations

import ast
import re
import shlex
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from blobstore.cli.main import program
from blobstore.cli.output import with_options
from blobstore.core.escape import cli_command
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.models import dense_tensors, moe_tensors, write_folder
from tests.unit.cli.running import run, run_json

ROOT = Path(__file__).parents[3]
PACKAGES = ("blobstore", "cli", "manifests")
NAMED = "…"
"""Stands for a value that is known only when the message is made."""
ODD = "a model's folder"
"""A name that a shell takes for one word only if it is quoted."""
OLLAMA = "Ollama's folder"
ELSEWHERE = {
    "blobstore/core/schemes.py",
    "blobstore/http/transport.py",
    "blobstore/objects/source.py",
    "blobstore/operations/bench/bench.py",
    "blobstore/operations/sign/require_trust.py",
    "blobstore/registry/client.py",
    "cli/arguments.py",
    "cli/run.py",
}
"""Files whose advice needs a server, a key or a program of others. Their own tests cause and follow it."""


class Advice(NamedTuple):
    """A command that a message advises."""

    file: str
    line: int
    words: Sequence[str]
    """Its words, without the name of the program."""
    is_quoted: bool = False
    """Whether :func:`cli_command` makes it."""


def advised() -> Iterator[Advice]:
    """Yield the commands in all messages of the product."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            code = path.read_text(encoding="utf-8")
            if "blobstore " not in code and "cli_command" not in code:
                continue
            yield from _advised_in(file, list(ast.walk(ast.parse(code))))


def _advised_in(file: str, nodes: list[ast.AST]) -> Iterator[Advice]:
    skipped: set[ast.AST] = set()  # docstrings, and the parts of other texts
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            skipped.update(node.values)
        elif isinstance(node, ast.Expr):
            skipped.add(node.value)
    for node in nodes:
        match node:
            case ast.Call(ast.Name("cli_command"), arguments):
                yield Advice(file, node.lineno, [*map(_shown, arguments)], is_quoted=True)
            case ast.Constant() | ast.JoinedStr() if node not in skipped:
                for words in re.findall(r"'blobstore ([^']*)'", _shown(node)):
                    yield Advice(file, node.lineno, words.split())


def _shown(node: ast.expr) -> str:
    match node:
        case ast.Constant(str(value)):
            return value
        case ast.JoinedStr(values):
            return "".join(map(_shown, values))
    return NAMED


ADVISED = list(advised())


def test_all_advice_is_found() -> None:
    assert len(ADVISED) > 50
    assert {"create", "gc", "repair", "thaw", "restore"} <= {it.words[0] for it in ADVISED}


def test_commands_with_names_are_quoted_in_one_place() -> None:
    """A literal has no names of users: :func:`cli_command` quotes them for a shell."""
    assert [it for it in ADVISED if not it.is_quoted and NAMED in "".join(it.words)] == []
    assert cli_command("create", Path("it's"), "a b") == """'blobstore create 'it'"'"'s' 'a b''"""


@pytest.mark.parametrize("advice", ADVISED, ids=lambda it: f"{it.file}:{'-'.join(it.words)}")
def test_advised_commands_exist_with_their_options_and_arguments(advice: Advice) -> None:
    verb, *words = advice.words
    context = click.Context(program)
    command = program.get_command(context, verb)
    assert command is not None, advice
    if not words:  # it is only mentioned
        return
    # Commands keep the first help option that they are asked for, also for other tests.
    names = program.context_settings["help_option_names"]
    parser = command.make_parser(click.Context(command, help_option_names=names))
    found, rest, _ = parser.parse_args(words)
    assert not rest, advice
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.required:
            assert found.get(parameter.name or ""), (advice, parameter.name)


PYTHON_ONLY = (
    *("blobstore/integrations/", "blobstore/models/", "blobstore/safetensors/"),
    *("blobstore/sources/memory.py", "blobstore/store/outside_gguf.py"),
    "blobstore/operations/bench/",  # it says how open was called
    "blobstore/serve/metrics.py",  # the format of Prometheus
)
"""Where arguments are those of functions that no command calls, or calls so."""
OTHERS = {"group_size", "state_dict", "use_collectives", "weight_map"}
"""What files and PyTorch call things."""


def arguments() -> set[str]:
    """Return the names of all keyword arguments of the product."""
    found = set[str]()
    for path in (ROOT / "blobstore").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.update(it.arg for it in (*node.args.args, *node.args.kwonlyargs))
    return found - OTHERS


def messages() -> Iterator[tuple[str, str]]:
    """Yield the texts of several words that commands may print, each with its file."""
    for path in sorted((ROOT / "blobstore").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file.startswith((*PYTHON_ONLY, "blobstore/cli/", "blobstore/pages/")):
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Raise | ast.Call | ast.Yield):
                for node in ast.walk(call):
                    if isinstance(node, ast.Constant | ast.JoinedStr) and " " in _shown(node):
                        yield file, _shown(node)


def test_messages_name_options_and_no_arguments_of_python() -> None:
    """The library speaks of arguments; one function of the command line turns them into options."""
    known, translated = arguments(), set[str]()
    context = click.Context(program)
    options = {
        text
        for name in program.list_commands(context)
        if (command := program.get_command(context, name)) is not None
        for parameter in command.params
        for text in (*parameter.opts, *parameter.secondary_opts)
    }
    for file, message in messages():
        shown = with_options(message)
        if shown != message:
            translated |= set(re.findall(r"--[a-z-]+", shown)) - set(
                re.findall(r"--[a-z-]+", message)
            )
        words = re.findall(r"\b([a-z]+(?:_[a-z]+)*)=(?:True|False|None|['\"])", shown)
        words += re.findall(r"(?<![\w.'/])([a-z]+(?:_[a-z]+)+)(?![\w'(])", shown)
        found = [word for word in words if word in known]
        assert not found or "in Python" in shown, (file, shown)
    assert translated <= options
    assert {"--force", "--cold", "--verify", "--keep-last", "--no-mount"} <= translated


def test_errors_name_options_wherever_they_are_printed(store: LocalStore, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        run("create", _folder(tmp_path / name, seed=seed), "m", "--store", tmp_path / f"s{seed}")
    words = ("cp", "m", "--to", tmp_path / "s0", "--store", tmp_path / "s1")
    assert (
        "another model has the name 'm:latest'; replace it with --force"
        in run(*words, exit_code=1).stderr
    )
    assert "replace it with --force" in run_json(*words, exit_code=1)["error"]["message"]
    run("cp", "m", "n", "--store", tmp_path / "s1")
    many = ("cp", "[mn]", "--to", tmp_path / "s0", "--store", tmp_path / "s1")
    assert "replace it with --force" in run(*many, exit_code=1).stderr
    failed = [model["error"] for model in run_json(*many, exit_code=1)["models"]]
    assert "replace it with --force" in failed[0]


# Messages and what they advise


class Case(NamedTuple):
    """A message, by the command that causes it."""

    file: str
    """The file that has the advice; empty if it is about an option."""
    cause: Sequence[object]
    """The command."""
    exit_code: int = 0
    option: Sequence[object] = ()
    """The option that the message advises for the same command."""
    values: Sequence[tuple[str, object]] = ()
    """What the words in capitals stand for."""


Prepare = Callable[[Path, LocalStore], Case]


def _folder(path: Path, *, seed: int = 0) -> Path:
    tensors = {name: values + np.float32(seed) for name, values in moe_tensors().items()}
    return write_folder(path, tensors if seed else dense_tensors())


def _gguf(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    values = [("general.architecture", TEXT, text("llama"))]
    path.write_bytes(gguf_file(values, [("t", 0, (2,), struct.pack("<II", 1, len(path.name)))]))


def name_of_another_model(folder: Path, _: LocalStore) -> Case:
    run("create", _folder(folder / ODD))
    _folder(folder / ODD, seed=1)
    return Case("blobstore/operations/create/create.py", ["create", folder / ODD], 1)


def source_without_a_name(folder: Path, _: LocalStore) -> Case:
    path = _folder(folder / "'")
    values = [("NAME", "named")]
    return Case("blobstore/operations/create/source_names.py", ["create", path], 2, (), values)


def folder_next_to_the_model(folder: Path, _: LocalStore) -> Case:
    _folder(_folder(folder / "model") / ODD, seed=1)
    return Case("blobstore/sources/selection.py", ["create", folder / "model"])


def replaced_model(folder: Path, _: LocalStore) -> Case:
    run("create", _folder(folder / "a"), "m")
    cause = ["create", _folder(folder / "b", seed=1), "m"]
    return Case("blobstore/store/history.py", cause)


def path_for_a_name(folder: Path, _: LocalStore) -> Case:
    run("create", _folder(folder / "a"), "m")
    _folder(folder / "path")
    return Case("blobstore/store/manifests.py", ["export", "path", folder / "exported"], 3)


def several_quantizations(folder: Path, _: LocalStore) -> Case:
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf"):
        _gguf(folder / ODD / name)
    return Case("blobstore/sources/gguf_models.py", ["create", folder / ODD, "m"], 1)


def other_quantizations(folder: Path, store: LocalStore) -> Case:
    several_quantizations(folder, store)
    cause = ["create", folder / ODD, "m", "--weights", "Q8_0"]
    return Case("blobstore/sources/gguf_models.py", cause)


def folder_of_models(folder: Path, _: LocalStore) -> Case:
    for name in ("a", "b"):
        _folder(folder / ODD / name)
    return Case("cli/show_path.py", ["show", folder / ODD])


def steps_of_a_run(folder: Path, _: LocalStore) -> Case:
    for step in (2, 4):
        _folder(folder / ODD / f"checkpoint-{step}")
    return Case("blobstore/sources/selection.py", ["create", folder / ODD], 1)


def frozen_model(folder: Path, store: LocalStore) -> Case:
    put(store, "m", {"x": 1})
    run("freeze", "m")
    return Case("blobstore/operations/export/link.py", ["link", "m", folder / "linked"], 1)


def model_of_a_store_in_the_folder_of_ollama(folder: Path, _: LocalStore) -> Case:
    run("create", _folder(folder / "a"), "m", "--store", folder / OLLAMA)
    values = [("STORE", folder / "other")]
    cause = ["create", "ollama://m"]
    return Case("blobstore/operations/create/ollama.py", cause, 1, (), values)


def lost_manifest_whose_link_is_damaged(folder: Path, store: LocalStore) -> Case:
    run("create", _folder(folder / "a"), "m")
    run("cp", "m", "--to", folder / "other")
    link = store.names.published.path(Reference.parse("m"))
    for path in (link, store.manifest_path("m")):
        path.unlink()
    link.write_bytes(b"{")
    values = [("PLACE", folder / "other")]
    return Case("blobstore/store/published.py", ["gc"], 4, (), values)


def damaged_manifest(folder: Path, store: LocalStore) -> Case:
    run("create", _folder(folder / "a"), "m")
    run("create", _folder(folder / "b", seed=1), "n")
    run("create", folder / "a", "m", "--store", folder / "other")
    path = store.manifest_path("m")
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-9])
    values = [("STORE", folder / "other")]
    return Case("blobstore/store/reachability.py", ["gc"], 4, (), values)


def no_8_bit_floats_with_scales(folder: Path, _: LocalStore) -> Case:
    weight = torch.ones(64, 128).to(torch.float8_e4m3fn)
    scales = torch.full((64, 4), 120, dtype=torch.uint8)
    path = folder / "mxfp8.safetensors"
    save_file({"a.weight": weight, "a.weight_scale_inv": scales}, path)
    values = [("NAME", "m"), ("FOLDER", folder / "plain")]
    cause = ["create", path, "m", "--decode"]
    return Case("blobstore/planning/plan.py", cause, 0, (), values)


def globals_of_a_checkpoint(folder: Path, _: LocalStore) -> Case:
    torch.save({"a": torch.ones(2), "f": shlex.split}, folder / "x.pt")
    values = [("FILE", folder / "x.pt")]
    return Case(
        "blobstore/sources/pytorch/checkpoint.py", ["create", folder / "x.pt"], 1, (), values
    )


def part_of_a_checkpoint(folder: Path, _: LocalStore) -> Case:
    torch.save({"my weights": {"a": torch.ones(2)}, "f": shlex.split}, folder / "x.pt")
    option = ["--subtree", "my weights"]
    return Case("", ["create", folder / "x.pt", "m"], 1, option)


def unknown_file(folder: Path, _: LocalStore) -> Case:
    (folder / "a.pt").write_bytes(b"no checkpoint, and nothing else that is known")
    return Case("", ["create", folder / "a.pt", "m"], 1, ["--keep", "a.pt"])


def unknown_files(folder: Path, _: LocalStore) -> Case:
    (folder / "m").mkdir()
    (folder / "m" / "lid.ftz").write_bytes(b"no checkpoint, and nothing else that is known")
    (folder / "m" / "NOTICE").write_bytes(b"text")
    return Case("", ["create", folder / "m", "m"], 1, ["--keep", "lid.ftz"])


def several_weight_files(folder: Path, _: LocalStore) -> Case:
    for name in ("a b", "c"):
        write_folder(folder / "m", dense_tensors()).joinpath("model.safetensors").rename(
            folder / "m" / f"{name}.safetensors"
        )
    option = ["--weights", "a b.safetensors"]
    return Case("", ["create", folder / "m", "m"], 1, option)


def several_adapters(folder: Path, _: LocalStore) -> Case:
    for name in ("a b.gguf", "c.gguf"):
        values = [("general.type", TEXT, text("adapter"))]
        (folder / name).write_bytes(gguf_file(values, [("t", 0, (1,), bytes(4))]))
    return Case("", ["create", folder, "m"], 1, ["--weights", "a b.gguf"])


def unfinished_download(folder: Path, _: LocalStore) -> Case:
    path = _folder(folder / "m")
    (path / "model.safetensors.aria2").write_bytes(b"x")
    return Case("", ["create", path, "m"], 4, ["--exclude", "model.safetensors.aria2"])


def names_of_a_wrapper(folder: Path, _: LocalStore) -> Case:
    torch.save({"module.a": torch.ones(2), "module.b": torch.ones(2)}, folder / "x.pt")
    return Case("", ["create", folder / "x.pt", "m"], 0, ["--strip-prefix", "module."])


CASES: Sequence[Prepare] = (
    name_of_another_model,
    source_without_a_name,
    folder_next_to_the_model,
    replaced_model,
    path_for_a_name,
    several_quantizations,
    other_quantizations,
    folder_of_models,
    steps_of_a_run,
    frozen_model,
    damaged_manifest,
    lost_manifest_whose_link_is_damaged,
    model_of_a_store_in_the_folder_of_ollama,
    no_8_bit_floats_with_scales,
    globals_of_a_checkpoint,
    part_of_a_checkpoint,
    unknown_file,
    unknown_files,
    several_weight_files,
    several_adapters,
    unfinished_download,
    names_of_a_wrapper,
)


@pytest.mark.parametrize("prepare", CASES, ids=lambda it: it.__name__)
def test_advice_is_run_on_what_caused_it(
    prepare: Prepare, store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OLLAMA_MODELS", str(folder / OLLAMA))
    case = prepare(folder, store)
    done = run(*case.cause, exit_code=case.exit_code)
    message = " ".join((done.stdout + done.stderr).split("\n"))
    if case.option:
        assert shlex.join(map(str, case.option)) in message
        run(*case.cause, *case.option)
        return
    commands = [*_commands(message)]
    assert commands, message
    for command in commands:
        words = [str(dict(case.values).get(word, word)) for word in command]
        assert not any(word.isupper() and len(word) > 1 for word in words), words
        run(*words, exit_code=4 if words[0] == "inspect" else 0)


def _commands(message: str) -> Iterator[list[str]]:
    """Yield the words of the commands in a message. A word in quotes has quotes of its own."""
    for start in re.finditer("'blobstore ", message):
        for end in range(start.end(), len(message)):
            if message[end] == "'" and message[end + 1 : end + 2] in ("", " ", ",", ";", ")"):
                try:
                    yield shlex.split(message[start.end() : end])
                except ValueError:  # the quote is inside of a word
                    continue
                break


def test_all_advice_with_names_is_run() -> None:
    """Files with such advice have a case here, or tests next to a server that cause and follow it."""
    cases = set()
    for prepare in CASES:
        source = ast.unparse(_function(prepare.__name__))
        cases.update(re.findall(r"Case\('([^']+)'", source))
    made = {it.file for it in ADVISED if NAMED in it.words}
    assert made - cases == ELSEWHERE


def _function(name: str) -> ast.FunctionDef:
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    return next(it for it in tree.body if isinstance(it, ast.FunctionDef) and it.name == name)
