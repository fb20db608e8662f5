from __future__ import annotations

import json
import struct
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from blobstore.manifests import media_types
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text
from tests.support.ollama_store import ADAPTER, PROJECTOR, add_gguf_model
from tests.support.processes import start
from tests.unit.cli.running import command_line, environment, run, run_forked, run_json, run_process

needs_server = pytest.mark.skipif(find_spec("mlx_lm") is None, reason="mlx-lm is not installed")


def create_gguf(folder: Path, elements: int) -> bytes:
    """Create the model ``tiny`` from a GGUF file, and return the bytes of that."""
    content = gguf_file([], [("a", 0, [elements], bytes(4 * elements))])
    (folder / "tiny.gguf").write_bytes(content)
    run("create", folder / "tiny.gguf", "tiny")
    return content


def install(name: str, folder: Path, script: str) -> dict[str, str]:
    """Write a program of that name, and return the environment variables with which ``run`` finds it."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:/usr/bin:/bin", "XDG_CACHE_HOME": str(folder / "cache")}


@needs_server
def test_a_model_of_the_shared_store_is_run(
    stored: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = str(tmp_path / "own")
    monkeypatch.setenv("BLOBSTORE_SHARED", str(stored.root))
    monkeypatch.setenv("BLOBSTORE_HOME", own)
    words = json.loads(run("run", "dense", "--with", "mlx-lm", "--dry-run", "--json").stdout)
    assert words["command"][-2:] == ["--store", own]


@needs_server
def test_the_command_names_the_model_and_the_store_and_passes_arguments_on(
    stored: LocalStore,
) -> None:
    words = ("--with", "mlx-lm", "--dry-run", "--json", "--", "--port=9", "--host", "x")
    found = json.loads(run("run", "dense", *words).stdout)
    assert found["address"] == "http://x:9"
    assert found["command"] == [
        sys.executable,
        *("-m", "blobstore.integrations.mlx_lm.server", "dense:latest"),
        *("--store", str(stored.root), "--port=9", "--host", "x"),
    ]
    run("run", "dense", "--json", exit_code=2)
    run("run", "desne", "--dry-run", exit_code=3)


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)


def test_code_of_the_folder_where_a_server_is_started_does_not_run(
    stored: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "argparse.py").write_text("raise SystemExit('code of a stranger')")
    server = 'exec "$PYTHON" -m argparse'  # as the server's own programs are started
    variables = install("vllm", tmp_path, server)
    program = "import sys; from blobstore.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "run", "dense", "--with", "vllm"],
        env=environment(PYTHON=sys.executable, **variables),
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert b"vllm will serve" in done.stderr
    assert b"stranger" not in done.stderr


def test_a_model_that_the_policy_refuses_is_not_run(stored: LocalStore, tmp_path: Path) -> None:
    pin = "sha256:" + "0" * 64
    rule = f'[[rules]]\nmatch = "*"\naction = "enforce"\npins = ["{pin}"]\n'
    stored.policy_path.write_text("version = 1\n" + rule)
    done = run_forked("run", "dense", "--with", "vllm", **install("vllm", tmp_path, "echo started"))
    assert done.returncode == 1
    assert b"the policy refuses" in done.stderr
    assert not done.stdout


@needs_server
@pytest.mark.usefixtures("no_home", "stored")
def test_a_server_that_reads_the_store_needs_no_home_folder() -> None:
    assert " dense:latest --store " in run("run", "dense", "--with", "mlx-lm", "--dry-run").stdout


@pytest.mark.usefixtures("no_home", "store")
def test_a_server_that_reads_a_folder_needs_a_place_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_gguf(tmp_path, 4)
    monkeypatch.setenv("PATH", install("llama-server", tmp_path, "exit")["PATH"])
    result = run("run", "tiny", "--dry-run", exit_code=2)
    assert "there is no home folder; set XDG_CACHE_HOME" in result.stderr


@needs_server
@pytest.mark.slow
def test_the_server_takes_the_place_of_the_command(stored: LocalStore) -> None:
    done = run_process("run", "dense", "--with", "mlx-lm", "--", "--help")
    assert done.returncode == 0
    assert b"python -m blobstore.integrations.mlx_lm.server NAME" in done.stdout
    assert b"curl http://127.0.0.1:8080/v1/chat/completions" in done.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_what_to_install_is_said(stored: LocalStore) -> None:
    result = run("run", "dense", "--with", "vllm", exit_code=1)
    assert "no inference server is installed: vllm; install 'vllm'" in result.stderr


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_program_of_another_environment_gets_a_folder(
    stored: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is under test is which words the program gets.
    variables = install("vllm", tmp_path, 'echo "$1"; ls "$2"')
    done = run_forked("run", "dense", "--with", "vllm", **variables)
    word, *files = done.stdout.decode().split()
    assert word == "serve"
    assert "config.json" in files
    assert b'"model": "/' in done.stderr
    # Next to this Python, it is the program of modules that are not there.
    monkeypatch.setenv("PATH", variables["PATH"])
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    result = run("run", "dense", "--with", "vllm", exit_code=1)
    assert "no inference server is installed: vllm" in result.stderr


def test_llama_cpp_python_gets_its_own_options(store: LocalStore, tmp_path: Path) -> None:
    create_gguf(tmp_path, 4)
    for name in ("llama_cpp/server", "sse_starlette", "starlette_context"):
        (tmp_path / "lib" / name).mkdir(parents=True)
    # What is under test is which words the module gets.
    script = "import sys; print(*sys.argv[1:])"
    (tmp_path / "lib" / "llama_cpp" / "__init__.py").write_text("")
    (tmp_path / "lib" / "llama_cpp" / "server" / "__main__.py").write_text(script)
    path = f"{environment()['PYTHONPATH']}:{tmp_path / 'lib'}"
    variables = {"PYTHONPATH": path, "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_process("run", "tiny", **variables)
    option, file = done.stdout.decode().split()
    assert option == "--model"
    assert Path(file).name == "tiny.gguf"
    assert b"curl http://127.0.0.1:8000/v1/chat/completions" in done.stderr


@pytest.mark.parametrize("imported", [False, True])
def test_llama_cpp_gets_the_parameters_of_ollama_and_the_rest_is_named(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: bool
) -> None:
    ollama = LocalStore(tmp_path / "ollama") if imported else store
    monkeypatch.setenv("OLLAMA_MODELS", str(ollama.root))
    values = {
        "temperature": 0.6,
        "num_ctx": 4096,
        "stop": ["<|end|>", "--host", "a\n\\n"],
        "mirostat": 1,
        "seed": "7; rm",
    }
    add_gguf_model(
        ollama,
        "pirate",
        projector=PROJECTOR,
        others={media_types.ADAPTER: ADAPTER, media_types.SYSTEM: b"You are a pirate."},
        params=json.dumps(values).encode(),
    )
    if imported:
        run("create", "ollama://pirate")
    monkeypatch.setenv("PATH", install("llama-server", tmp_path, "exit")["PATH"])
    result = run("run", "pirate", "--dry-run", "--json")
    _, *words = json.loads(result.stdout)["command"]
    assert words[::2][:3] == ["-m", "--mmproj", "--lora"]
    assert " ".join(words[6:]) == (
        "--temp 0.6 --ctx-size 4096 --reverse-prompt <|end|> --reverse-prompt --host "
        r"--reverse-prompt a\n\\n"
    )
    folder = "ollama/" * imported
    advised = f"; 'blobstore cat pirate:latest {folder}system' prints that file" * imported
    assert result.stderr == (
        f"note: llama.cpp has no option for {folder}system, {folder}template, the parameter mirostat, "
        f"the parameter seed{advised}\n"
    )
    if imported:
        assert run("cat", "pirate:latest", "ollama/system").stdout == "You are a pirate."
        assert "'blobstore run' gives llama.cpp" in run("link", "pirate", tmp_path / "out").stderr


def test_models_from_gguf_files_are_served_by_llama_cpp(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = create_gguf(tmp_path, 4)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    result = run("run", "tiny", exit_code=1)
    assert "no inference server is installed: llama.cpp; install llama-server" in result.stderr

    # What is under test is which words the program gets.
    variables = install("llama-server", tmp_path, 'echo "$@"')
    done = run_forked("run", "tiny", "--", "--port", "9", **variables)
    _, path, *rest = done.stdout.decode().split()
    assert Path(path).read_bytes() == content
    assert Path(path).is_relative_to(tmp_path / "cache/blobstore/run")
    assert rest == ["--port", "9"]
    assert b"curl http://127.0.0.1:9/v1/chat/completions" in done.stderr
    assert run_forked("run", "tiny", **variables).returncode == 0
    result = run("run", "tiny", "--with", "mlx-lm", exit_code=2)
    assert "llama.cpp serves models from GGUF files" in result.stderr


def test_llama_cpp_gets_an_option_for_each_role(store: LocalStore, tmp_path: Path) -> None:
    kinds = {
        "x-Q8_0.gguf": ("llama", "model"),
        "vision.gguf": ("clip", "mmproj"),
        "one.gguf": ("llama", "adapter"),
        "two.gguf": ("llama", "adapter"),
        "steer.gguf": ("controlvector", "model"),
        "mtp.gguf": ("gemma4-assistant", "model"),
    }
    (tmp_path / "in").mkdir()
    for number, (name, (architecture, kind)) in enumerate(kinds.items()):
        values = [("general.architecture", TEXT, text(architecture))]
        values.append(("general.type", TEXT, text(kind)))
        content = gguf_file(values, [(f"t{number}", 0, [4], bytes(16))])
        (tmp_path / "in" / name).write_bytes(content)
    run("create", tmp_path / "in", "x")
    # What is under test is which words the program gets.
    variables = install("llama-server", tmp_path, 'echo "$@"')
    words = run_forked("run", "x", **variables).stdout.decode().split()
    shown = [word.rpartition("/")[2] for word in words]
    assert " ".join(shown) == (
        "-m x-Q8_0.gguf --mmproj vision.gguf --lora one.gguf --lora two.gguf "
        "--control-vector steer.gguf --model-draft mtp.gguf --spec-type draft-mtp"
    )
    run("create", tmp_path / "in" / "vision.gguf", "vision")
    refused = run_forked("run", "vision", **variables)
    assert b"no model to serve: the role of vision.gguf is projector" in refused.stderr


def test_a_frozen_gguf_model_is_copied_and_stays_frozen(store: LocalStore, tmp_path: Path) -> None:
    content = create_gguf(tmp_path, 1 << 16)
    run("freeze", "tiny")
    frozen = store.frozen()
    assert frozen
    # What is under test is which file the program gets.
    variables = install("llama-server", tmp_path, 'cat "$2"')

    first = run_forked("run", "tiny", **variables)
    again = run_forked("run", "tiny", **variables)  # from the file that was written then

    assert first.stdout == again.stdout == content
    assert b"note: llama.cpp reads files: a copy of 262 kB is in " in first.stderr
    assert b"copy" not in again.stderr
    assert store.frozen() == frozen
    (file,) = (tmp_path / "cache").rglob("*.gguf")
    file.unlink()
    assert run_forked("run", "tiny", **variables).stdout == content
    file.unlink()
    file.symlink_to("gone")
    assert run_forked("run", "tiny", **variables).stdout == content


def test_copies_are_in_du_and_gc_removes_them_unless_a_server_runs(
    store: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_gguf(tmp_path, 1 << 16)
    # What is under test is how long the program holds the copy: until it has read all of its input.
    variables = install("llama-server", tmp_path, "echo started; exec cat")
    monkeypatch.setenv("XDG_CACHE_HOME", variables["XDG_CACHE_HOME"])
    assert run_json("du")["copies"] == {"files": 0, "bytes": 0}
    before = run_json("du")["store"]["bytes_in_all"]
    server = start(
        command_line("run", "tiny"),
        env=environment(**variables),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"started\n"

    (file,) = (tmp_path / "cache").rglob("*.gguf")
    size = file.stat().st_size
    assert run_json("du")["copies"] == {"files": 1, "bytes": size}
    assert run_json("du")["store"]["bytes_in_all"] >= before + size
    assert "copies for servers" in run("du").stdout
    run("gc", "--older-than", "0s")
    assert file.exists()

    server.communicate(timeout=120)
    planned = run_json("gc", "--dry-run")["leftovers"]
    assert {"path": str(file.parent), "bytes": size} in planned
    run("gc")
    assert not file.parent.exists()
    assert run_json("du")["copies"] == {"files": 0, "bytes": 0}


def test_a_part_that_was_deleted_from_the_folder_of_an_earlier_run_is_written_again(
    store: LocalStore, tmp_path: Path
) -> None:
    source = tmp_path / "tiny"
    source.mkdir()
    for number, name in enumerate(("t-00001-of-00002.gguf", "t-00002-of-00002.gguf")):
        values = [("split.no", number), ("split.count", 2), ("split.tensors.count", 2)]
        listed = [(key, 4, struct.pack("<I", value)) for key, value in values]
        content = gguf_file(listed, [(name, 0, [4], bytes(16))])
        (source / name).write_bytes(content)
    run("create", source, "tiny")
    # What is under test is which files the program finds.
    variables = install("llama-server", tmp_path, 'cat "${2%/*}"/*.gguf')
    content = b"".join(path.read_bytes() for path in sorted(source.iterdir()))

    assert run_forked("run", "tiny", **variables).stdout == content
    (part,) = (tmp_path / "cache").rglob("*-00002-of-*")
    part.unlink()
    assert run_forked("run", "tiny", **variables).stdout == content


@pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "fastapi", "openai", "uvicorn"))),
    reason="transformers[serving] is not installed",
)
def test_transformers_serves_the_folder_of_links(
    stored: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = json.loads(
        run(
            "run", "dense", "--with", "transformers", "--dry-run", "--json", "--", "--port=9"
        ).stdout
    )
    *words, folder, rest = found["command"]
    assert words == [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    assert Path(folder).is_relative_to(tmp_path / "blobstore" / "run")
    assert rest == "--port=9"
    assert not Path(folder).exists()


@needs_server
def test_a_model_that_generates_no_text_is_served_on_request_only(
    store: LocalStore, dense: Path
) -> None:
    (dense / "config.json").write_text('{"architectures": ["BertModel"]}')
    run("create", dense, "bert")
    result = run("run", "bert", "--dry-run", exit_code=2)
    assert "bert:latest is a BertModel, which generates no text; --with NAME" in result.stderr
    run("run", "bert", "--with", "mlx-lm", "--dry-run")
