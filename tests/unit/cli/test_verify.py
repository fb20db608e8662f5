from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.damage import blob_path
from tests.unit.cli.running import command_line, environment, run, run_json


def flip_last_byte(store: LocalStore, layer_name: str) -> None:
    manifest = store.resolve(Reference.parse("dense"))
    layer = next(layer for layer in manifest.layers if layer.name == layer_name)
    path = store.folder("blobs") / layer.digest.file_name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_says_that_all_is_well(stored: LocalStore) -> None:
    result = run("verify")
    assert result.stdout.startswith("ok: 1 model, 14 blobs, ")
    assert result.stdout.count("\n") == 1
    verified = run_json("verify", "dense", "--jobs", 1)
    assert verified["models"] == 1
    assert verified["bytes_read"] == sum(p.stat().st_size for p in stored.folder("blobs").iterdir())
    assert verified["faults"] == []


def test_prints_one_line_per_fault_and_exits_with_4(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    flip_last_byte(stored, "model.embed_tokens.weight")
    flip_last_byte(stored, "merges.txt")
    result = run("verify", exit_code=4)
    lines = result.stdout.splitlines()

    assert lines[0].startswith("model dense:latest, tensor model.embed_tokens.weight: ")
    assert lines[1].startswith("model dense:latest, layer merges.txt: ")
    assert lines[2].startswith("2 faults: 2 models, ")
    assert len(lines) == 3
    faults = run_json("verify", exit_code=4)["faults"]
    assert [fault["layer"] for fault in faults] == ["model.embed_tokens.weight", "merges.txt"]


def test_verifies_only_what_is_named(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    flip_last_byte(stored, "merges.txt")
    assert run("verify", "moe").stdout.startswith("ok: 1 model, ")
    assert "merges.txt" in run("verify", "moe", "dense", exit_code=4).stdout


def test_a_damaged_manifest_is_a_fault(stored: LocalStore) -> None:
    stored.manifest_path(Reference.parse("dense")).write_bytes(b"{}")
    result = run("verify", exit_code=4)
    assert result.stdout.startswith("model dense:latest: ")
    assert "\n1 fault: 1 model, 0 blobs, " in result.stdout


@pytest.mark.parametrize("arguments", [["verify"], ["repair"], ["repair", "--from", "x"]])
def test_an_absent_store_is_not_found(store: LocalStore, arguments: list[str]) -> None:
    assert run(*arguments, exit_code=3).stderr.startswith("blobstore: error: there is no store at ")


def test_a_quick_check_reads_no_data(stored: LocalStore) -> None:
    flip_last_byte(stored, "model.embed_tokens.weight")
    result = run("verify", "--quick")
    assert result.stdout.startswith("ok: 1 model, 14 blobs, sizes and headers only, ")
    run("verify", exit_code=4)
    blob_path(stored, "merges.txt", "dense").unlink()
    (fault,) = run_json("verify", "--quick", exit_code=4)["faults"]
    assert fault["layer"] == "merges.txt"
    assert fault["blob"].startswith("sha256:")


def test_advises_repair_once(stored: LocalStore) -> None:
    flip_last_byte(stored, "model.embed_tokens.weight")
    flip_last_byte(stored, "merges.txt")
    result = run("verify", exit_code=4)
    assert "blobstore repair" not in result.stdout
    assert result.stderr.count("blobstore repair NAME --from SOURCE") == 1
    assert "repair" not in run("verify", "--quick").stderr


@pytest.mark.parametrize("rate", ["50MB/s", "50MB", "1000000B", " 2GiB/s"])
def test_a_rate_can_be_given(rate: str, stored: LocalStore) -> None:
    run("verify", "--max-rate", rate)
    run("verify", "--watch-rate", rate)


@pytest.mark.parametrize("rate", ["fast", "0", "1000000", "0.5B/s", "-1MB/s", "5MB/m", ""])
def test_rejects_invalid_rates(rate: str, stored: LocalStore) -> None:
    assert "--max-rate" in run("verify", "--max-rate", rate, exit_code=2).stderr


def test_refuses_a_rate_for_a_quick_check(stored: LocalStore) -> None:
    run("verify", "--quick", "--max-rate", "1MB/s", exit_code=2)


def test_a_sample_says_how_many_blobs_were_hashed(stored: LocalStore) -> None:
    found = [run_json("verify", "--sample", f"{part}/3") for part in (1, 2, 3)]
    assert sum(one["hashed"] for one in found) == found[0]["blobs"]
    assert f" {found[1]['hashed']} of them hashed, " in run("verify", "--sample", "2/3").stdout


@pytest.mark.parametrize("share", ["0%", "101%", "5", "0/7", "8/7", "1/0", "half", "nan%"])
def test_rejects_invalid_samples(share: str, stored: LocalStore) -> None:
    error = run("verify", "--sample", share, exit_code=2).stderr
    assert f"'{share}' is not a sample; give a share such as 5%, or a part such as 2/7" in error


def test_ctrl_c_ends_a_slow_verification(stored: LocalStore) -> None:
    # One byte per second: without the interrupt this would take an hour.
    process = subprocess.Popen(
        command_line("verify", "--max-rate", "1B"),
        env=environment(BLOBSTORE_HOME=str(stored.root)),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    with process:
        while not reads(process.pid):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == b"blobstore: interrupted\n"
    assert process.returncode == 130


def reads(pid: int) -> bool:
    """Return whether a process has threads that check blobs."""
    return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--signatures",)])
def test_checks_what_it_can_if_a_folder_of_manifests_is_closed(
    closed: Path, options: tuple[str, ...]
) -> None:
    found = json.loads(
        sandbox.call(
            lambda: run("verify", *options, "--json", exit_code=1).stdout, unprivileged=True
        )
    )
    text = sandbox.call(lambda: run("verify", *options, exit_code=1).output, unprivileged=True)
    gc = sandbox.call(lambda: run("gc", "--dry-run", exit_code=1).output, unprivileged=True)
    error = f"cannot list '{closed}': Permission denied"
    assert found["models"] == 1
    assert found["faults"] == []
    assert found["unreadable"] == [error]
    assert "ok: 1 model, 14 blobs" in text
    assert f"blobstore: error: {error}\n" in text
    assert error in gc


def test_an_address_is_refused_with_advice() -> None:
    result = run("freeze", "s3://models/dense", exit_code=2)
    assert (
        "this command takes names of the store; 'blobstore pull s3://models/dense'" in result.stderr
    )


def test_an_address_is_read_back_and_a_whole_store_with_each_blob_once(
    stored: LocalStore, tmp_path: Path
) -> None:
    place = f"file://{tmp_path}/bucket"
    run("push", "dense", place)
    run("push", "dense", f"{place}/same:v1")
    one, every = run_json("verify", f"{place}/dense"), run_json("verify", "--remote", place)
    assert (one["models"], every["models"]) == (1, 2)
    assert (one["blobs"], one["bytes_read"]) == (every["blobs"], every["bytes_read"])
    assert (one["digest"] is None, every["digest"]) == (False, None)
    digest = stored.resolve("dense").layers[0].digest  # other files lie there, too
    blob = tmp_path / "bucket" / "blobs" / digest.file_name
    blob.write_bytes(bytes(blob.stat().st_size))
    assert len(run_json("verify", place, exit_code=4)["faults"]) == 1
    manifest = next(path for path in (tmp_path / "bucket" / "manifests").rglob("v1"))
    manifest.write_bytes(b"{")
    assert run_json("verify", place, exit_code=4)["models"] == 1
    run("verify", f"{place}/typo", exit_code=3)
    run("verify", place, "dense", exit_code=2)


@pytest.mark.parametrize("is_all", [True, False])
def test_says_once_what_helps_against_lost_manifests(
    stored: LocalStore, moe: Path, *, is_all: bool
) -> None:
    run("create", moe, "other")
    for name in ("dense", "other")[: 2 if is_all else 1]:
        stored.manifest_path(name).unlink()
    result = run("verify", exit_code=4)
    (note,) = result.stderr.splitlines()
    assert note.startswith("note: 'blobstore repair' restores lost manifests")
    assert result.stdout.count("\n") == 2
    count = "2 manifests" if is_all else "1 manifest"
    assert f"rewrote {count}; ok: 2 models, " in run("repair").stdout
    run("verify")
