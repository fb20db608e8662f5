"""What every command promises: its JSON, its numbers, its errors, and the store that it uses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from blobstore.cli.main import program
from blobstore.core.digest import Digest
from tests.support.frozen import put
from tests.support.models import dense_tensors, write_folder
from tests.unit.cli.conftest import DENSE_CONFIG
from tests.unit.cli.running import run, run_json

# The arguments of each command. An @ marks a path in the prepared folder.
ARGUMENTS = {
    "create": ("@dense", "new"),
    "list": (),
    "show": ("dense",),
    "info": ("dense",),
    "find": ("merges.txt",),
    "cat": ("dense", "merges.txt"),
    "verify": (),
    "export": ("dense", "@out.bsar"),
    "link": ("dense", "@out.bsar"),
    "compare": ("dense", "same"),
    "inspect": ("@checkpoint.pt",),
    "convert": ("@checkpoint.pt", "@out.safetensors"),
    "rm": ("dense",),
    "cp": ("dense", "new"),
    "tag": ("dense", "new"),
    "mv": ("dense", "new"),
    "du": ("dense",),
    "diff": ("dense", "tuned"),
    "gc": ("--older-than=0s",),
    "repair": ("dense", "--from", "@dense"),
    "freeze": ("dense",),
    "thaw": ("cold",),
    "pack": ("dense", "@out.bsar"),
    "unpack": ("@models.bsar",),
    "completion": ("bash",),
}
STORELESS = ("convert", "inspect", "completion")
TEXT_ONLY = ("completion",)
# Commands that find a missing blob, and their exit code then.
DAMAGED = {"verify": 4, "repair": 0, "du": 4, "show": 4}
EXIT_CODES = {"diff": 1, **DAMAGED}
# The keys of the JSON of each command; "[]" stands for the items of a list.
JSON = {
    "create": "blobs blobs_repaired bytes_present bytes_written commit name notices repository seconds tensors",
    "list": """models models[].bytes models[].digest models[].error models[].frozen_bytes
        models[].modified models[].name models[].shared_bytes models[].source
        models[].source.commit models[].source.kind models[].source.options
        models[].source.repository""",
    "show": """architecture bytes faults faults[].bytes faults[].digest faults[].frozen
        faults[].media_type faults[].message faults[].name faults[].state format frozen_bytes
        model_type name parameters tensors tensors[].bits_per_weight tensors[].bytes
        tensors[].digest tensors[].dtype tensors[].layer tensors[].name tensors[].parameters
        tensors[].shape tensors[].type""",
    "info": """aliases architecture bases bytes digest disk disk.blobs disk.bytes disk.unique_bytes
        faults files format frozen_bytes license model_type modified name parameters source
        source.commit source.kind source.options source.repository tensors types types[].bytes
        types[].tensors types[].type""",
    "find": """errors places places[].bytes places[].digest places[].kind places[].model
        places[].name""",
    "cat": "bytes digest file name text",
    "verify": """blobs bytes_read faults faults[].blob faults[].layer faults[].message
        faults[].reference faults[].tensor models seconds""",
    "export": "bytes_written files folder name original seconds shards tensors",
    "link": """bytes_copied bytes_linked bytes_shared copied files folder links name notices
        seconds shared tensors""",
    "compare": """base name only_in_base only_in_name tensors tensors[].base_bits_per_weight
        tensors[].base_bytes tensors[].base_group_size tensors[].base_type
        tensors[].bits_per_weight tensors[].bytes tensors[].equal tensors[].group_size
        tensors[].max_abs_error tensors[].name tensors[].nonfinite tensors[].relative_error
        tensors[].shape tensors[].snr_db tensors[].type tensors[].worst_group total
        total.base_bits_per_weight total.bits_per_weight total.differing total.max_abs_error
        total.nonfinite total.relative_error total.snr_db total.tensors""",
    "inspect": """bytes file globals globals[].name globals[].offset globals[].pickle
        globals[].use kind notices parts parts[].path parts[].tensors refusal tensors
        tensors[].bytes tensors[].dtype tensors[].name tensors[].shape unreadable""",
    "convert": "bytes_written file notices tensors",
    "rm": """dry_run kept_as_bases kept_as_bases.blobs kept_as_bases.by kept_as_bases.bytes
        removed removed[].digest removed[].error removed[].name unreadable unreferenced
        unreferenced.blobs unreferenced.bytes""",
    "cp": "digest name replaced source",
    "tag": "digest name replaced source",
    "mv": "digest name replaced source",
    "du": """bases bases.bytes bases.files caches caches.bytes caches.files cold cold.bytes
        cold.files cold.hot_bytes cold.saved_bytes cold.saved_share errors foreign foreign.bytes
        foreign.files manifests manifests.bytes manifests.files models models[].blobs
        models[].bytes models[].error models[].faults models[].name models[].shared_bytes
        models[].unique_bytes quarantine quarantine.bytes quarantine.files store store.blobs
        store.bytes store.bytes_in_all store.bytes_without_sharing store.dedup_ratio
        store.models temporary temporary.bytes temporary.files together together.bytes
        together.unique_bytes unreferenced unreferenced.bytes unreferenced.files""",
    "diff": """a b files files[].a files[].a.bytes files[].a.digest files[].b files[].b.bytes
        files[].b.digest files[].change files[].media_type files[].name same tensors tensors[].a
        tensors[].a.bytes tensors[].a.digest tensors[].a.group_size tensors[].a.shape
        tensors[].a.type tensors[].b tensors[].b.bytes tensors[].b.digest tensors[].b.group_size
        tensors[].b.shape tensors[].b.type tensors[].change tensors[].differs_in tensors[].name
        tensors[].same_blob""",
    "gc": """blobs blobs[].bytes blobs[].path bytes dry_run folders kept kept.blobs kept.bytes
        kept_as_bases kept_as_bases.blobs kept_as_bases.bytes leftovers""",
    "repair": """blobs bytes_read dry_run faults manifests models repaired repaired[].blob
        repaired[].bytes repaired[].layer repaired[].quarantined seconds""",
    "freeze": """bases bases.dense:latest blobs blobs[].base blobs[].bytes blobs[].digest
        blobs[].name blobs[].outcome blobs[].stored_bytes bytes dry_run fallbacks faults names seconds
        stored_bytes""",
    "thaw": "blobs bytes faults names seconds stored_bytes",
    "pack": "blobs bytes deltas fallbacks file names seconds stored_bytes",
    "unpack": "blobs bytes_present bytes_written file names seconds",
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sources, an archive, and a store with several models."""
    folder = tmp_path_factory.mktemp("contract")
    files = {"config.json": DENSE_CONFIG, "merges.txt": b"a b\n"}
    tensors = dense_tensors()
    write_folder(folder / "dense", tensors, files=files)
    changed = {
        name: array + array if array.dtype.kind == "f" else array for name, array in tensors.items()
    }
    write_folder(folder / "tuned", changed, files={**files, "extra.json": b"{}"})
    torch.save(
        {"model": {"a": torch.ones(2, 3)}, "ema": {"e": torch.ones(1)}}, folder / "checkpoint.pt"
    )
    store = folder / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOBSTORE_HOME", str(store))
        for arguments in (
            ("create", folder / "dense", "dense"),
            ("create", folder / "dense", "same"),
            ("create", folder / "tuned", "tuned"),
            ("pack", "tuned", folder / "models.bsar"),
        ):
            run(*arguments)
        from blobstore.store.local import LocalStore

        put(LocalStore(store), "cold", {"x": 1})
        put(LocalStore(store), "gone", {"y": 2})
        run("freeze", "cold")
        run("rm", "gone")
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder, in which a command may change everything."""
    return shutil.copytree(prepared, tmp_path / "folder", symlinks=True)


def arguments_of(command: str, folder: Path) -> list[str]:
    return [
        command,
        *(str(folder / word[1:]) if word[0] == "@" else word for word in ARGUMENTS[command]),
    ]


def paths_in(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the path of every key in a JSON value, with ``[]`` for the items of a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            path = f"{prefix}.{key}".lstrip(".")
            yield path
            yield from paths_in(item, path)
    elif isinstance(value, list):
        for item in value:
            yield from paths_in(item, f"{prefix}[]")


def run_in(folder: Path, command: str) -> Any:
    if command in DAMAGED:
        (folder / "store" / "blobs" / Digest.of(b"a b\n").file_name).unlink()
    store = () if command in STORELESS else ("--store", folder / "store")
    return run_json(*arguments_of(command, folder), *store, exit_code=EXIT_CODES.get(command, 0))


def numbers_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key whose value counts bytes or blobs, with that value."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list):
            yield from numbers_in(item)
    if isinstance(value, dict):
        for key, item in value.items():
            if re.fullmatch(r"(.*_)?bytes(_.*)?|blobs|files|links|shards", key):
                yield key, item


def test_every_command_has_a_contract() -> None:
    assert list(ARGUMENTS) == program.list_commands(click.Context(program))
    assert [name for name in ARGUMENTS if name not in TEXT_ONLY] == list(JSON)


@pytest.mark.parametrize("command", JSON)
def test_json_has_the_documented_keys_and_exact_numbers(command: str, folder: Path) -> None:
    found = run_in(folder, command)
    assert sorted(set(paths_in(found))) == JSON[command].split()
    for key, value in numbers_in(found):
        assert value is None or isinstance(value, int | list), key
    assert found.get("seconds", 0) >= 0


@pytest.mark.parametrize("command", ARGUMENTS)
def test_text_is_plain_and_goes_to_standard_output(command: str, folder: Path) -> None:
    store = () if command in STORELESS else ("--store", folder / "store")
    result = run(*arguments_of(command, folder), *store, exit_code=1 if command == "diff" else 0)
    assert result.stdout.endswith("\n")
    assert "\x1b" not in result.output
    assert not result.stdout.startswith("{")
    assert all(line.startswith("note: ") for line in result.stderr.splitlines())


@pytest.mark.parametrize(
    "command", [name for name in ARGUMENTS if "dense" in ARGUMENTS[name]] + ["verify"]
)
def test_a_model_that_does_not_exist_is_not_found_and_near_names_are_suggested(
    command: str, folder: Path
) -> None:
    arguments = [
        "desne" if word == "dense" else word
        for word in arguments_of(command, folder) + ["desne"] * (command == "verify")
    ]
    result = run(*arguments, "--store", folder / "store", "--json", exit_code=3)
    error = json.loads(result.stdout)["error"]
    assert (error["kind"], error["exit_code"]) == ("ModelNotFound", 3)
    assert error["message"].endswith("; did you mean 'dense'?")
    assert result.stderr == f"blobstore: error: {error['message']}\n"
    assert not (folder / "out.bsar").exists()


@pytest.mark.parametrize(
    "command", [name for name in ARGUMENTS if "dense" in ARGUMENTS[name]] + ["verify"]
)
def test_a_model_can_be_named_by_a_glob_or_its_id(command: str, folder: Path) -> None:
    store = ("--store", folder / "store")
    run("rm", "same", *store)  # an ID must have one name
    plain = arguments_of(command, folder) + ["dense"] * (command == "verify")
    if command == "compare":
        plain[2] = "tuned"
    ident = run_json("list", "dense", *store)["models"][0]["digest"].removeprefix("sha256:")

    for text in ("dens[e]*", ident[:12], f"sha256:{ident[:7]}"):
        copy = shutil.copytree(folder, folder.with_name(text[:5]), symlinks=True)
        arguments = [text if word == "dense" else word for word in plain]
        arguments = [word.replace(str(folder), str(copy)) for word in arguments]
        run(*arguments, "--store", copy / "store", exit_code=1 if command == "diff" else 0)
