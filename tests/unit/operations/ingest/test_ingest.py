"""Imports of many models by real engines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blobstore
from blobstore.errors import MissingLibrary, RemoteError, UsageError
from blobstore.objects.store import ObjectStore
from blobstore.operations.ingest import executors
from blobstore.operations.ingest.ingest import IngestedModel, Item, ingest, read_list
from blobstore.operations.ingest.task import Outcome, import_model
from blobstore.store.local import LocalStore
from tests.support.models import write_folder

COUNT = 6


@pytest.fixture
def items(tmp_path: Path) -> list[Item]:
    """Return models that share a tensor."""
    shared = np.arange(5000, dtype=np.float32)
    found = []
    for number in range(COUNT):
        own = np.full((100, 50), number, np.float32)
        folder = write_folder(tmp_path / f"model-{number}", {"shared": shared, "own": own})
        found.append(Item(str(folder), f"model-{number}:latest"))
    return found


@pytest.fixture
def expected(items: list[Item], tmp_path: Path) -> LocalStore:
    """Return a store into which the models were imported one after the other."""
    store = LocalStore(tmp_path / "expected")
    for item in items:
        blobstore.create(item.source, item.name, store=store)
    return store


def assert_equal(store: LocalStore, expected: LocalStore) -> None:
    assert list(store.references()) == list(expected.references())
    for reference in expected.references():
        assert store.read_manifest(reference) == expected.read_manifest(reference)
        for blob in expected.resolve(reference).blobs:
            store.check_digest(*blob.id)


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run a Dask scheduler with two workers, each in a process of its own."""
    pytest.importorskip("distributed", reason="it is in the test group, and in the extra [dask]")
    folder = tmp_path_factory.mktemp("dask")
    code = (
        "import sys, time\n"
        "from distributed import LocalCluster\n"
        "if __name__ == '__main__':\n"
        "    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None,\n"
        "                           host='127.0.0.1', local_directory=sys.argv[1])\n"
        "    print(cluster.scheduler_address, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    script = folder / "cluster.py"
    script.write_text(code)
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        try:
            yield address.replace("tcp://", "dask://")
        finally:
            process.kill()


def engine(request: pytest.FixtureRequest, name: str) -> str:
    return request.getfixturevalue("scheduler") if name == "dask" else name  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads:2", "processes:2", "dask"])
def test_every_engine_makes_the_store_that_single_imports_make(
    items: list[Item], expected: LocalStore, store: LocalStore, request: Any, name: str
) -> None:
    seen: list[tuple[int, int]] = []

    def note(_: IngestedModel, done: int, total: int) -> None:
        seen.append((done, total))

    found = ingest(items, store, executor=engine(request, name), on_done=note)
    assert [(model.source, model.name) for model in found] == items
    assert not any(model.error or model.is_present for model in found)
    assert seen == [(number, COUNT) for number in range(1, COUNT + 1)]
    assert_equal(store, expected)
    assert blobstore.gc(store=store, older_than=0).blobs == ()


def test_a_repeated_run_imports_what_is_missing(
    items: list[Item], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest(items[:4], store, executor="threads:2")
    tasks: list[str] = []

    def noted(source: str, name: str, *rest: Any) -> Outcome:
        tasks.append(name)
        return import_model(source, name, *rest)

    monkeypatch.setattr("blobstore.operations.ingest.ingest.import_model", noted)
    found = ingest(items, store, executor="threads:2")
    assert [model.is_present for model in found] == [True] * 4 + [False] * 2
    assert sorted(tasks) == [item.name for item in items[4:]]


def test_models_go_to_object_storage(
    items: list[Item], expected: LocalStore, objects: ObjectStore
) -> None:
    found = ingest(items, str(objects.address), executor="threads:2")
    assert not any(model.error for model in found)
    assert objects.references() == list(expected.references())
    for reference in objects.references():
        assert objects.read_manifest(reference) == expected.read_manifest(reference)
    again = ingest(items, str(objects.address), executor="threads:2")
    assert all(model.is_present for model in again)


def test_a_bad_source_is_tried_once_and_keeps_nothing_else_from_being_imported(
    items: list[Item], store: LocalStore, tmp_path: Path
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"\x00" * 100)
    listed = [Item(str(tmp_path / "broken"), "broken"), Item("/no/such", "absent"), *items]
    found = ingest(listed, store, executor="threads:2")
    assert [model.attempts for model in found] == [1] * len(listed)
    assert [bool(model.error) for model in found] == [True, True] + [False] * COUNT
    assert "/no/such" in found[1].error
    assert found[1].exit_code == 3


@pytest.mark.parametrize("name", ["processes:2", "dask"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_worker_that_is_killed_changes_nothing(
    items: list[Item],
    expected: LocalStore,
    store: LocalStore,
    request: Any,
    name: str,
    number: signal.Signals,
) -> None:
    killed: list[int] = []

    def kill(*_: object) -> None:
        if not killed:
            workers = [pid for pid in _workers() if pid != os.getpid()]
            killed.append(workers[-1])
            os.kill(workers[-1], number)

    found = ingest(items, store, executor=engine(request, name), on_done=kill)
    assert killed
    assert not any(model.error for model in found)
    assert_equal(store, expected)


_DIES = """
import os, pathlib, signal
import blobstore.store.leases as leases

create_file = leases.Lease.create_file

def create_and_die(lease, *shared):
    created = create_file(lease, *shared)
    left = pathlib.Path(__file__).with_name("deaths")
    count = int(left.read_text())
    if count:
        left.write_text(str(count - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return created

leases.Lease.create_file = create_and_die
"""


_POISON = """
import os, signal
import blobstore.operations.ingest.task as task

create = task.create

def create_or_die(source, *arguments, **options):
    if source.endswith("model-0"):
        os.kill(os.getpid(), signal.SIGKILL)
    return create(source, *arguments, **options)

task.create = create_or_die
"""


@pytest.fixture
def deaths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file with the number of new processes that are killed when they begin to write a blob."""
    folder = tmp_path / "hook"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_DIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *sys.path]))
    return folder / "deaths"


@pytest.mark.slow
def test_models_whose_workers_always_die_are_reported_and_leave_nothing_that_gc_does_not_remove(
    items: list[Item], expected: LocalStore, store: LocalStore, deaths: Path
) -> None:
    deaths.write_text("1000")
    found = ingest(items[:2], store, executor="processes:1", retries=1)
    assert [(model.attempts, model.kind, model.exit_code) for model in found] == [
        (2, "BlobstoreError", 1)
    ] * 2
    assert all(re.fullmatch(r"its worker died: [ -~]+", model.error) for model in found)
    assert list(store.references()) == []
    assert list(store.folder("blobs").iterdir()) == []
    assert list(store.folder("temporary").iterdir()) != []
    blobstore.gc(store=store, older_than=0)
    assert list(store.folder("temporary").iterdir()) == []
    assert list(store.folder("leases").iterdir()) == []
    deaths.write_text("0")
    assert not any(model.error for model in ingest(items, store, executor="processes:1"))
    assert_equal(store, expected)


@pytest.mark.slow
def test_a_model_that_always_kills_its_worker_does_not_keep_others_from_being_imported(
    items: list[Item], expected: LocalStore, store: LocalStore, deaths: Path
) -> None:
    hook = deaths.with_name("sitecustomize.py")
    hook.write_text(_POISON)
    found = ingest(items, store, executor="processes:2")
    assert [(model.attempts, bool(model.error)) for model in found] == [
        (4, True),
        *[(1, False)] * (COUNT - 1),
    ]
    blobstore.remove("model-0", store=expected)
    assert_equal(store, expected)


@pytest.mark.slow
def test_models_whose_workers_die_once_are_imported_by_others(
    items: list[Item], expected: LocalStore, store: LocalStore, deaths: Path
) -> None:
    deaths.write_text("2")
    found = ingest(items, store, executor="processes:1")
    assert not any(model.error for model in found)
    assert max(model.attempts for model in found) == 2
    assert_equal(store, expected)
    blobstore.gc(store=store, older_than=0)
    assert list(store.folder("temporary").iterdir()) == []


def _workers() -> list[int]:
    """Return the processes below this one that run Python workers."""
    out = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, check=True, text=True
    ).stdout
    rows = [line.split(None, 2) for line in out.splitlines()[1:]]
    below, found = {os.getpid()}, []
    for _ in range(5):
        below |= {int(pid) for pid, parent, _ in rows if int(parent) in below}
    for pid, _, arguments in rows:
        if int(pid) in below and "spawn_main" in arguments:
            found.append(int(pid))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["threads:1", "processes:1"])
def test_workers_wait_for_locks_as_long_as_the_store_says(
    items: list[Item], store: LocalStore, executor: str
) -> None:
    store.lock_timeout = 0
    with store.exclusive_lock():
        (model,) = ingest(
            items[:1], LocalStore(store.root, lock_timeout=0), executor=executor, retries=0
        )
    assert (model.kind, "exclusive lock" in model.error or "another process" in model.error) == (
        "StoreBusy",
        True,
    )


def test_an_engine_that_is_not_there_is_named(
    items: list[Item], store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "CONNECT_TIMEOUT", "1s")
    with pytest.raises(UsageError, match="no executor 'slurm': use threads"):
        ingest(items, store, executor="slurm")
    with pytest.raises(UsageError, match="at least one worker"):
        ingest(items, store, executor="threads:0")
    with pytest.raises((RemoteError, MissingLibrary), match=r"dask://127.0.0.1:1|distributed"):
        ingest(items, store, executor="dask://127.0.0.1:1")


def test_a_list_has_sources_and_names(tmp_path: Path) -> None:
    (tmp_path / "my model").mkdir()
    lines = [
        "# a comment\n",
        "\n",
        "org/name\n",
        f'"{tmp_path}/my model" mine:v1  # quoted\n',
        "hf://org/other@main\n",
    ]
    assert read_list(lines) == [
        Item("org/name", "org/name:latest"),
        Item(f"{tmp_path}/my model", "mine:v1"),
        Item("hf://org/other@main", "org/other:main"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a b c", "line 2: expected SOURCE \\[NAME\\], got 3 words"),
        ('"a', "line 2: No closing quotation"),
        ("org/name ../x", "line 2: "),
        (
            "other/name first",
            "line 2: 'other/name' and 'org/first' both have the name first:latest",
        ),
    ],
)
def test_a_bad_line_is_named(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_list(["org/first first\n", line])
