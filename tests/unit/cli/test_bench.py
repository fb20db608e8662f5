from __future__ import annotations

import os
from pathlib import Path

import pytest

from blobstore.store.local import LocalStore
from tests.unit.cli.running import interrupted, run, run_json
from tests.unit.cli.test_extras import without
from tests.unit.cli.test_main import modules_after, sparse_model


def test_the_largest_model_is_measured_by_default_and_each_way_has_a_bar(
    stored: LocalStore, moe: Path
) -> None:
    run("create", moe, "moe")
    assert run_json("bench")["name"] == "moe:latest"

    lines = run("bench", "dense").stdout.splitlines()
    assert lines[0].split() == ["FROM", "READ", "BY", "RATE", "OF", "THE", "BEST"]
    assert sum("#" * 24 in line for line in lines) >= 2  # others may be as fast as the best one
    assert all(line.endswith("#") for line in lines[1:11])
    assert lines[12].startswith("disk: open")


def test_paths_and_addresses_are_measured(stored: LocalStore, dense: Path, tmp_path: Path) -> None:
    run("push", "dense", f"file://{tmp_path}/remote")
    assert run_json("bench", dense)["name"] == str(dense)
    assert (
        run_json("bench", f"file://{tmp_path}/remote/dense")["measurements"][0]["place"]
        == "network"
    )


def test_a_store_without_models_is_not_found(store: LocalStore, tmp_path: Path) -> None:
    result = run("bench", exit_code=3)
    assert "the store has no models; there is no store at" in result.stderr


def test_a_device_has_rows_with_bars_of_their_own(stored: LocalStore) -> None:
    pytest.importorskip("torch")
    lines = run("bench", "dense", "--device", "cpu").stdout.splitlines()
    rows = [line for line in lines if "cpu" in line.split(":")[0] and line.endswith("#")]
    assert [line.split("  ")[0] for line in rows] == [
        *["host memory"] * 2,
        *["disk"] * 3,
        *["page cache"] * 3,
    ]
    assert sum("#" * 24 in line for line in rows) == 1
    assert rows[0].split("  ")[1].strip() == "copies to cpu, pageable, one by one"
    assert any(line.startswith("disk to cpu: open(") for line in lines)

    found = run_json("bench", "dense", "--device", "cpu")
    assert [one["device"] for one in found["measurements"]] == [None] * 10 + ["cpu"] * 8
    assert found["notices"] == []


def test_no_device_is_measured_and_torch_not_imported_where_there_is_no_gpu(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from blobstore.cli.main import program; import blobstore.operations.bench.device as d; "
        "d.may_have_gpu = lambda: False; program(['bench', 'dense'], standalone_mode=False)"
    )
    assert "torch" not in modules_after(code)


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("gpu", "device must be auto, none, cpu, cuda or cuda:N, got 'gpu'"),
        ("cuda:99", "torch has no device 'cuda:99' here: "),
    ],
)
def test_an_absent_device_is_a_usage_error(stored: LocalStore, device: str, text: str) -> None:
    pytest.importorskip("torch")
    result = run("bench", "dense", "--device", device, exit_code=2)
    assert text in result.stderr
    assert result.stdout == ""


def test_a_device_without_torch_says_how_to_install_it(stored: LocalStore) -> None:
    code = "from blobstore.__main__ import main; main()"
    shown = without(("torch",), code, "bench", "dense", "--device=cpu")
    assert "torch is not installed for this Python; run: pip install" in shown
    # What is not named is not needed, also if there seems to be a GPU.
    code = "import blobstore.operations.bench.device as d; d.may_have_gpu = lambda: True; " + code
    assert "page cache: open" in without(("torch",), code, "bench", "dense")


def test_an_interrupt_ends_it_at_once(store: LocalStore, tmp_path: Path) -> None:
    run("create", sparse_model(tmp_path / "big.safetensors", tensors=64, size=2**21), "big")
    status, errors = interrupted(store.folder("blobs"), "bench", "big", "--device=cpu", "--json")
    assert status == 130, errors
    assert errors.splitlines()[-1] == "blobstore: interrupted"
    assert os.listdir(store.folder("temporary")) == []
