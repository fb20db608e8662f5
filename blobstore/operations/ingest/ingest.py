"""The operation ``ingest``: imports the models of a list, each as one task of an engine.

Tasks are idempotent, and the target alone says which of them are done: a repeated command skips the names that
the target has. A task that was lost with its worker, or that failed for a reason that may pass, is tried again.
"""

from __future__ import annotations

import shlex
from collections import deque
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core import interrupts
from blobstore.core.escape import escape, quote
from blobstore.core.public_calls import check_options
from blobstore.errors import UsageError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import CreateOptions
from blobstore.operations.create.source_names import source_name
from blobstore.operations.ingest.executors import open_executor
from blobstore.operations.ingest.task import Outcome, find_present, import_model
from blobstore.remotes.addresses import is_in_objects
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

RETRIES = 3


class Item(NamedTuple):
    """A line of a list."""

    source: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestedModel:
    """The outcome for one model of :func:`ingest`."""

    source: str
    name: str
    is_present: bool
    """Whether the target had the name already, so that nothing was done."""
    blobs: int
    bytes_written: int
    """Bytes of blobs that the target did not have."""
    attempts: int
    seconds: float
    """Of the last attempt."""
    error: str
    """Why it failed; empty if it did not."""
    kind: str
    """The type of that error."""
    exit_code: int


def read_list(lines: Iterable[str]) -> list[Item]:
    """Return the models of a list: ``SOURCE [NAME]`` on each line, quoted as in a shell; ``#`` begins a comment.

    Without NAME, a model gets the name that ``create`` gives it.

    Raises:
        UsageError: a line is not of that form, a name is not valid, or two models have one name.
    """
    found: dict[str, Item] = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UsageError(f"line {number}: {error}") from None
        if not words:
            continue
        if len(words) > 2:
            raise UsageError(
                f"line {number}: expected SOURCE [NAME], got {len(words)} words; quote a source "
                "with spaces"
            )
        source = words[0]
        try:
            reference = (
                Reference.parse(words[1])
                if len(words) > 1
                else source_name(source, DEFAULT_OPTIONS)
            )
        except UsageError as error:
            raise UsageError(f"line {number}: {error}") from None
        other = found.setdefault(str(reference).lower(), Item(source, str(reference)))
        if other.source != source:
            raise UsageError(
                f"line {number}: {quote(source)} and {quote(other.source)} both have the name "
                f"{reference}; give one of them another"
            )
    return list(found.values())


def ingest(
    items: Iterable[tuple[str, str]],
    target: StoreLike = None,
    *,
    executor: str = "processes",
    retries: int = RETRIES,
    on_done: Callable[[IngestedModel, int, int], object] = lambda *_: None,
    **options: Any,
) -> list[IngestedModel]:
    """Import many models into one store, and return what became of each, in their order.

    A model that fails does not keep the others from being imported. Nothing but the target is needed to
    continue after an interrupt.

    Args:
        items: source and name of each model; see :func:`read_list`.
        target: a store, or its folder, which all workers reach by the same path; or the address of a store in
            object storage, such as ``s3://bucket/prefix``. A worker then imports into a temporary folder first.
            By default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        executor: ``threads[:N]``, ``processes[:N]``, ``dask://host:port`` or ``ray://host:port``.
        retries: how often a task is tried again after a failure that may pass.
        on_done: called with each model when it has ended, the number of those that have, and of all.
        options: as for :func:`blobstore.create`, for all models; ``jobs`` is 1 by default.

    Returns:
        what became of each model, in the order of the items; a failure is part of the list.

    Raises:
        MissingLibrary: the engine is not installed.
        RemoteError: the cluster cannot be reached.
        StoreError: the store cannot be used.
        UsageError: an argument is invalid.
    """
    check_options(ingest, options, CreateOptions)
    if retries < 0:
        raise UsageError(f"retries must be 0 or more, got {retries}")
    wanted = [Item(*item) for item in items]
    place: LocalStore | str
    if isinstance(target, str) and is_in_objects(target):
        place = target
    else:
        place = LocalStore.of(target)  # its workers wait as long for its locks
        place.check_root()
    options.setdefault("jobs", 1)
    done: dict[int, IngestedModel] = {}
    with open_executor(executor) as make:
        run = _Run(make, wanted, place, options, retries)
        for index, model in run.results():
            done[index] = model
            on_done(model, len(done), len(wanted))
    return [done[index] for index in range(len(wanted))]


class _Run:
    """Tasks that run, and those that are tried again."""

    def __init__(
        self,
        make: Callable[[], Executor],
        items: Sequence[Item],
        target: LocalStore | str,
        options: dict[str, Any],
        retries: int,
    ) -> None:
        self._make = make
        self._items = items
        self._target = target
        self._options = options
        self._retries = retries
        self._attempts = [0] * len(items)
        self._waiting = deque(range(len(items)))
        self._suspects: deque[int] = deque()
        """Models of which one may have killed a worker. Each is tried again alone."""
        self._alone: Future[Outcome] | None = None
        self._running: dict[Future[Outcome], tuple[int, Executor]] = {}

    def results(self) -> Iterator[tuple[int, IngestedModel]]:
        """Yield the index and the result of each model as it ends."""
        yield from self._present()
        executor = self._make()
        try:
            while self._waiting or self._suspects or self._running:
                self._submit_some(executor)
                interrupts.check()
                ended, _ = wait(self._running, interrupts.POLL, FIRST_COMPLETED)
                is_broken = False
                for future in sorted(ended, key=lambda one: self._running[one][0]):
                    index, runner = self._running.pop(future)
                    outcome, lost = _outcome(future)
                    if lost:
                        interrupts.check()  # if that ended the worker, this process has it too
                    is_broken |= lost and runner is executor
                    if lost and future is not self._alone:
                        self._attempts[index] -= 1
                        self._suspects.append(index)
                    elif not outcome.is_final and self._attempts[index] <= self._retries:
                        (self._suspects if lost else self._waiting).append(index)
                    else:
                        yield index, self._result(index, outcome)
                if is_broken:
                    executor.shutdown(cancel_futures=True)
                    executor = self._make()
        finally:
            executor.shutdown(cancel_futures=True)

    def _present(self) -> Iterator[tuple[int, IngestedModel]]:
        """Yield the models whose names the store has, without asking a worker for each."""
        waiting, self._waiting = self._waiting, deque()
        for index in waiting:
            outcome = find_present(self._items[index].name, self._target)
            if outcome is None:
                self._waiting.append(index)
            else:
                yield index, self._result(index, outcome)

    def _submit_some(self, executor: Executor) -> None:
        if self._suspects and not self._running:
            self._alone = self._submit(executor, self._suspects.popleft())
        if self._suspects or self._alone in self._running:
            return
        # All tasks that a pool of processes has are lost with one of them.
        workers = getattr(executor, "_max_workers", len(self._items))
        while self._waiting and len(self._running) < 2 * workers:
            self._submit(executor, self._waiting.popleft())

    def _submit(self, executor: Executor, index: int) -> Future[Outcome]:
        item = self._items[index]
        self._attempts[index] += 1
        try:
            future: Future[Outcome] = executor.submit(
                import_model, item.source, item.name, self._target, self._options
            )
        except BrokenExecutor as error:  # since the last look
            future = Future()
            future.set_exception(error)
        self._running[future] = (index, executor)
        return future

    def _result(self, index: int, outcome: Outcome) -> IngestedModel:
        values = outcome._asdict()
        del values["is_final"]
        item = self._items[index]
        return IngestedModel(
            source=item.source, name=item.name, attempts=self._attempts[index], **values
        )


def _outcome(future: Future[Outcome]) -> tuple[Outcome, bool]:
    """Return the outcome of a task, and whether the executor has lost its workers."""
    try:
        return Outcome(*future.result()), False
    except (BrokenExecutor, CancelledError) as error:
        return _lost(f"its worker died: {escape(str(error), 200)}"), isinstance(
            error, BrokenExecutor
        )
    except Exception as error:  # noqa: BLE001 - engines have errors of their own
        return _lost(f"{type(error).__name__}: {escape(str(error), 200)}"), False


def _lost(why: str) -> Outcome:
    return Outcome(
        is_present=False,
        blobs=0,
        bytes_written=0,
        seconds=0.0,
        error=why,
        kind="BlobstoreError",
        exit_code=1,
        is_final=False,
    )
