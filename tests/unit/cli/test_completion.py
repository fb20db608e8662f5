from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from blobstore.core.digest import Digest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from blobstore.store.used_remotes import remember_remotes
from tests.support.models import write_folder
from tests.unit.cli.running import LAUNCHER, environment, run
from tests.unit.cli.test_main import HEAVY, modules_after

# Bash completes with what the function leaves in COMPREPLY, and with paths if compopt says so.
ASK = """
blobstore() { "$PYTHON" -c "$LAUNCHER" "$@"; }
eval "$SCRIPT"
compopt() { COMPREPLY+=("(paths)"); }
COMP_LINE=$LINE COMP_POINT=${#LINE}
_blobstore_completion blobstore
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(line: str) -> list[str]:
    """Return the words that bash offers at the end of a line."""
    variables = {"PYTHON": sys.executable, "LAUNCHER": LAUNCHER, "LINE": line}
    script = run("completion", "bash").stdout
    done = subprocess.run(
        ["bash", "-c", ASK],
        capture_output=True,
        check=True,
        env=environment(SCRIPT=script, LC_ALL="C.UTF-8", **variables),
        text=True,
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("blobstore sho", ["show"]),
        ("blobstore show d", ["dense", "dense:v2"]),
        ("blobstore show dense:", ["latest", "v2"]),
        ("blobstore rm dense te", ["team/model"]),
        ("blobstore rm x", []),
        ("blobstore show dense path", ["path/to/\u00e9\\<\\&\\>"]),
        ("blobstore show dense path/to/\u00e9\\<", ["path/to/\u00e9\\<\\&\\>"]),
        ("blobstore show dense 'path", ["path/to/\u00e9<&>"]),
        ("blobstore list --sort s", ["size", "shared"]),
        ("blobstore create x y --quantize int", ["int4", "int8"]),
        ("blobstore bench dense --device n", ["none"]),
        ("blobstore create ./mod", ["(paths)"]),
        ("blobstore export dense ", ["(paths)"]),
        ("blobstore list --store ", ["(paths)"]),
        ("blobstore repair --from ", ["(paths)"]),
        ("blobstore inspect ", ["(paths)"]),
    ],
)
def test_bash_completes(stored: LocalStore, line: str, words: list[str]) -> None:
    run("cp", "dense", "dense:v2")
    run("cp", "dense", "team/model")

    assert completed(line) == words


def test_names_that_could_end_a_quoted_word_are_not_completed_in_it(
    store: LocalStore, tmp_path: Path
) -> None:
    names = ["x'y", 'x"y', "x$(y)", "x`y`", "x\\y", "x!y", "xz"]
    run("create", write_folder(tmp_path / "odd", {name: np.zeros(1) for name in names}), "odd")

    assert completed("blobstore show odd 'x") == ["xz"]
    assert completed('blobstore show odd "x') == ["xz"]
    assert len(completed("blobstore show odd x")) == len(names)


def test_completes_names_of_the_store_that_the_line_names(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BLOBSTORE_HOME", str(tmp_path / "other"))

    assert completed("blobstore rm d") == []
    assert completed(f"blobstore --store {stored.root} rm d") == ["dense"]
    assert completed(f"blobstore rm --store {stored.root} d") == ["dense"]


def test_completes_the_remotes_that_were_used(stored: LocalStore, tmp_path: Path) -> None:
    place = f"file://{tmp_path}/remote"
    run("push", "dense", place)
    run("push", "dense", f"{place}/team:v1")

    paths = [
        f"//{tmp_path}/remote/team:v1",
        f"//{tmp_path}/remote",
        f"//{tmp_path}/remote/dense:latest",
    ]
    assert completed("blobstore pull f") == [f"file:{path}" for path in paths]
    assert completed("blobstore push dense file:") == paths
    assert completed("blobstore list file://") == paths
    assert completed(f"blobstore show {place}/t") == [f"//{tmp_path}/remote/team:v1"]
    assert completed("blobstore verify --remote f") == [f"file:{path}" for path in paths]


def test_completes_addresses_of_registries_with_and_without_the_scheme(
    stored: LocalStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"auths": {"other.example/v1": {}, "a.example": {}}}')
    remember_remotes(stored, "oci://r.example/team/x:v1", "oci://r.example/team/x")

    assert completed("blobstore pull o") == ["oci://r.example/team/x:v1", "oci://r.example/team/x"]
    assert completed("blobstore pull r") == ["r.example/team/x:v1", "r.example/team/x"]
    assert completed("blobstore show r.ex") == ["(paths)"]
    assert completed("blobstore login ") == ["other.example", "a.example", "r.example"]
    assert completed("blobstore logout o") == ["other.example"]


def test_completes_former_ids_and_tensors(stored: LocalStore, moe: Path) -> None:
    former = stored.read_manifest(Reference.parse("dense"))
    run("create", moe, "dense")

    assert completed("blobstore restore d") == ["dense"]
    assert completed("blobstore restore dense ") == [Digest.of(former).short]
    run("cp", "dense", "copy")
    run("restore", "dense")
    assert completed("blobstore find model.e") == ["model.embed_tokens.weight"]
    assert completed("blobstore find *") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_script_of_click(shell: str) -> None:
    assert f"_BLOBSTORE_COMPLETE={shell}_complete" in run("completion", shell).stdout


def test_completing_a_name_loads_nothing_heavy(stored: LocalStore) -> None:
    loaded = modules_after(
        "import os, sys; os.environ |= {'_BLOBSTORE_COMPLETE': 'bash_complete', "
        "'COMP_WORDS': 'blobstore show dense m', 'COMP_CWORD': '3'}; "
        "from blobstore.cli.main import program; program([], prog_name='blobstore')"
    )
    assert "blobstore" in loaded
    assert not loaded & HEAVY
