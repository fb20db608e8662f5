from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from blobstore.http import protocol
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.store.local import LocalStore
from blobstore.store.partial import bytes_done
from tests.support.frozen import put
from tests.support.stub_registry import PIECE, StubRegistry
from tests.unit.cli.running import command_line, environment, run, run_json


@pytest.fixture
def origin(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "origin")
    put(store, "a", {"x": 1, "y": 2})
    return store


@pytest.fixture
def remote(origin: LocalStore, registry: StubRegistry) -> str:
    return registry.put(origin, plan_ollama(origin.read_manifest("a")), "team/a", "latest")


def test_reports_what_was_fetched(store: LocalStore, remote: str) -> None:
    planned = run("pull", remote, "a", "--dry-run")
    assert planned.stdout == f"would fetch a:latest from {remote}: 160 kB in 3 blobs\n"
    assert not store.root.exists()
    result = run("pull", remote, "a")
    assert result.stderr == ""
    assert result.stdout.startswith(f"pulled a:latest from {remote}: 160 kB in 3 blobs; ")
    run("verify")
    again = run("pull", remote, "a")
    assert again.stdout == "a:latest is up to date: 3 blobs present, nothing to fetch\n"


def test_says_what_was_there_already(store: LocalStore, remote: str) -> None:
    put(store, "b", {"x": 1})
    result = run("pull", f"oci://{remote}")
    assert result.stdout.startswith(
        f"pulled {remote}: 80.1 kB in 1 blob, 80.2 kB already present; "
    )


def test_prints_json_with_exact_numbers(store: LocalStore, origin: LocalStore, remote: str) -> None:
    found = run_json("pull", remote, "a")
    assert found.pop("seconds") >= 0
    assert found.pop("digest").startswith("sha256:")
    assert found == {
        "dry_run": False,
        "remote": remote,
        "name": "a:latest",
        "remote_shape": "ollama",
        "blobs": 3,
        "blobs_fetched": 3,
        "bytes_fetched": sum(blob.size for blob in origin.resolve("a").blobs),
        "bytes_resumed": 0,
        "signatures": 0,
        "bytes_saved": 0,
        "bytes_present": 0,
        "replaced": False,
    }


def test_says_which_damaged_blob_was_replaced(store: LocalStore, remote: str) -> None:
    run("pull", remote, "a")
    blob = store.resolve("a").layers[0]
    path = Path(store.blob_path(blob.digest))
    path.chmod(0o644)
    path.write_bytes(bytes(blob.size))
    assert f"note: blob {blob.digest} was damaged" in run("pull", remote, "a").stderr


def test_an_unknown_model_has_exit_code_3(store: LocalStore, registry: StubRegistry) -> None:
    result = run("pull", f"{registry.host}/team/none", exit_code=3)
    assert "team/none" in result.stderr
    assert not store.root.exists()


def test_wrong_bytes_have_exit_code_4(
    store: LocalStore, registry: StubRegistry, remote: str
) -> None:
    registry.alter = lambda _, begin, data: data if begin else bytes([data[0] ^ 1]) + data[1:]
    result = run("pull", remote, "a", exit_code=4)
    assert "the registry sent other bytes than those of blob" in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [("qwen",), ("team/qwen",), ("host.io/A",), ("host.io/a:",), ("host.io/a@sha256:12",)],
)
def test_wrong_addresses_have_exit_code_2(store: LocalStore, arguments: tuple[str, ...]) -> None:
    run("pull", *arguments, exit_code=2)
    assert not store.root.exists()


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("qwen", "address such as oci://registry.ollama.ai/qwen:latest, or import it with"),
        (
            "hub/team/Qwen",
            "oci://hub/team/qwen:latest, or import it with 'blobstore create hf://team/Qwen",
        ),
        ("qwen:1b", "'blobstore create hf://ORG/qwen NAME'"),
        ("team/Qwen", "'blobstore create hf://team/Qwen NAME'"),
        ("hf://team/Qwen", "'blobstore create hf://team/Qwen NAME' imports it"),
        ("hf:team/Qwen", "say hf://team/Qwen"),
        ("ollama://qwen", "'blobstore create ollama://qwen NAME' imports it"),
    ],
)
@pytest.mark.parametrize("option", [(), ("--all",)])
def test_a_name_without_a_place_gets_a_hint(
    store: LocalStore, text: str, advice: str, option: tuple[str, ...]
) -> None:
    error = run("pull", *option, text, exit_code=2).stderr
    assert advice in error
    assert f"'{text}' does not say where" in error or f"'{text}' is not the address of" in error


@pytest.mark.parametrize("end", ["", "/", "/team"])
def test_all_models_of_a_registry_are_pulled_without_a_scheme_too(
    store: LocalStore, registry: StubRegistry, remote: str, end: str
) -> None:
    assert "pulled 1 model" in run("pull", "--all", f"{registry.host}{end}").stdout
    assert remote.startswith(registry.host)
    assert len(list(store.references())) == 1


def test_as_gives_models_another_namespace(
    store: LocalStore, registry: StubRegistry, remote: str
) -> None:
    run("pull", remote, "--as", "lab")
    run("pull", "--all", registry.host, "--as", "h.x/lab")
    model = remote.rpartition("/")[2].partition(":")[0]
    names = [name.partition(":")[0] for name in run("list", "-q").stdout.split()]
    assert names == [f"h.x/lab/{model}", f"lab/{model}"]
    error = run("pull", remote, "name", "--as", "lab", exit_code=2).stderr
    assert "--as and NAME contradict each other" in error


def test_a_place_that_was_used_before_is_suggested(store: LocalStore, remote: str) -> None:
    run("pull", remote, "a")
    name = remote.rpartition("/")[2].partition(":")[0]
    error = run("pull", name, exit_code=2).stderr
    assert f"'{name}' does not say where the model is; did you mean 'oci://{remote}" in error


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pull_continues(
    store: LocalStore, registry: StubRegistry, remote: str, origin: LocalStore, number: int
) -> None:
    goes_on = threading.Event()

    def send(_: str, begin: int, data: bytes) -> bytes:
        if begin:
            goes_on.wait()
        return data

    blobs = [blob.id for blob in origin.resolve("a").blobs]
    registry.alter = send
    command = command_line("pull", remote, "a", "--streams", "2")
    process = subprocess.Popen(
        command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    while not any(bytes_done(store.folder("partial"), blob) for blob in blobs):
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    goes_on.set()
    assert process.returncode == 128 + number
    assert "the same command continues where this one stopped" in errors
    assert not store.has_model("a")
    first = registry.sent.total()
    found = run_json("pull", remote, "a")
    assert found["bytes_fetched"] + found["bytes_resumed"] == sum(size for _, size in blobs)
    assert found["bytes_resumed"] > 0
    # Only now, the registry may send the last piece of each stream of the first pull, or notice that nobody takes it.
    assert found["bytes_fetched"] <= registry.sent.total() - first + 2 * PIECE
    assert store.read_manifest("a") == origin.read_manifest("a")
    run("verify")


# Other commands with the address of a model


@pytest.mark.parametrize(
    "command",
    [
        ("show", "oci://{}"),
        ("show", "oci://{}", "--manifest"),
        ("list", "oci://{}"),
        ("du", "oci://{}"),
        ("diff", "oci://{0}", "oci://{0}"),
        ("verify", "--remote", "{}"),
        ("pull", "{}", "a"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_that_reads_a_registry_can_do_with_tls(
    store: LocalStore, remote: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word.format(remote) for word in command]
    with_tls = run(*words, "--no-plain-http", exit_code=1)
    monkeypatch.setattr(protocol, "is_loopback", lambda _: False)
    for refused in (with_tls, run(*words, exit_code=1)):
        assert "cannot connect to 'https://127.0.0.1:" in refused.stderr
    run(*words, "--plain-http")


def test_show_reads_the_headers_of_a_model_in_a_registry(
    store: LocalStore, origin: LocalStore, registry: StubRegistry, remote: str
) -> None:
    found = run_json("show", f"oci://{remote}")
    assert found.pop("name") == f"oci://{remote}"
    there = run_json("show", "a", "--store", origin.root)
    there.pop("name")
    assert (found.pop("signatures"), there.pop("signatures")) == (None, [])
    assert (found.pop("read"), there.pop("read")["how"]) == (None, "mmap")
    assert found == there
    assert registry.sent.total() < 2 * 2**16 + 2000
    assert not store.root.exists()
    assert run("show", f"oci://{remote}", "--manifest").stdout.encode() == (
        origin.read_manifest("a")
    )


def test_show_reports_a_blob_that_the_registry_lost(
    store: LocalStore, origin: LocalStore, registry: StubRegistry, remote: str
) -> None:
    del registry.blobs[str(origin.resolve("a").layers[0].digest)]
    result = run("show", f"oci://{remote}", exit_code=4)
    assert "layer 'x'" in result.stderr
    assert "the registry does not have" in result.stderr


def test_diff_compares_a_model_with_one_in_a_registry(
    store: LocalStore, registry: StubRegistry, remote: str
) -> None:
    put(store, "b", {"x": 1, "y": 3})
    found = run_json("diff", "b", f"oci://{remote}", exit_code=1)
    assert {item["name"]: item["change"] for item in found["tensors"]} == {
        "x": "same",
        "y": "changed",
    }
    run("pull", remote, "a")
    assert run_json("diff", "a", f"oci://{remote}")["same"]


def test_du_says_how_much_of_a_model_in_a_registry_the_store_has(
    store: LocalStore, origin: LocalStore, remote: str
) -> None:
    put(store, "b", {"x": 1})
    (found,) = run_json("du", f"oci://{remote}")["models"]
    assert found["bytes"] == sum(blob.size for blob in origin.resolve("a").blobs)
    assert found["bytes_present"] + found["bytes_missing"] == found["bytes"]
    assert run_json("pull", remote, "a")["bytes_fetched"] == found["bytes_missing"]
    assert "IN STORE" in run("du", f"oci://{remote}").stdout
    run("du", f"oci://{remote}", "b", exit_code=2)


def test_list_prints_the_tags_of_a_repository(store: LocalStore, remote: str) -> None:
    repository = remote.rpartition(":")[0]
    assert remote in run("list", f"oci://{repository}").stdout
    assert run("list", f"oci://{repository}", "-q").stdout == f"{remote}\n"
    (there,) = run_json("list", f"oci://{repository}")["models"]
    pulled = run_json("pull", remote, "a")
    (here,) = run_json("list", "a")["models"]
    assert there["digest"] == here["digest"]
    assert there["registry_digest"] == pulled["digest"]
    run("list", f"oci://{repository}", "a", exit_code=2)
