"""Writes the blobs that one rank owns, and sends other ranks what they need of it.

Parts of blobs that no rank has changed since the step before do not travel. Each rank remembers a digest of its parts
of each blob, and the owner the blob. If all ranks find theirs again, so does the owner. What is remembered counts only
if the coordinator's last step has made it: a rank that failed, or has started since, remembers nothing. A blob that
has changed once is not looked at again, so a training that changes everything hashes its parts in two steps only.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, NamedTuple, cast

from blobstore.core.workers import WorkerPool
from blobstore.integrations.torch_checkpoint.exchange import exchange, kept
from blobstore.integrations.torch_checkpoint.layout import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import TypeVar

    import torch.distributed as dist

    from blobstore.integrations.torch_checkpoint.layout import RankState, RankTask
    from blobstore.operations.create.places import StepBlobs
    from blobstore.planning.grouping import BlobPlan
    from blobstore.quantization.recipes import Recipe
    from blobstore.store.ingest import Ingest, Ingested

    Item = TypeVar("Item")
    Result = TypeVar("Result")


class Remembered(NamedTuple):
    """What a rank remembers of a step."""

    ingest: str = ""
    """The name of its import; empty if nothing is remembered."""
    parts: Mapping[str, bytes | None] = {}
    """Digests of this rank's parts by blob; None if the blob has changed before."""
    blobs: Mapping[str, Ingested] = {}
    """The blobs that this rank owns."""


class Rank:
    """One rank that writes a step."""

    def __init__(
        self,
        task: RankTask,
        state: RankState,
        ingest: StepBlobs,
        group: dist.ProcessGroup | None,
        jobs: int | None,
    ) -> None:
        self._task = task
        self._state = state
        self._ingest = ingest
        self._group = group
        self._jobs = jobs or max(1, (os.cpu_count() or 1) // len(task.gathered))
        self._every = [blob for its in task.gathered for blob in its]
        self._parts: dict[str, bytes | None] = {}
        self._files: dict[str, str] = {}
        """The shared files of blobs."""
        self.added: dict[str, Ingested] = {}

    @property
    def memory(self) -> Remembered:
        """What to remember of the step, when all ranks have written."""
        return Remembered(self._task.ingest, self._parts, self.added)

    def _run(self, items: Sequence[Item], work: Callable[[Item], Result]) -> list[Result]:
        return WorkerPool(self._jobs, None, 0).run(items, work)

    def look(self, before: Remembered) -> list[bool]:
        """Return of each gathered blob whether it is unchanged, as far as this rank knows.

        Then, of each, whether this rank can write its parts into a file of all ranks.
        """
        task, state, ingest = self._task, self._state, self._ingest
        own = {blob.name for blob in task.gathered[task.rank]}

        def digest(blob: BlobPlan) -> bytes | None:
            return state.digest(blob) if before.parts.get(blob.name, b"") is not None else None

        def is_same(blob: BlobPlan, found: bytes | None) -> bool:
            if found is None or before.parts.get(blob.name) != found:
                return False
            known = before.blobs.get(blob.name) if blob.name in own else None
            item = known and ingest.find(known.digest, known.size)
            if item is not None:
                self.added[blob.name] = item
            return item is not None or blob.name not in own

        digests = self._run(self._every, digest)
        self._parts = {blob.name: it for blob, it in zip(self._every, digests, strict=True)}
        is_here = ingest.machine_folder == task.folder != ""
        return [
            *map(is_same, self._every, digests),
            *(is_here and state.is_rows(blob) for blob in self._every),
        ]

    def gather(
        self, agreed: Sequence[bool], before: Remembered, errors: list[Exception], window: int
    ) -> None:
        """Bring the parts of blobs to their owners, or into files, but for those of blobs that have not changed.

        ``agreed`` is where all ranks have said yes to :meth:`look`.
        """
        task, state = self._task, self._state
        are_same, are_rows = agreed[: len(self._every)], agreed[len(self._every) :]
        same = {blob.name for blob, is_same in zip(self._every, are_same, strict=True) if is_same}
        rows = [
            blob
            for blob, is_rows in zip(self._every, are_rows, strict=True)
            if is_rows and blob.name not in same
        ]
        self._files = {blob.name: f"rows.{index}" for index, blob in enumerate(rows)}
        self.added = {name: item for name, item in self.added.items() if name in same}
        self._parts |= dict.fromkeys(before.parts.keys() & self._parts.keys() - same)

        def write(blob: BlobPlan) -> None:
            shared = cast("Ingest", self._ingest)
            shared.write_parts(self._files[blob.name], state.parts(blob))

        with kept(errors):
            self._run(rows, write)
        streams = [
            [blob for blob in its if blob.name not in same and blob.name not in self._files]
            for its in task.gathered
        ]
        incoming = exchange(
            self._group,
            [
                [(spec.name, shape_of(spec)) for blob in its for spec in blob.stored]
                for its in streams
            ],
            [state.boxes if rank == task.rank else its for rank, its in enumerate(task.chunks)],
            state.bytes_of,
            errors,
            window=window,
        )
        with kept(errors):
            for blob in streams[task.rank]:
                buffers = functools.partial(_stream, blob, incoming)
                self.added[blob.name] = self._ingest.add(blob.size, buffers, once=True)
        for _ in incoming:  # other ranks wait for the parts of this one
            pass

    def add(self) -> None:
        """Add the blobs whose bytes are here, when all ranks have written their parts of files; make all durable."""
        task, state = self._task, self._state

        def read(recipe: Recipe) -> Iterator[bytes]:
            return state.read(recipe.spec.name)

        def add(blob: BlobPlan) -> None:
            if blob.name in self._files:
                shared, name = cast("Ingest", self._ingest), self._files[blob.name]
                item = shared.add_parts(name, blob.size, blob.header)
            else:
                item = self._ingest.add(blob.size, lambda: blob.buffers(read))
            self.added[blob.name] = item

        own = [blob for blob in task.gathered[task.rank] if blob.name in self._files]
        self._run([*own, *task.local], add)
        self._ingest.sync()


def _stream(blob: BlobPlan, incoming: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a blob, whose tensors come from several ranks."""
    yield blob.header
    left = blob.size - len(blob.header)
    while left:
        piece = next(incoming)
        left -= len(piece)
        yield piece
