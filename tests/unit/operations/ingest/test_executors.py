"""Engines, as seen by what submits tasks to them."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import Executor
from multiprocessing import resource_tracker

import pytest

from blobstore.core import interrupts
from blobstore.core.interrupts import Stopped
from blobstore.errors import MissingLibrary, UsageError
from blobstore.operations.ingest.executors import open_executor


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads", "threads:3", "processes:1"])
def test_an_engine_runs_functions(name: str) -> None:
    with open_executor(name) as make, make() as executor:
        assert isinstance(executor, Executor)
        assert executor.submit(os.path.basename, "a/b").result() == "b"


def looks_into_no_folder() -> bool:
    return sys.flags.safe_path


@pytest.mark.slow
def test_workers_find_no_modules_in_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    started: list[str] = []
    monkeypatch.setattr(
        resource_tracker,
        "ensure_running",
        lambda: started.append(os.environ.get("PYTHONSAFEPATH", "")),
    )
    with open_executor("processes:1") as make, make() as executor:
        assert executor.submit(looks_into_no_folder).result()
    assert started[0] == "1"
    assert "PYTHONSAFEPATH" not in os.environ


def test_imports_on_threads_stop_with_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts._State, "number", signal.SIGTERM)
    with open_executor("threads:1") as make, make() as executor:
        assert isinstance(executor.submit(interrupts.check).exception(), Stopped)


@pytest.mark.parametrize("name", ["", "thread", "threads:x", "processes:99999", "tcp://h:1"])
def test_a_name_of_no_engine_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"use threads\[:N\]"), open_executor(name):
        pass


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, scheme in (("distributed", "dask"), ("ray", "ray")):
        monkeypatch.setitem(sys.modules, library, None)
        with (
            pytest.raises(MissingLibrary, match=rf"pip install 'tensor-blobstore\[{scheme}\]'"),
            open_executor(f"{scheme}://127.0.0.1:1"),
        ):
            pass
