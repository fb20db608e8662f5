from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any
from tests.support.frozen import flip, forms_of, layer, layers, put, spoil_deltas, tuned, weights
from tests.support.models import add_blob, add_blobs, with_layers
from tests.unit.cli.running import interrupted, run, run_json


@pytest.fixture
def pair(store: LocalStore) -> LocalStore:
    """A store with two models that share a blob."""
    put(store, "a", {"x": 1, "y": 2})
    put(store, "b", {"x": 1, "z": 3})
    return store


def test_reports_the_frozen_blobs_and_the_kept_ones(pair: LocalStore) -> None:
    result = run("freeze", "a")
    assert result.stderr == ""
    first, second = result.stdout.splitlines()
    assert first.startswith("froze 1 blob of 1 model: 80.1 kB compressed to 5")
    assert "% less); " in first
    assert second == (
        "  kept 1 blob (80.1 kB) uncompressed: models that are not frozen need them, b:latest"
    )
    assert forms_of(pair, "a") == {"x": "hot", "y": "cold"}


def test_names_some_of_many_models_that_keep_blobs_uncompressed(pair: LocalStore) -> None:
    for number in range(3):
        run("cp", "b", f"copy{number}")
    result = run("freeze", "a")
    assert result.stdout.splitlines()[1].endswith(
        "need them, b:latest, copy0:latest, copy1:latest and 1 more"
    )
    assert run_json("freeze", "a", "b")["needed_by"] == [f"copy{it}:latest" for it in range(3)]


def test_says_why_a_gguf_model_is_not_compressed(store: LocalStore) -> None:
    gguf = Descriptor(media_types.MODEL, *add_blob(store, b"GGUF"))
    add_blobs(store, "gguf", {})
    store.names.publish(replace_any("gguf"), with_layers(store, store.resolve("gguf"), [gguf]))
    result = run("freeze", "gguf")
    assert result.stdout.splitlines()[1] == (
        "  these models have no tensors of their own: a GGUF file of Ollama is compressed once "
        "'blobstore create ollama://MODEL NAME' has imported it"
    )


def test_verbose_lists_what_became_of_each_blob(pair: LocalStore) -> None:
    table = run("-v", "freeze", "a").stdout.splitlines()
    assert table[3].startswith("froze 1 blob of 1 model")  # the totals come last
    assert [line.split()[:2] for line in table[:3]] == [
        ["BLOB", "OUTCOME"],
        ["x", "shared"],
        ["y", "frozen"],
    ]


def test_reports_blobs_that_were_already_frozen(pair: LocalStore) -> None:
    run("freeze", "a", "b")
    result = run("freeze", "a", "b")
    assert result.stdout.splitlines()[0].startswith("froze 0 blobs of 2 models: nothing to do; ")
    assert result.stdout.splitlines()[1] == "  3 blobs were already frozen"


def test_json_lists_every_blob(pair: LocalStore) -> None:
    found = run_json("freeze", "a", "b", "--level", "small")
    size = len(layer("x", weights(1)))
    assert found["names"] == ["a:latest", "b:latest"]
    assert (found["dry_run"], found["faults"], found["bases"]) == (False, [], {})
    assert found["fallbacks"] == 0
    assert found["bytes"] == 3 * size
    assert found["stored_bytes"] == sum(blob["stored_bytes"] for blob in found["blobs"])
    for blob in found["blobs"]:
        assert blob.keys() == {"digest", "name", "bytes", "stored_bytes", "outcome", "base"}
        assert (blob["bytes"], blob["outcome"], blob["base"]) == (size, "frozen", None)


def test_reports_deltas_that_could_not_be_verified(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1))})
    spoil_deltas(monkeypatch)
    result = run("freeze", "child", "--base", "base")
    assert result.stdout.splitlines()[1] == (
        "  1 blob compressed without a base: the base is damaged, "
        "or the delta could not be verified"
    )


def test_a_dry_run_estimates(pair: LocalStore) -> None:
    result = run("freeze", "a", "--dry-run")
    first, second = result.stdout.splitlines()
    assert first.startswith("would freeze 1 blob of 1 model: 80.1 kB would compress to about 5")
    assert second.startswith("  would keep 1 blob (80.1 kB) uncompressed: models")
    dry = run_json("freeze", "a", "--dry-run")
    real = run_json("freeze", "a")
    assert dry["dry_run"] is True
    assert abs(dry["stored_bytes"] - real["stored_bytes"]) < 1000
    assert [blob["outcome"] for blob in dry["blobs"]] == ["frozen", "shared"][::-1]


def test_keep_hot_keeps_the_uncompressed_files(pair: LocalStore) -> None:
    run("freeze", "a", "--keep-hot")
    assert forms_of(pair, "a") == {"x": "both", "y": "both"}


def test_older_than_freezes_only_old_models(pair: LocalStore) -> None:
    then = time.time() - 40 * 86400
    for path in (
        str(pair.manifest_path(Reference.parse("a"))),
        *(pair.blob_path(item.digest) for item in layers(pair, "a").values()),
    ):
        os.utime(path, (then, then))
    assert run_json("freeze", "--older-than", "30d", "--dry-run")["names"] == ["a:latest"]
    assert run_json("freeze", "b", "--older-than", "30d")["names"] == []
    assert "GGUF" not in run("freeze", "b", "--older-than", "30d").stdout
    run("freeze", exit_code=2)
    run("freeze", "--older-than", "30", exit_code=2)


def test_reports_the_base_model_and_what_keeps_it(store: LocalStore) -> None:
    put(store, "base", {"x": 1})
    put(store, "stays", {"z": 9})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1))})
    run("cp", "child", "twin")
    assert "as deltas" not in run("freeze", "child").stdout  # nothing was compressed
    run("rm", "twin")
    result = run("freeze", "child")
    line = r"  child:latest: 80.1 kB compressed to .*B, as deltas against base:latest, whose blobs are kept"
    assert re.search(line, result.stdout)
    result = run("rm", "base")
    assert result.stdout.splitlines()[1:] == [
        '"blobstore gc" has nothing to free',
        (
            "80.1 kB in 1 blob is still needed as bases of frozen blobs of child:latest; "
            '"blobstore rm" or "blobstore thaw" of these models frees it'
        ),
    ]
    found = run_json("gc", "--older-than", "0s")
    assert found["blobs"] == []
    assert found["kept_as_bases"] == {"blobs": 1, "bytes": 80_072}
    assert found["kept"] == {"blobs": 0, "bytes": 0}
    result = run("gc")
    assert result.stdout.splitlines()[-1] == (
        "kept 1 blob, 80.1 kB: bases of frozen blobs; "
        '"blobstore rm" or "blobstore thaw" of their models frees that'
    )
    run("verify")


def test_a_base_can_be_given_or_turned_off(store: LocalStore) -> None:
    put(store, "base", {"x": 1})
    add_blobs(store, "child", {"x": layer("x", tuned(10, 1))})
    named = run_json("freeze", "child", "--base", "base", "--dry-run")
    assert named["bases"] == {"child:latest": "base:latest"}
    assert run_json("freeze", "child", "--no-base", "--dry-run")["bases"] == {}
    run("freeze", "child", "--no-base", "--base", "base", exit_code=2)
    run("freeze", "child", "--base", "none", exit_code=3)


def test_damage_is_reported_with_exit_code_4(pair: LocalStore) -> None:
    flip(pair.blob_path(layers(pair, "a")["y"].digest))
    assert "blobstore: error: layer 'y': blob" in run("freeze", "a", exit_code=4).stderr
    assert run_json("freeze", "a", exit_code=4)["faults"]


def test_other_commands_work_on_frozen_models(pair: LocalStore, tmp_path: Path) -> None:
    before = {
        what: run(*what).stdout for what in (("show", "a", "--manifest"), ("compare", "a", "b"))
    }
    run("export", "a", tmp_path / "hot")
    run("freeze", "a", "b")
    assert {what: run(*what).stdout for what in before} == before
    run("export", "a", tmp_path / "cold")
    for name in ("model.safetensors",):
        assert (tmp_path / "cold" / name).read_bytes() == (tmp_path / "hot" / name).read_bytes()
    run("diff", "a", "b", exit_code=1)
    run("diff", "a", "a")
    run("cp", "a", "c")
    run("mv", "c", "d")
    run("verify", "--quick")
    run("verify")
    run("rm", "d")


def test_du_reports_the_saved_space(pair: LocalStore) -> None:
    run("freeze", "a", "b")
    found = run_json("du")
    cold = sum(path.stat().st_size for path in pair.folder("cold").iterdir())
    whole = 3 * len(layer("x", weights(1)))
    assert found["cold"]["files"] == 3
    assert found["cold"]["bytes"] == cold
    assert found["cold"]["saved_bytes"] == whole - cold
    assert 0.3 < found["cold"]["saved_share"] < 0.4
    assert found["caches"]["bytes"] < 5000
    assert found["models"][0]["bytes"] < 0.7 * whole
    assert found["models"][0]["faults"] == []
    (line,) = (line for line in run("du").stdout.splitlines() if "saved" in line)
    assert line.startswith("  177 B hot, 160 kB")
    assert " cold in 3 blobs; " in line


def test_du_and_verify_report_damage(pair: LocalStore) -> None:
    run("freeze", "a", "b")
    flip(pair.cold_path(layers(pair, "a")["y"].digest), -1)
    assert "model a:latest: cold blob" in run("du", exit_code=4).stderr
    for options in ((), ("--quick",)):
        found = run_json("verify", *options, exit_code=4)
        ((where, tensor),) = {(item["layer"], item["tensor"]) for item in found["faults"]}
        assert where == "y"
    assert tensor in {"y", ""}


def test_verify_finds_a_flipped_bit(pair: LocalStore) -> None:
    run("freeze", "a")
    flip(pair.cold_path(layers(pair, "a")["y"].digest), 30_000)
    run("verify", "--quick")
    (fault,) = run_json("verify", exit_code=4)["faults"]
    assert (fault["model"] if "model" in fault else fault["reference"]) == "a:latest"
    assert (fault["layer"], fault["tensor"]) == ("y", "y")


def test_verify_checks_both_forms_of_a_blob(pair: LocalStore) -> None:
    run("freeze", "a", "--keep-hot")
    flip(pair.cold_path(layers(pair, "a")["y"].digest), 30_000)
    (fault,) = run_json("verify", exit_code=4)["faults"]
    assert "cold blob" in fault["message"]


def test_an_interrupt_is_exit_code_130(store: LocalStore) -> None:
    put(store, "a", {f"x{number}": number for number in range(40)})
    status, errors = interrupted(store.folder("temporary"), "freeze", "a", "-j", "1")
    assert status == 130, errors
    assert "interrupted" in errors
    assert list(store.folder("temporary").iterdir()) == []
    assert "neither" not in forms_of(store, "a").values()


def test_list_and_show_mark_frozen_blobs(pair: LocalStore) -> None:
    assert "FROZEN" not in run("list").stdout
    run("freeze", "a")
    size = len(layer("x", weights(1)))
    assert [model["frozen_bytes"] for model in run_json("list")["models"]] == [size, 0]
    heading, frozen, other = run("list").stdout.splitlines()
    assert heading.split()[3:5] == ["SHARED", "FROZEN"]
    end = heading.index("FROZEN") + len("FROZEN")
    assert frozen[:end].endswith("  80.1 kB")
    assert other[:end].endswith("  0 B")
    assert run("show", "a").stdout.splitlines()[-1].endswith(", 1 of 2 blobs frozen")
    assert run("show", "a", "y").stdout.splitlines()[-1].endswith(" bits per weight, frozen")
    assert "frozen" not in run("show", "b").stdout
    shown = run_json("show", "a", "--layers")
    assert shown["frozen_bytes"] == size
    assert [blob["name"] for blob in shown["layers"] if blob["frozen"]] == ["y"]
