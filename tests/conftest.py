"""Settings of all tests."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings

from blobstore.objects.address import StoreAddress
from blobstore.objects.store import ObjectStore
from blobstore.store.local import LocalStore
from tests.faults.processes import place_in_memory, workspace
from tests.support.compilation import compile_in_turn
from tests.support.frameworks import skip_without_framework
from tests.support.markers import COLLECTED, mark
from tests.support.objects import ObjectServer, running_object_store

_Report = TypeVar("_Report", pytest.TestReport, pytest.CollectReport)

# A busy machine is no failure, and nothing here is about time. Examples are the same each time, so that no test
# fails by chance; the option --hypothesis-profile=random draws others, and tests/fuzz look for more. Tests draw a
# quarter of their cases, unless the option has "thorough"; tests.support.samples does so for other numbers.
settings.register_profile(
    "patient",
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
    derandomize=True,
)
settings.register_profile("random", settings.get_profile("patient"), derandomize=False)
settings.register_profile("thorough", settings.get_profile("patient"), max_examples=100)
settings.load_profile("patient")

# Each module and each test is compiled once, not by every worker and every process that tests start, also
# where the environment says otherwise, as that of many containers does.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Each worker and each process that tests start uses one thread for arithmetic: the models are small, and
# threads that wait for others use processors too. The libraries read this when they are imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests make 25,000 folders and write 19 GB, for which they would wait for a disk. They hold few GB at a time, as
# what a test that passed has written is removed.
if (place := place_in_memory(8 << 30)) is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", place)

# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that. The tests
# that interrupt some need it as users have it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes ``-n auto`` starts: half as many again as there are processors.

    Tests wait for servers, disks and other processes too.
    """
    return max(1, (os.cpu_count() or 1) * 3 // 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Keep what collection makes out of all later garbage collections, of which each would look at it.

    That is millions of objects: the tests, and the frameworks that they import.
    """
    gc.disable()
    try:
        compile_in_turn(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the markers that follow from what tests use, if tests are selected by markers.

    To find them takes two seconds, in each worker.
    """
    tests = [item for item in items if isinstance(item, pytest.Function)]
    if config.option.markexpr:
        for item in tests:
            mark(item)
    config.stash[COLLECTED] = tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip tests of absent frameworks; fail skipped tests where ``BLOBSTORE_TESTS_COMPLETE`` is set."""
    report = yield
    skip_without_framework(report, call.excinfo and call.excinfo.value)
    return _complete(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for modules."""
    report = yield
    # The report has the call that made it, which its type does not say.
    excinfo = getattr(report, "call").excinfo  # noqa: B009
    skip_without_framework(report, excinfo and excinfo.value)
    return _complete(report)


def _complete(report: _Report) -> _Report:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    needs_more = "CUDA" in reason or report.nodeid.startswith("tests/vllm/")  # run on their own
    if report.skipped and "BLOBSTORE_TESTS_COMPLETE" in os.environ and not needs_more:
        report.outcome = "failed"
        report.longrepr = f"{reason}, although BLOBSTORE_TESTS_COMPLETE is set"
    return report


@pytest.fixture(scope="session", autouse=True)
def _disks_are_not_waited_for() -> Iterator[None]:
    """Let ``os.fsync`` check its file and return, since only a power cut shows what else it does.

    Disks take milliseconds for each call, and the tests make more than 100,000. Programs that tests start
    do sync, and those below tests/faults look at their calls.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session")
def object_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with running_object_store(tmp_path_factory.mktemp("objects") / "weed") as server:
        yield server


@pytest.fixture
def object_address(
    object_server: ObjectServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> StoreAddress:
    for name, value in object_server.environment.items():
        monkeypatch.setenv(name, value)
    return StoreAddress("s3", object_server.bucket, f"tests/{abs(hash(request.node.nodeid))}")


@pytest.fixture
def objects(object_address: StoreAddress) -> ObjectStore:
    return ObjectStore(object_address)


@pytest.fixture
def disk_path() -> Iterator[Path]:
    """Return a new folder on a disk, for tests that need a page cache; ``tmp_path`` may be in memory."""
    with workspace(in_memory=False) as folder:
        yield folder


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """Return an empty store."""
    return LocalStore(tmp_path / "store")


@pytest.fixture
def other(tmp_path: Path) -> LocalStore:
    """Return another empty store."""
    return LocalStore(tmp_path / "other")
