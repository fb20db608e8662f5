"""Writes the blobs that one rank owns, and sends other ranks what they need of it.

Parts of blobs that no rank has changed since the step before do not travel. Each rank remembers a digest of its parts
of each blob, and the owner the blob. If all ranks find theirs again, so does the owner. What is remembered counts only
if the coordinator's last step has made it: a rank that failed, or has started since, remembers nothing. A blob that
has changed once is not looked at again, so a training that changes everything hashes its parts in two steps only.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

from blobstore.core.workers import WorkerPool
from blobstore.integrations.torch_checkpoint.exchange import exchange, kept
from blobstore.integrations.torch_checkpoint.layout import shape_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


@dataclass(kw_only=True)
class Rank:
    """One rank that writes a step."""

    task: RankTask
    state: RankState
    ingest: StepBlobs
    group: dist.ProcessGroup | None
    jobs: int
    before: Remembered
    """What is known of the last step."""
    parts: dict[str, bytes | None] = field(default_factory=dict)
    """See :attr:`Remembered.parts`."""
    files: dict[str, str] = field(default_factory=dict)
    """The shared files of blobs."""
    added: dict[str, Ingested] = field(default_factory=dict)

    def _run(self, items: Iterable[Item], work: Callable[[Item], Result]) -> list[Result]:
        return WorkerPool(self.jobs, None, 0).run(items, work)

    def look(self) -> list[bool]:
        """Return of each gathered blob whether it is unchanged, as far as this rank knows.

        Then, of each, whether this rank can write its parts into a file of all ranks.
        """
        every, before, state = self.task.every, self.before, self.state
        own = {blob.name for blob in self.task.own}

        def digest(blob: BlobPlan) -> bytes | None:
            return state.digest(blob) if before.parts.get(blob.name, b"") is not None else None

        def is_same(blob: BlobPlan) -> bool:
            found = self.parts[blob.name]
            if found is None or before.parts.get(blob.name) != found:
                return False
            known = before.blobs.get(blob.name) if blob.name in own else None
            item = known and self.ingest.find(known.digest, known.size)
            if item is not None:
                self.added[blob.name] = item
            return item is not None or blob.name not in own

        digests = self._run(every, digest)
        self.parts = {blob.name: found for blob, found in zip(every, digests, strict=True)}
        is_here = self.ingest.machine_folder == self.task.folder != ""
        return [*map(is_same, every), *(is_here and state.is_rows(blob) for blob in every)]

    def gather(self, agreed: Sequence[bool], errors: list[Exception], window: int) -> None:
        """Bring the parts of blobs to their owners, or into files, but for those of blobs that have not changed.

        ``agreed`` is where all ranks have said yes to :meth:`look`.
        """
        task, state = self.task, self.state
        names = [blob.name for blob in task.every]
        same = set(itertools.compress(names, agreed))
        rows = set(itertools.compress(names, agreed[len(names) :])) - same
        self.files = {name: f"rows.{index}" for index, name in enumerate(names) if name in rows}
        self.added = {name: item for name, item in self.added.items() if name in same}
        self.parts |= dict.fromkeys(self.before.parts.keys() & self.parts.keys() - same)

        def write(blob: BlobPlan) -> None:
            shared = cast("Ingest", self.ingest)
            shared.write_parts(self.files[blob.name], state.parts(blob))

        with kept(errors):
            self._run((blob for blob in task.every if blob.name in rows), write)
        streams = [[blob for blob in its if blob.name not in same | rows] for its in task.gathered]
        incoming = exchange(
            self.group,
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
                self.added[blob.name] = self.ingest.add(blob.size, buffers, once=True)
        for _ in incoming:  # other ranks wait for the parts of this one
            pass

    def add(self) -> None:
        """Add the blobs whose bytes are here, when all ranks have written their parts of files; make all durable."""

        def read(recipe: Recipe) -> Iterator[bytes]:
            return self.state.read(recipe.spec.name)

        def add(blob: BlobPlan) -> None:
            if blob.name in self.files:
                shared, name = cast("Ingest", self.ingest), self.files[blob.name]
                item = shared.add_parts(name, blob.size, blob.header)
            else:
                item = self.ingest.add(blob.size, lambda: blob.buffers(read))
            self.added[blob.name] = item

        own = (blob for blob in self.task.own if blob.name in self.files)
        self._run([*own, *self.task.local], add)
        self.ingest.sync()


def _stream(blob: BlobPlan, incoming: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a blob, whose tensors come from several ranks."""
    yield blob.header
    left = blob.size - len(blob.header)
    while left:
        piece = next(incoming)
        left -= len(piece)
        yield piece
