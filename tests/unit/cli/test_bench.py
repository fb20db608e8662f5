from __future__ import annotations

from pathlib import Path

from blobstore.store.local import LocalStore
from tests.unit.cli.running import run, run_json


def test_the_largest_model_is_measured_by_default_and_each_way_has_a_bar(
    stored: LocalStore, moe: Path
) -> None:
    run("create", moe, "moe")
    assert run_json("bench")["name"] == "moe:latest"

    lines = run("bench", "dense").stdout.splitlines()
    assert lines[0].split() == ["FROM", "READ", "BY", "RATE", "OF", "THE", "BEST"]
    assert sum("#" * 24 in line for line in lines) == 2
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
