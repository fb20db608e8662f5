"""The engines that run imports: each is a :class:`concurrent.futures.Executor`."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.core.libraries import optional_libraries
from blobstore.errors import RemoteError, UsageError
from blobstore.operations.ingest.task import run_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import BaseContext

CONNECT_TIMEOUT = "10s"
_SIGNALS_OF_TERMINALS = (signal.SIGINT, signal.SIGHUP)
_SAFE_PATH = "PYTHONSAFEPATH"
_LOCAL = re.compile(r"(threads|processes)(?::(\d{1,4}))?")


@contextlib.contextmanager
def open_executor(name: str) -> Iterator[Callable[[], Executor]]:
    """Yield a function that makes an executor, again if the one before has lost a worker.

    Args:
        name: ``threads[:N]``, ``processes[:N]``, ``dask://host:port`` or ``ray://host:port``. There is one
            thread or process per processor by default.

    Raises:
        MissingLibrary: the engine is not installed.
        RemoteError: the cluster cannot be reached.
        UsageError: there is no such engine.
    """
    if match := _LOCAL.fullmatch(name):
        count = int(match[2]) if match[2] else os.cpu_count() or 1
        if not count:
            raise UsageError("an executor needs at least one worker")
        # Forked processes would share threads and connections that they do not have.
        context = multiprocessing.get_context("spawn")
        is_threads = match[1] == "threads"
        yield (
            lambda: (
                ThreadPoolExecutor(count, initializer=interrupts.obey)
                if is_threads
                else _processes(count, context)
            )
        )
    elif name.startswith("dask://"):
        with _dask_client(name) as client:
            yield lambda: _DaskExecutor(client)
    elif name.startswith("ray://"):
        with _ray(name):
            yield _RayExecutor
    else:
        raise UsageError(
            f"no executor {quote(name)}: use threads[:N], processes[:N], dask://HOST:PORT or "
            "ray://HOST:PORT"
        )


def _processes(count: int, context: BaseContext) -> Executor:
    with _safe_path():
        resource_tracker.ensure_running()
        return _Processes(count, mp_context=context)


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    """Let a Python that is started in the block look for modules in no working directory, which may have a model.

    A worker gets the places of modules from this process, but only once it runs.
    """
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]


class _Processes(ProcessPoolExecutor):
    """Worker processes that stop as a program does: see :mod:`blobstore.core.interrupts`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task. Signals of the terminal do not reach the workers: this process asks them to end."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_OF_TERMINALS)
        try:
            with _safe_path():
                return super().submit(run_task, fn, *args, **kwargs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks, or stop them: a signal to this process alone does not reach the workers."""
        if cancel_futures:
            for process in list((self._processes or {}).values()):
                process.terminate()
        super().shutdown(wait, cancel_futures=cancel_futures)


@contextlib.contextmanager
def _dask_client(name: str) -> Iterator[Any]:
    with optional_libraries():
        import distributed
    try:
        connect: Any = distributed.Client
        client = connect("tcp://" + name.removeprefix("dask://"), timeout=CONNECT_TIMEOUT)
    except (OSError, ValueError) as error:
        raise RemoteError(f"no Dask scheduler answers at {quote(name)}: {error}") from None
    with client:
        yield client


@contextlib.contextmanager
def _ray(name: str) -> Iterator[None]:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with optional_libraries():
        import ray
    address = name.removeprefix("ray://")
    try:
        ray.init(
            address="auto" if address in {"", "auto"} else name,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise RemoteError(f"no Ray cluster answers at {quote(name)}: {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


class _DaskExecutor(Executor):
    """Runs functions as tasks of Dask, which runs them again if a worker dies."""

    def __init__(self, client: Any) -> None:
        self._inner = client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task."""
        future: Future[Any] = self._inner.submit(fn, *args, **kwargs)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for the tasks, or cancel them."""
        self._inner.shutdown(wait=wait and not cancel_futures)


class _RayExecutor(Executor):
    """Runs functions as tasks of Ray."""

    def __init__(self) -> None:
        self._references: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start a task; Ray runs it again if its worker dies."""
        import ray

        reference = ray.remote(fn).remote(*args, **kwargs)
        self._references.append(reference)
        future: Future[Any] = reference.future()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Cancel the tasks that have not ended, if that is asked for."""
        import ray

        del wait
        for reference in self._references if cancel_futures else ():
            ray.cancel(reference, force=False)
