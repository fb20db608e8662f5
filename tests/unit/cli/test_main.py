from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

import blobstore
from blobstore.cli.main import program
from blobstore.core import interrupts
from blobstore.core.interrupts import Stopped
from blobstore.errors import NameTaken, StoreError
from blobstore.store.local import LocalStore
from tests.unit.cli.running import command_line, environment, run, run_json, run_process

HEAVY = {
    "numpy",
    "torch",
    "mlx",
    "rich",
    "huggingface_hub",
    "transformers",
    "safetensors",
    "ml_dtypes",
    "httpx",
    "requests",
    "asyncio",
}
COMMANDS = ["create", "list", "show", "verify", "export"]


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after ``code``."""
    listing = "import sys; sys.stderr.write('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"try:\n    {code}\nfinally:\n    {listing}"],
        capture_output=True,
        env=environment(),
        check=True,
    )
    return {name.partition(".")[0] for name in done.stderr.decode().split("\n")}


@pytest.mark.parametrize(
    "code",
    [
        "import blobstore",
        "import blobstore.cli.main",
        "from blobstore.cli.main import program; program(['--help'], standalone_mode=False)",
        *(
            f"from blobstore.cli.main import program; "
            f"program(['{name}', '--help'], standalone_mode=False)"
            for name in COMMANDS
        ),
    ],
)
def test_help_and_import_load_nothing_heavy(code: str) -> None:
    loaded = modules_after(code)
    assert "blobstore" in loaded
    assert not loaded & HEAVY


def test_show_loads_no_numpy_and_piped_no_rich(stored: LocalStore) -> None:
    loaded = modules_after(
        "from blobstore.cli.main import program; program(['show', 'dense'], standalone_mode=False)"
    )
    assert not loaded & HEAVY


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], *([name, "-h"] for name in COMMANDS)])
def test_prints_help(arguments: list[str]) -> None:
    assert run(*arguments).stdout.startswith("Usage: ")


def test_help_names_every_command_exit_code_and_completion() -> None:
    text = run("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in text
    assert "3 not found, 4 damaged" in text
    assert "blobstore completion bash" in text


def test_prints_a_version() -> None:
    assert run("--version").stdout.startswith("blobstore ")


@pytest.mark.parametrize("module", ["blobstore", "blobstore.cli"])
def test_runs_as_a_module(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        env=environment(),
        check=True,
    )
    assert done.stdout.startswith(b"blobstore ")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["show"],
        ["create"],
        ["create", "s", "n", "--experts", "loose"],
        ["create", "s", "n", "--jobs", "0"],
        ["list", "--nonsense"],
        ["list", "--store", ""],
        ["show", "--manifest", "--sort", "name", "x"],
        ["show", "--manifest", "x", "pattern"],
        ["show", "bad name"],
        ["cat", "../../etc/passwd", "config.json"],
        ["verify", "good", "bad/"],
        ["export", "m", "d", "--shard-size", "5 apples"],
        ["export", "m", "d", "--shard-size", "0"],
    ],
)
def test_wrong_usage_exits_with_2(store: LocalStore, arguments: list[str]) -> None:
    assert run(*arguments, exit_code=2).stderr
    assert not store.root.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no\x1b[31m\u202e"],
        ["list", "--no\x1b[31m\u202e"],
        ["li\x1bst"],
        ["list", "ex\x1btra\u202e"],
    ],
)
def test_escapes_control_characters_in_usage_errors(arguments: list[str]) -> None:
    result = run(*arguments, exit_code=2)
    assert "\\x1b" in result.stderr
    assert all(line.isprintable() for line in result.stderr.split("\n"))


def test_an_error_is_one_line_without_a_traceback(store: LocalStore) -> None:
    done = run_process("show", "absent")
    assert done.returncode == 3
    assert done.stdout == b""
    assert done.stderr.startswith(b"blobstore: error: no model 'absent:latest'")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("arguments", "kind", "exit_code"),
    [
        (["show", "absent"], "ModelNotFound", 3),
        (["show", "bad name"], "InvalidReference", 2),
        (["create", "/absent/source", "m"], "SourceNotFound", 3),
        (["verify"], "NotFound", 3),
        (["show"], "UsageError", 2),
        (["list", "--nonsense"], "UsageError", 2),
        (["create", "s", "n", "--jobs", "0"], "UsageError", 2),
        (["show", "--manifest", "x", "pattern"], "UsageError", 2),
    ],
)
def test_an_error_is_json_too_when_asked(
    store: LocalStore, arguments: list[str], kind: str, exit_code: int
) -> None:
    error = run_json(*arguments, exit_code=exit_code)["error"]
    assert error["kind"] == kind
    assert error["exit_code"] == exit_code
    assert error["message"] in run(*arguments, exit_code=exit_code).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["shwo"], "no such command 'shwo'; did you mean 'show'?; see 'program --help'"),
        (["images"], "no such command 'images'; did you mean 'list'?; see 'program --help'"),
        (["ps"], "no such command 'ps'; 'blobstore run' and 'blobstore serve' end with Ctrl-C"),
        (["stop", "x"], "no such command 'stop'; 'blobstore run' and 'blobstore serve' end with"),
        (["tags"], "no such command 'tags'; 'blobstore list NAME' shows the tags of a name, and"),
        (["open", "x"], "no such command 'open'; 'blobstore show NAME' lists the tensors"),
        (["size"], "no such command 'size'; did you mean 'du'?"),
        (["start"], "no such command 'start'; did you mean 'serve'?"),
        (["upgrade"], "no such command 'upgrade'; a new version of the program comes with pip"),
        (["dedup"], "no such command 'dedup'; equal tensors are always stored once"),
        (["rmi", "x"], "no such command 'rmi'; did you mean 'rm'?; see 'program --help'"),
        (["xyzzy"], "no such command 'xyzzy'; see 'program --help'"),
        (["cat"], "missing argument 'NAME'; see 'program cat --help'"),
        (["gc", "--remote"], "option '--remote' requires an argument; see 'program gc --help'"),
        (["list", "--stroe", "x"], "no such option '--stroe'; did you mean '--"),
        (["--stroe", "x"], "no such option '--stroe'; did you mean '--store'?"),
        (["create", "s", "n", "--jobs", "0"], "invalid value for '--jobs' / '-j': 0 is not in"),
    ],
)
def test_a_usage_error_is_one_line_like_other_errors(arguments: list[str], message: str) -> None:
    result = run(*arguments, exit_code=2)

    assert result.stderr.startswith(f"blobstore: error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_ls_is_list(stored: LocalStore) -> None:
    assert run("ls").stdout == run("list").stdout


def test_the_store_may_stand_before_the_command(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = run("list").stdout
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "other"))

    assert run("list").stdout == ""
    assert run("--store", stored.root, "list").stdout == expected
    assert run("--store", tmp_path / "other", "list", "--store", stored.root).stdout == expected
    run("--store", "", "list", exit_code=2)


@pytest.mark.parametrize("arguments", [["-q", "list"], ["list", "--quiet"]])
def test_quiet_prints_no_notes(store: LocalStore, arguments: list[str]) -> None:
    assert run("list").stderr.startswith("note: ")
    assert run(*arguments).output == ""


@pytest.mark.parametrize("arguments", [["-v", "show", "absent"], ["show", "absent", "--verbose"]])
def test_verbose_says_where_an_error_occurred(store: LocalStore, arguments: list[str]) -> None:
    errors = run(*arguments, exit_code=3).stderr.splitlines()

    assert errors[0] == "Traceback (most recent call last):"
    assert errors[-1] == run("show", "absent", exit_code=3).stderr.rstrip()


def test_a_bug_keeps_its_traceback(stored: LocalStore) -> None:
    code = (
        "import blobstore.operations.describe.list as m, sys\n"
        "m.choose_models = lambda *_, **__: 1 / 0\n"
        "sys.argv = ['blobstore', 'list']\n"
        "from blobstore.cli.main import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith(b"ZeroDivisionError: division by zero")


def test_suggests_only_similar_names(stored: LocalStore) -> None:
    error = run("show", "qwen", exit_code=3).stderr
    assert "did you mean" not in error
    assert "blobstore pull" not in error


def test_a_name_with_a_host_that_the_store_lacks_may_be_pulled(stored: LocalStore) -> None:
    error = run("show", "ghcr.io/team/qwen:v2", exit_code=3).stderr
    assert "; 'blobstore pull ghcr.io/team/qwen:v2' fetches it if a registry has it" in error


@pytest.mark.parametrize(
    "command", [["show", "dense"], ["show", "dense", "--json"], ["show", "dense", "--manifest"]]
)
def test_ends_silently_if_the_reader_closes_the_pipe(
    stored: LocalStore, command: list[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command_line(*command),
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == b""


def test_a_closed_output_is_an_error(stored: LocalStore) -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *command_line("show", "dense")],
        stderr=subprocess.PIPE,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == b"blobstore: error: cannot write to standard output: it is closed\n"


def test_a_full_disk_under_the_output_is_an_error(stored: LocalStore) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            command_line("show", "dense"),
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment(),
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == (
        b"blobstore: error: cannot write to standard output: No space left on device\n"
    )


@pytest.mark.parametrize("command", [["list"], ["show", "dense"]])
def test_a_full_disk_under_the_errors_leaves_the_exit_code(
    stored: LocalStore, command: list[str]
) -> None:
    (manifest,) = (path for path in stored.folder("manifests").rglob("*") if path.is_file())
    manifest.write_bytes(b"garbage")
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            command_line(*command),
            stdout=subprocess.DEVNULL,
            stderr=full,
            env=environment(),
            check=False,
        )
    assert done.returncode == 4


@pytest.mark.parametrize("command", [["list"], ["verify"], ["show", "m"], ["create", ".", "m"]])
def test_an_inaccessible_store_is_an_error(command: list[str]) -> None:
    result = run(*command, "--store", "/" + "n" * 300, exit_code=1)
    assert result.stderr.startswith("blobstore: error: ")
    assert result.stderr.count("\n") == 1


def test_characters_that_the_terminal_cannot_show_are_escaped(stored: LocalStore) -> None:
    done = run_process("show", "dense", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert b"path/to/\\xe9<&>" in done.stdout


def sparse_model(path: Path, *, tensors: int, size: int) -> Path:
    """Write a safetensors file of zeros that takes no space on disk."""
    header = json.dumps(
        {
            f"t{index}": {
                "dtype": "U8",
                "shape": [size],
                "data_offsets": [index * size, (index + 1) * size],
            }
            for index in range(tensors)
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        # With a last byte, or it would be an unfinished download.
        file.seek(tensors * size - 1, os.SEEK_CUR)
        file.write(b"\0")
    return path


@pytest.mark.parametrize(
    ("signals", "exit_code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM], 143), ([signal.SIGINT, signal.SIGTERM], 130)],
    ids=["ctrl-c", "terminate", "impatient"],
)
def test_an_interrupted_create_leaves_nothing(
    store: LocalStore, tmp_path: Path, signals: list[int], exit_code: int
) -> None:
    source = sparse_model(tmp_path / "big.safetensors", tensors=64, size=64 * 2**20)
    process = subprocess.Popen(
        command_line("create", source, "big", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    deadline = time.monotonic() + 60
    while not (store.folder("temporary").is_dir() and os.listdir(store.folder("temporary"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
    for number in signals:
        process.send_signal(number)
    output, errors = process.communicate(timeout=60)

    assert process.returncode == exit_code
    error = {"kind": "Interrupted", "message": "interrupted", "exit_code": exit_code}
    assert json.loads(output) == {"error": error}
    assert errors == b"blobstore: interrupted\n"
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("blobs").iterdir()) == []
    assert list(store.references()) == []
    assert [path for path in store.folder("manifests").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["int", "term"]
)
def test_an_interrupt_outside_a_command_has_the_same_message(number: int, exit_code: int) -> None:
    code = (
        "import os, sys\n"
        "import blobstore.cli.main as m\n"
        f"m._Program.parse_args = lambda *_: os.kill(os.getpid(), {int(number)})\n"
        "sys.argv = ['blobstore', 'list']\n"
        "from blobstore.__main__ import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=False
    )
    assert done.returncode == exit_code
    assert done.stderr == b"blobstore: interrupted\n"


@pytest.mark.parametrize("module", ["blobstore.cli.main", "click", "blobstore.cli.list"])
def test_an_interrupt_during_an_import_has_the_same_message(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "sys.argv = ['blobstore', 'list']\n"
        "from blobstore.__main__ import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (130, b"blobstore: interrupted\n")


def test_an_error_after_a_request_to_stop_is_the_interrupt(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        # As a helper that the same Ctrl-C has ended makes its caller fail.
        monkeypatch.setattr(interrupts._State, "number", signal.SIGINT)
        monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())
        raise StoreError("the helper failed")

    monkeypatch.setattr(LocalStore, "repositories", fail)
    with pytest.raises(Stopped):
        program.main(["list", "--json"])
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "Interrupted"


def test_an_error_before_a_request_to_stop_is_reported(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            os.stat("/dev/null/file")
        except OSError as error:  # the user is impatient while this is cleaned up
            monkeypatch.setattr(interrupts, "_thread", interrupts._Thread())
            for name, value in {"number": 0, "count": 0, "error": None}.items():
                monkeypatch.setattr(interrupts._State, name, value)
            interrupts._record(signal.SIGINT, None)
            raise StoreError("not written") from error

    monkeypatch.setattr(LocalStore, "repositories", fail)
    with pytest.raises(SystemExit) as ended:
        program.main(["list", "--json"])
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "not written"


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (MemoryError(), "out of memory"),
    ],
)
def test_a_failure_of_the_system_is_one_line(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, error: Exception, what: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(LocalStore, "repositories", fail)
    message = f"the system failed: {what}"
    assert run("list", exit_code=1).stderr == f"blobstore: error: {message}\n"
    assert run_json("list", exit_code=1)["error"]["message"] == message


def test_opens_as_many_files_as_the_system_allows() -> None:
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))\n"
        "import blobstore.cli.main as m\n"
        "m.program = lambda **_: print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "m.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment(), check=True
    )
    assert done.stdout == b"(300, 300)\n"


def test_advice_names_options_and_not_arguments_of_python(
    stored: LocalStore, moe: Path, tmp_path: Path
) -> None:
    run("create", moe, "moe")
    error = run_json("cp", "moe", "dense", exit_code=1)["error"]
    assert (
        error["message"]
        == "another model has the name 'dense:latest'; replace it with --force, or choose another name"
    )
    with pytest.raises(
        NameTaken, match=r"'dense:latest'; replace it with force=True, or choose another name$"
    ):
        blobstore.copy("moe", "dense", store=stored)
    file = tmp_path / "force=True"
    file.touch()
    assert f"'{file}' exists already; choose" in run("export", "moe", file, exit_code=1).stderr


@pytest.mark.parametrize(
    ("alias", "command"),
    [("df", "du"), ("log", "history"), ("search", "find"), ("describe", "info"), ("ls", "list")],
)
def test_words_of_other_programs_are_commands(alias: str, command: str) -> None:
    shown = run(alias, "--help").stdout.partition("\n")[2]
    assert shown == run(command, "--help").stdout.partition("\n")[2]


def test_help_and_version_are_words_too() -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "create").stdout == run("create", "--help").stdout
    assert run("version").stdout == run("--version").stdout
    assert "no such command 'nothing'" in run("help", "nothing", exit_code=2).stderr


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("chat", "'blobstore run' starts a server"),
        ("env", "'blobstore du' shows what is there"),
        ("quantize", "'blobstore create SOURCE NAME --quantize TYPE'"),
        ("doctor", "'blobstore verify' checks a store"),
        ("clone", "did you mean 'pull'?"),
    ],
)
def test_what_no_command_does_says_where_it_is(word: str, advice: str) -> None:
    assert advice in run(word, exit_code=2).stderr
