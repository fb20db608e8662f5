"""What every operation promises: its arguments, its errors for them, and its progress reports."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blobstore.errors import ModelNotFound, StoreBusy, UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.archive.pack import pack_models
from blobstore.operations.archive.unpack import check_archive, unpack_archive
from blobstore.operations.compare.compare import compare_models
from blobstore.operations.compare.diff import diff_models
from blobstore.operations.create.create import create
from blobstore.operations.describe.disk_usage import measure_usage
from blobstore.operations.describe.list import list_models
from blobstore.operations.describe.show import describe_model
from blobstore.operations.export.convert import convert_checkpoint
from blobstore.operations.export.export import export_model
from blobstore.operations.export.link import link_model
from blobstore.operations.freeze.freeze import freeze_models
from blobstore.operations.freeze.thaw import thaw_models
from blobstore.operations.maintenance.gc import collect_garbage
from blobstore.operations.maintenance.names import copy_model, remove_models, rename_model
from blobstore.operations.maintenance.repair import repair_models
from blobstore.operations.maintenance.verify import verify_models
from blobstore.operations.open import open_model
from blobstore.store import locks
from blobstore.store.local import LocalStore
from tests.support.frozen import put
from tests.support.models import dense_tensors, write_folder

# The arguments of each operation. An @ marks a path in the prepared folder.
ARGUMENTS: dict[Callable[..., Any], tuple[Any, ...]] = {
    create: ("@source", "new"),
    open_model: ("model",),
    describe_model: ("model",),
    list_models: (["model"],),
    verify_models: (["model"],),
    repair_models: (["model"], "@source"),
    measure_usage: (["model"],),
    collect_garbage: (),
    copy_model: ("model", "new"),
    rename_model: ("model", "new"),
    remove_models: (["model"],),
    export_model: ("model", "@out"),
    link_model: ("model", "@out"),
    convert_checkpoint: ("@source", "@out.safetensors"),
    compare_models: ("model", "changed"),
    diff_models: ("model", "changed"),
    freeze_models: (["hot"],),
    thaw_models: (["cold"],),
    pack_models: (["model"], "@out.bsar"),
    unpack_archive: ("@models.bsar",),
    check_archive: ("@models.bsar",),
}
OPTIONS: dict[Callable[..., Any], dict[str, Any]] = {open_model: {"verify": "digest"}}
NAMES = ("model", "hot", "cold")
# Operations that give names, or remove names or files. The others wait for nobody who only reads.
NEED_EXCLUSIVE_LOCK = {
    create,
    unpack_archive,
    collect_garbage,
    copy_model,
    rename_model,
    remove_models,
    freeze_models,
    thaw_models,
}


def accepting(parameter: str) -> list[Callable[..., Any]]:
    return [call for call in ARGUMENTS if parameter in inspect.signature(call).parameters]


def names_model(call: Callable[..., Any]) -> bool:
    given = ARGUMENTS[call][:1]
    return given[0] in NAMES or isinstance(given[0], list) if given else False


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contract")
    tensors = dense_tensors()
    write_folder(folder / "source", tensors)
    write_folder(
        folder / "other",
        {name: array[::-1].copy() if array.ndim else array for name, array in tensors.items()},
    )
    store = LocalStore(folder / "store")
    create(folder / "source", "model", store=store)
    create(folder / "other", "changed", store=store)
    origin = LocalStore(folder / "origin")
    put(origin, "packed", {"z": 3})
    pack_models(["packed"], folder / "models.bsar", store=origin)
    put(store, "hot", {"x": 1})
    put(store, "cold", {"y": 2})
    freeze_models(["cold"], store=store)
    return folder


@pytest.fixture
def folder(prepared: Path, tmp_path: Path) -> Path:
    """A copy of the prepared folder, in which an operation may change everything."""
    return shutil.copytree(prepared, tmp_path / "folder", symlinks=True)


def run(
    call: Callable[..., Any],
    folder: Path,
    change: Callable[[str], Any] = str,
    *,
    as_list: Callable[[list[Any]], Any] = list,
    **more: Any,
) -> Any:
    """Call an operation with its arguments.

    ``change`` replaces each name of a model, and ``as_list`` each list of names.
    """

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return as_list([argument(item) for item in value])
        if value[0] == "@":
            return folder / value[1:]
        return change(value) if value in NAMES else value

    if call in accepting("store"):
        more.setdefault("store", folder / "store")
    result = call(*map(argument, ARGUMENTS[call]), **OPTIONS.get(call, {}), **more)
    if call is open_model:
        result.close()
    return result


def everything(folder: Path) -> dict[Path, bytes | None]:
    """Return all that is in a folder, with the bytes of files."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("call", accepting("store"))
@pytest.mark.parametrize("kind", [str, LocalStore])
def test_accepts_a_store_or_its_path(call: Callable[..., Any], kind: Any, folder: Path) -> None:
    run(call, folder, store=kind(folder / "store"))


@pytest.mark.parametrize("call", accepting("store"))
def test_accepts_references_for_names(call: Callable[..., Any], folder: Path) -> None:
    run(call, folder, Reference.parse)


@pytest.mark.parametrize("call", accepting("references"))
@pytest.mark.parametrize("kind", [str, Reference.parse])
def test_one_name_is_not_the_list_of_its_letters(
    call: Callable[..., Any], kind: Any, folder: Path
) -> None:
    if ARGUMENTS[call][0][0] == "@":
        run(call, folder, references=kind("packed"))
        return
    create(folder / "source", "m", store=folder / "store")
    run(call, folder, kind, as_list=lambda names: names[0])
    assert "m:latest" in map(str, LocalStore(folder / "store").references())


@pytest.mark.parametrize("call", ARGUMENTS)
def test_expands_the_home_folder(
    call: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "here").mkdir()
    monkeypatch.chdir(folder / "here")
    monkeypatch.setenv("HOME", str(folder))
    run(call, Path("~"))
    assert not list((folder / "here").iterdir())


@pytest.mark.parametrize("call", ARGUMENTS)
def test_a_result_is_shown_in_a_few_lines(call: Callable[..., Any], folder: Path) -> None:
    shown = repr(run(call, folder))
    assert len(shown) < 1200, shown  # the models have dozens of tensors


@pytest.mark.parametrize("call", [call for call in ARGUMENTS if names_model(call)])
def test_a_model_that_does_not_exist_is_not_found(call: Callable[..., Any], folder: Path) -> None:
    with pytest.raises(ModelNotFound, match="'absent:latest'"):
        run(call, folder, lambda _: "absent")
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize("call", accepting("jobs"))
@pytest.mark.parametrize("jobs", [0, -1])
def test_rejects_fewer_than_one_job(call: Callable[..., Any], jobs: int, folder: Path) -> None:
    with pytest.raises(UsageError, match=f"jobs must be at least 1, got {jobs}"):
        run(call, folder, jobs=jobs)
    assert not list(folder.glob("out*"))


@pytest.mark.parametrize("call", accepting("jobs"))
def test_works_on_one_thread(call: Callable[..., Any], folder: Path) -> None:
    run(call, folder, jobs=1)


# Links have no bytes to copy.
@pytest.mark.parametrize("call", [call for call in accepting("progress") if call is not link_model])
def test_reports_progress_up_to_the_total(call: Callable[..., Any], folder: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    run(call, folder, progress=lambda *report: reports.append(report))
    done = [count for _, count, _ in reports]
    assert reports
    assert done == sorted(done)
    totals = [total for _, _, total in reports]
    known = [total for total in totals if total]
    assert totals == [0] * (len(totals) - len(known)) + known  # 0 as long as it is not known
    assert set(known) == {done[-1]}


@pytest.mark.parametrize("call", accepting("dry_run"))
def test_a_dry_run_writes_nothing(call: Callable[..., Any], folder: Path) -> None:
    before = everything(folder)
    run(call, folder, dry_run=True)
    assert everything(folder) == before


@pytest.mark.parametrize("call", accepting("store"))
def test_a_lock_that_another_holds_is_waited_for(
    call: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "_IMPORT_TIMEOUT", 0.01)  # imports wait longer than others
    store = LocalStore(folder / "store", lock_timeout=0.01)
    names = list(store.references())
    files = everything(store.folder("blobs")).items()
    with LocalStore(folder / "store")._locks.shared():
        if call not in NEED_EXCLUSIVE_LOCK:
            run(call, folder, store=store)
            return
        with pytest.raises(StoreBusy):
            run(call, folder, store=store)
    assert list(store.references()) == names
    assert files <= everything(store.folder("blobs")).items()
    run(call, folder, store=store)
