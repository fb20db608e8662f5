from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import blobstore
import blobstore.operations.describe.list as listing
from blobstore.cli import output
from blobstore.store.catalog import Catalog
from blobstore.store.local import LocalStore
from tests.support import sandbox
from tests.support.ollama_store import add_gguf_model
from tests.unit.cli.running import run, run_json


def test_an_absent_store_lists_nothing(store: LocalStore) -> None:
    result = run("list")
    assert result.stdout == ""
    assert result.stderr.startswith("note: there is no store at ")
    assert run_json("list") == {"models": [], "unreadable": []}
    assert not store.root.exists()


def test_an_empty_store_lists_nothing(store: LocalStore) -> None:
    store.root.mkdir()
    result = run("list")
    assert result.stdout == result.stderr == ""


def test_lists_sizes_and_shared_bytes(stored: LocalStore, dense: Path, moe: Path) -> None:
    (moe / "tokenizer.json").write_bytes((dense / "tokenizer.json").read_bytes())
    run("create", dense, "team/copy:v2")
    run("create", moe, "moe")
    models = {model["name"]: model for model in run_json("list")["models"]}
    assert list(models) == ["dense:latest", "moe:latest", "team/copy:v2"]
    dense_model = models["dense:latest"]
    assert dense_model["bytes"] == dense_model["shared_bytes"] == models["team/copy:v2"]["bytes"]
    assert dense_model["digest"] == models["team/copy:v2"]["digest"]
    assert models["moe:latest"]["shared_bytes"] == len(b"{}")
    assert models["moe:latest"]["bytes"] > 1000


def test_a_lost_name_is_reported(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    stored.manifest_path("dense").unlink()
    for patterns in ((), ("den*",)):
        error = run("list", *patterns, exit_code=4).stderr
        assert "the manifest of 'dense:latest' is lost; 'blobstore repair' restores it" in error
    assert "is lost" in str(run_json("list", exit_code=4)["unreadable"])
    assert "its manifest was lost" in run("list", "dense", exit_code=3).stderr
    assert run("list", "moe").stderr == ""


def test_a_namespace_alone_is_answered_with_its_glob(stored: LocalStore) -> None:
    run("cp", "dense", "team/dense")
    assert "'team/*' matches those" in run("list", "team", exit_code=3).stderr


def test_prints_aligned_rows(stored: LocalStore) -> None:
    path = stored.manifest_path(next(iter(stored.references())))
    os.utime(path, (0, path.stat().st_mtime - 3 * 86400 - 60))
    heading, row = run("list").stdout.splitlines()

    assert heading.split() == ["NAME", "ID", "SIZE", "SHARED", "MODIFIED"]
    digest = run_json("list")["models"][0]["digest"]
    assert row.split() == [
        "dense:latest",
        digest.removeprefix("sha256:")[:12],
        "2.1",
        "kB",
        "0",
        "B",
        "3",
        "days",
        "ago",
    ]
    assert row.index("3 days ago") == heading.index("MODIFIED")


def test_lists_unreadable_manifests_and_exits_with_4(stored: LocalStore) -> None:
    broken = stored.folder("manifests") / "registry.ollama.ai/library/broken/latest"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b'{"schemaVersion": 2, \x1b')
    result = run("list", exit_code=4)

    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:2]] == [["broken:latest", "UNREADABLE"]]
    assert lines[2].startswith("dense:latest ")
    assert result.stderr.startswith("blobstore: error: ")
    assert "broken/latest" in result.stderr
    models = run_json("list", exit_code=4)["models"]
    assert models[0]["error"]
    assert models[0]["bytes"] is None
    assert models[1]["error"] is None


def test_lists_a_model_of_ollama_without_changing_it(stored: LocalStore, dense: Path) -> None:
    manifest = add_gguf_model(stored, "llama3:8b")
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in stored.root.rglob("*")
        if path.is_file()
    }
    models = {model["name"]: model for model in run_json("list")["models"]}
    assert models["llama3:8b"]["bytes"] == sum(blob.size for blob in manifest.blobs)
    assert models["llama3:8b"]["shared_bytes"] == 0
    for command in (["show", "llama3:8b"], ["verify"], ["create", dense, "dense"]):
        run(*command)

    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}
    changed = [path for path in before if before[path] != after[path]]
    assert changed == []  # the name has this manifest already


def test_sorts(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    run("cp", "dense", "a")
    for age, name in enumerate(("moe", "a", "dense")):
        path = stored.folder("manifests") / "registry.ollama.ai/library" / name / "latest"
        os.utime(path, (0, 1_000_000 - age))

    def names(*options: str) -> list[str]:
        return [model["name"].partition(":")[0] for model in run_json("list", *options)["models"]]

    assert names() == names("--sort", "name") == ["a", "dense", "moe"]
    assert names("--sort", "size") == ["moe", "a", "dense"]
    assert names("--sort", "modified") == ["moe", "a", "dense"]
    os.utime(stored.folder("manifests") / "registry.ollama.ai/library/dense/latest")
    assert names("--sort", "modified") == ["dense", "moe", "a"]


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["dense"], ["dense:latest", "dense:v2"]),
        (["dense:v2"], ["dense:v2"]),
        (["*dense*"], ["dense:latest", "dense:v2", "team/dense:latest"]),
        (["team/*", "dense:v2"], ["dense:v2", "team/dense:latest"]),
        (["registry.ollama.ai/library/*"], ["dense:latest", "dense:v2"]),
    ],
)
def test_lists_what_patterns_match(
    stored: LocalStore, patterns: list[str], found: list[str]
) -> None:
    run("cp", "dense", "dense:v2")
    run("cp", "dense", "team/dense")

    assert [model["name"] for model in run_json("list", *patterns)["models"]] == found
    assert run("list", "--quiet", *patterns).stdout.splitlines() == found


def test_shows_what_named_models_share_only_if_asked(stored: LocalStore) -> None:
    run("cp", "dense", "dense:v2")
    run("cp", "dense", "a")
    heading, *rows = run("list", "dense", "a").stdout.splitlines()
    assert heading.split() == ["NAME", "ID", "SIZE", "MODIFIED"]
    assert [row.split()[0] for row in rows] == ["a:latest", "dense:latest", "dense:v2"]
    for options in (["--verbose"], ["--sort", "shared"]):
        heading, row = run("list", "a", *options).stdout.splitlines()
        assert "SHARED" in heading
        assert row.split()[2:6] == ["2.1", "kB", "2.1", "kB"]
    (model,) = run_json("list", "a")["models"]
    assert model["shared_bytes"] == model["bytes"]


def test_lists_a_model_by_the_start_of_its_id(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    digest = run_json("list", "dense")["models"][0]["digest"].removeprefix("sha256:")

    assert run_json("list", digest[:12]) == run_json("list", "dense")


def test_a_pattern_that_matches_nothing_is_not_found(stored: LocalStore) -> None:
    assert "no model matches 'x*'" in run("list", "dense", "x*", exit_code=3).stderr


@pytest.mark.slow
def test_lists_what_it_can_if_a_folder_of_manifests_is_closed(
    closed: Path,
) -> None:
    found = json.loads(
        sandbox.call(lambda: run("list", "--json", exit_code=1).stdout, unprivileged=True)
    )
    text = sandbox.call(lambda: run("list", exit_code=1).output, unprivileged=True)
    missed = sandbox.call(lambda: run("list", "team/*", exit_code=1).output, unprivileged=True)
    error = f"cannot list '{closed}': Permission denied"
    assert [model["name"] for model in found["models"]] == ["open:latest"]
    assert found["unreadable"] == [error]
    assert "open:latest" in text
    assert f"blobstore: error: {error}\n" in text
    assert missed.endswith(f"blobstore: error: {error}\n")


def test_lists_no_more_models_than_asked_for(stored: LocalStore, moe: Path) -> None:
    run("create", moe, "moe")
    run("cp", "moe", "zoe")
    result = run("list", "--sort", "size", "--limit", "2")
    assert len(result.stdout.splitlines()) == 3
    assert result.stderr == "note: there are more models than the 2 listed\n"
    names = [model["name"] for model in run_json("list", "--limit", "2")["models"]]
    assert names == ["dense:latest", "moe:latest"]
    assert run("list", "--limit", "3").stderr == ""


@pytest.fixture
def many(stored: LocalStore, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """A store of six models, where three are many and two are printed at once. Returns what is read and printed."""
    for name in "abc":
        run("cp", "dense", f"x/{name}")
    run("cp", "dense", "x/longer-than-others")
    run("cp", "dense", "z")
    monkeypatch.setattr(listing, "_MANY", 3)
    monkeypatch.setattr(output, "BATCH", 2)
    events: list[object] = []
    read, show = Catalog._read, output._print

    def read_noted(catalog: Catalog, paths: Iterable[str]) -> None:
        events.extend(paths := list(paths))
        read(catalog, paths)

    def show_noted(text: str) -> None:
        events.append(None)
        show(text)

    monkeypatch.setattr(Catalog, "_read", read_noted)
    monkeypatch.setattr(output, "_print", show_noted)
    return events


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--json",)])
def test_many_models_are_printed_while_others_are_read(
    many: list[object], options: tuple[str, ...]
) -> None:
    run("list", *options)
    printed = [number for number, event in enumerate(many) if event is None]
    # One more is read, to know whether there are more.
    assert printed[:3] == [3, 5, 8]
    assert len(many) - many.count(None) == 6


def test_a_limit_reads_no_more_models(many: list[object]) -> None:
    result = run("list", "--limit", "1")
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["NAME", "dense:latest"]
    assert result.stderr == "note: there are more models than the 1 listed\n"
    assert len(many) == 3


def test_what_many_models_share_is_read_if_asked_for(many: list[object]) -> None:
    rows = run("list").stdout.splitlines()
    assert "SHARED" not in rows[0]
    assert [row.split()[0] for row in rows[1:]] == [
        "dense:latest",
        "z:latest",
        "x/a:latest",
        "x/b:latest",
        "x/c:latest",
        "x/longer-than-others:latest",
    ]
    assert {one["shared_bytes"] for one in run_json("list")["models"]} == {None}
    assert "SHARED" in run("list", "--verbose").stdout
    shared = [one["shared_bytes"] for one in run_json("list", "--sort", "shared")["models"]]
    assert shared == [run_json("list", "z")["models"][0]["bytes"]] * 6


def test_a_pattern_that_matches_none_of_many_is_reported_after_the_others(
    many: list[object],
) -> None:
    result = run("list", "x/*", "absent*", exit_code=3)
    assert len(result.stdout.splitlines()) == 5
    assert "no model matches 'absent*'" in result.stderr
    assert len(run_json("list", "x/*", "absent*", exit_code=3)["models"]) == 4
    assert run("list", "absent*", exit_code=3).stdout == ""


@pytest.fixture
def steps(store: LocalStore) -> LocalStore:
    """Models with a loss, and one without any metric."""
    for name, metrics in (
        ("run:1", {"loss": 2.5, "accuracy": 0.1}),
        ("run:2", {"loss": 1.25, "accuracy": 0.3}),
        ("run:3", {"loss": 1.75}),
    ):
        tensors = {"w": np.full(3, metrics["loss"])}
        blobstore.save(tensors, name, files={"metrics.json": metrics}, store=store)
    blobstore.save({"w": np.zeros(3)}, "other", store=store)
    return store


@pytest.mark.parametrize(
    ("order", "names"),
    [
        ("loss", ["run:2", "run:3", "run:1", "other:latest"]),
        ("-loss", ["run:1", "run:3", "run:2", "other:latest"]),
        ("-accuracy", ["run:2", "run:1", "other:latest", "run:3"]),
    ],
)
def test_sorts_by_a_metric(steps: LocalStore, order: str, names: list[str]) -> None:
    assert run("list", "--sort", order, "-q").stdout.split() == names
    heading, first, *_ = run("list", "--sort", order).stdout.splitlines()
    assert heading.split()[-1] == order.removeprefix("-").upper()
    assert first.split()[0] == names[0]
    models = run_json("list", "--sort", order, "--limit", "1")["models"]
    assert [model["name"] for model in models] == names[:1]
    assert models[0]["metrics"]["loss"] in (1.25, 2.5)


def test_an_unknown_metric_lists_those_that_there_are(steps: LocalStore) -> None:
    result = run("list", "--sort", "perplexity", exit_code=2)
    assert "no model here has a metric 'perplexity'" in result.stderr
    assert "'accuracy'" in result.stderr
    assert "'loss'" in result.stderr
    assert "there are no metrics" in run("list", "other", "--sort", "loss", exit_code=2).stderr


def test_what_is_not_a_finite_number_is_no_metric(store: LocalStore) -> None:
    text = b'{"loss":1,"name":"x","flag":true,"list":[1],"low":null}'
    blobstore.save({"w": np.zeros(1)}, "a", files={"metrics.json": text}, store=store)
    blobstore.save(
        {"w": np.zeros(1)}, "b", files={"metrics.json": b'{"loss":1%d}' % 10**400}, store=store
    )
    blobstore.save({"w": np.zeros(1)}, "c", files={"metrics.json": b'{"loss":NaN}'}, store=store)
    found = [model["metrics"] for model in run_json("list")["models"]]
    assert found == [{"loss": 1}, {}, {}]
