"""The table of what is counted: it is complete, and one more, or forty more, are treated as it says."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import blobstore
from blobstore.core import capacity
from blobstore.core.capacity import Capacity
from blobstore.core.workers import WorkerPool

PACKAGES = ("serve", "remotes", "registry", "http")
COUNTED = {
    *("ThreadPoolExecutor", "WorkerPool", "Semaphore", "BoundedSemaphore"),
    *("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "Condition"),
}
# The tests that ask for one more and for forty more, some of them with clients that leave.
TESTS = {
    "CONNECTIONS": "tests/attacks/test_serve.py",
    "HANDSHAKES": "tests/attacks/test_tls.py",
    **dict.fromkeys(("ARRIVALS", "PATIENT"), "tests/unit/serve/test_pull_through.py"),
    "ARRIVING_FILES": "tests/unit/serve/test_cache_limit.py",
    "DECODED": "tests/unit/serve/test_body.py",
    "TEXTS": "tests/unit/serve/test_text_memory.py",
    **dict.fromkeys(("JOBS", "ANSWER", "SEND", "VERIFY"), "tests/unit/serve/test_shared_work.py"),
    **dict.fromkeys(
        ("PREPARE", "HASH", "FETCH", "ASK", "TRY", "WATCH", "LIST", "LIST_ALL"),
        "tests/unit/serve/test_shared_work.py",
    ),
    **dict.fromkeys(("TRIAL", "TOKEN"), "tests/unit/http/test_tokens.py"),
}
THREADS = sorted(set(capacity.ALL) - set(TESTS))


def calls() -> Iterator[tuple[str, str, str]]:
    """Yield the module, the name and the arguments of each call that makes something of a limited number."""
    folder = Path(blobstore.__path__[0])
    for package in PACKAGES:
        for path in sorted((folder / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    name = ast.unparse(node.func).rpartition(".")[2]
                    yield f"{package}/{path.name}", name, ast.unparse(node)


def test_each_pool_and_semaphore_has_a_row() -> None:
    sizes = {
        "WorkerPool(None, None, 0)": "a thread for each processor, for work that waits for nobody",
        "WorkerPool(None, None, size)": "the same",
    }
    found = {
        f"{module}: {call}"
        for module, name, call in calls()
        if name in COUNTED and call not in sizes and "STREAMS" not in call
    }
    assert found == {
        "remotes/download.py: threading.Condition()",  # threads without a task wait for one
        "serve/decoded_pieces.py: asyncio.Semaphore(_DECODED)",
        "serve/peers.py: WorkerPool(min(len(asked), _PROBES), None, 0)",
        "serve/find_upstream.py: WorkerPool(min(len(peers), capacity.PROBES.most) or 1, None, 0)",
        "serve/arrivals.py: WorkerPool(_DOWNLOADS, None, 0)",
        "serve/pull_through.py: threading.Semaphore(_MAX_PATIENT)",
    }


def test_each_number_of_a_pool_is_that_of_its_row() -> None:
    folder = Path(blobstore.__path__[0])
    text = "".join(
        path.read_text(encoding="utf-8")
        for package in PACKAGES
        for path in (folder / package).rglob("*.py")
    )
    unused = [
        name
        for name in capacity.ALL
        if f"capacity.{name}" not in text and f"import {name}\n" not in text
    ]
    assert unused == ["TRIAL", "TOKEN"]  # locks


@pytest.mark.parametrize("name", sorted(TESTS))
def test_each_row_is_tested(name: str) -> None:
    text = (Path(__file__).parents[3] / TESTS[name]).read_text(encoding="utf-8")
    assert f"capacity.{name}" in text or "capacity.ALL" in text


@pytest.mark.parametrize("name", THREADS)
@pytest.mark.parametrize("more", [1, 40])
def test_jobs_beyond_the_threads_wait_for_their_turn(name: str, more: int) -> None:
    row: Capacity = capacity.ALL[name]
    assert row.when_full == "queued"
    running = threading.Semaphore(row.most)

    def job(number: int) -> int:
        assert running.acquire(blocking=False), "more threads than the row says"
        try:
            return number
        finally:
            running.release()

    items = range(row.most + more)
    assert WorkerPool(row.most, None, 0).run(items, job) == list(items)
    with row.executor() as threads:
        assert list(threads.map(job, items)) == list(items)


def test_the_rules_of_rows_are_those_that_exist() -> None:
    assert {row.when_full for row in capacity.ALL.values()} == {"refused", "queued", "yields"}
    assert all(row.most > 0 and row.what for row in capacity.ALL.values())
