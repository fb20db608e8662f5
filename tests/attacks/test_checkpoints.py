"""Hostile and borderline checkpoint files: each is read or refused as its verdict demands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import (
    FOLDER,
    GOOD,
    Reader,
    mapping,
    pickled,
    tensor,
    tensors,
    text,
    zip_file,
)
from tests.support.folders import contents
from tests.unit.cli.running import run_forked

CASES = json.loads((FOLDER / "index.json").read_bytes())
CODE = [case for case in CASES if case["canary"]]
DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
UNREADABLE = {"complex128"}
"""Types that the safetensors format lacks."""


def title(case: dict[str, Any]) -> str:
    return f"{case['id']}: {case['what']}"


def expected(case: dict[str, Any]) -> dict[str, list[object]]:
    return {
        ".".join(map(str, tensor["path"])) if tensor["path"] else "tensor": [
            DTYPES[tensor["dtype"]],
            tensor["shape"],
            tensor["sha256"],
        ]
        for tensor in case["tensors"]
        if tensor["dtype"] not in UNREADABLE
    }


def test_every_file_is_listed_with_a_verdict() -> None:
    assert {path.name for path in FOLDER.glob("*.[pb]*")} == {case["file"] for case in CASES}
    assert {case["expect"] for case in CASES} == {"load", "either", "reject"}
    assert len(CODE) > 10


@pytest.mark.parametrize("case", CASES, ids=title)
def test_reads_the_right_tensors_or_refuses(case: dict[str, Any], reader: Reader) -> None:
    outcome = reader.read(FOLDER / case["file"])
    assert not outcome.error
    if outcome.refusal:
        assert case["expect"] != "load"
        assert outcome.refusal.startswith(f"'{FOLDER / case['file']}'")
        assert outcome.refusal.isprintable()
        assert len(outcome.refusal) < 1000
        return
    assert case["expect"] != "reject"
    if case["tensors"] is not None:
        assert outcome.tensors == expected(case)
        kinds = {tensor["dtype"] for tensor in case["tensors"]} & UNREADABLE
        assert set(outcome.unreadable) == kinds


@pytest.mark.parametrize("case", CASES, ids=title)
def test_inspects_without_running_code(case: dict[str, Any], reader: Reader) -> None:
    path = FOLDER / case["file"]
    outcome, read = reader.read(path, inspect=True), reader.read(path)
    assert not outcome.error
    # Inspection reads no tensor data, so it checks no checksums of it.
    # Advice how to import the file is left out, too.
    assert bool(outcome.refusal) == bool(read.refusal)
    assert (read.refusal or "").startswith(outcome.refusal or "")
    assert (read.refusal or "").removeprefix(outcome.refusal or "")[:2] in ("", "; ")
    assert outcome.unreadable == read.unreadable


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("rce_exec.pt", "builtins.exec"),
        ("rce_os_system.pt", "posix.system"),
        ("rce_inst.pt", "builtins.exec"),
        ("rce_legacy_ver.pt", "builtins.exec"),
        ("ok_zip_state.pt", "torch.FloatStorage"),
    ],
)
def test_inspection_lists_globals(file: str, name: str, reader: Reader) -> None:
    assert name in reader.read(FOLDER / file, inspect=True).globals


def run_by_pickle(path: Path, canary: Path, code: str) -> None:
    """Load a checkpoint with a reader that trusts it."""
    subprocess.run(
        [sys.executable, "-c", code, path],
        env={**os.environ, "PTH_CANARY": str(canary)},
        capture_output=True,
        check=False,
        timeout=240,
    )


PICKLE_LOAD = """
import pickle, sys, zipfile
class Trusting(pickle.Unpickler):
    def persistent_load(self, identifier):
        return None
    def find_class(self, module, name):
        if module.startswith(("torch", "collections")):
            return lambda *arguments: None
        return super().find_class(module, name)
archive = zipfile.ZipFile(sys.argv[1])
Trusting(archive.open("archive/data.pkl")).load()
"""


@pytest.mark.parametrize("name", ["rce_exec", "rce_eval", "rce_os_system", "rce_timeit"])
def test_the_canary_fires_if_the_code_runs(name: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    run_by_pickle(FOLDER / f"{name}.pt", canary, PICKLE_LOAD)
    assert name in canary.read_text()


def test_the_reader_detects_a_fired_canary(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        run_by_pickle(FOLDER / "rce_exec.pt", reader.canary, PICKLE_LOAD)
        with pytest.raises(AssertionError, match="has run code"):
            reader.read(FOLDER / "ok_unicode.pt")


def test_the_reader_reports_other_exceptions_and_memory_errors(reader: Reader) -> None:
    assert "SourceNotFound" in reader.read(FOLDER / "missing.pt").error
    big = zip_file(pickled(mapping(w=tensor(), pad=text("a" * 2**24))))
    assert "MemoryError" in reader.take(big, memory=2**20).error
    assert reader.take(big).tensors == {"w": GOOD}


def test_the_reader_survives_a_process_that_ends_or_hangs(tmp_path: Path) -> None:
    with Reader(tmp_path) as reader:
        good = zip_file(pickled(mapping(w=tensor())))
        assert tensors(reader, good) == {"w": GOOD}
        assert reader._process
        reader._process.kill()
        reader._process.wait()
        assert reader.take(good).error.startswith("it ended")
        assert tensors(reader, good) == {"w": GOOD}
        reader._process.send_signal(signal.SIGSTOP)
        reader.timeout = 0.1
        assert reader.take(good).error.startswith("it hung")
        reader.timeout = Reader.timeout
        assert tensors(reader, good) == {"w": GOOD}


INTACT = {"rce_os_system.pt", "laughs_key.pt"}
"""Files that are as they were written, but are not read."""
SAMPLES = [
    "rce_os_system.pt",
    "rce_inst.pt",
    "rce_legacy_ver.pt",
    "rce_dup_pkl_first.pt",
    "laughs_key.pt",
    "st_size_over.pt",
    "leg_nostore.pt",
    "zip_cut_data.pt",
    "not_html.bin",
]


@pytest.mark.parametrize("name", SAMPLES)
def test_create_fails_with_one_line_and_leaves_the_store_unchanged(
    name: str, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    kept = FOLDER / "ok_unicode.pt"
    assert run_forked("create", kept, "kept", "--store", store).returncode == 0
    before = contents(tmp_path)
    canary = tmp_path / "canary"
    path = FOLDER / name
    done = run_forked("create", path, "m", "--store", store, PTH_CANARY=str(canary))
    assert done.returncode == (1 if name in INTACT else 4)
    assert not done.stdout
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"blobstore: error: '{path}': ")
    assert line.isprintable()
    assert contents(tmp_path) == before


def test_rce_files_contain_the_canary() -> None:
    for case in CODE:
        data = (FOLDER / case["file"]).read_bytes()
        if zipfile.is_zipfile(FOLDER / case["file"]):
            with zipfile.ZipFile(FOLDER / case["file"]) as archive:
                data = b"".join(archive.read(item) for item in archive.infolist())
        assert b"PTH_CANARY" in data, case["id"]
