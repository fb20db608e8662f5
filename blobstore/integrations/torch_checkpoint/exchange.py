"""Brings the parts of tensors from all ranks to their owners, a window at a time.

An owner hashes and writes one window before it gets the next one: its memory is two windows, whatever it owns. All
ranks take part in every round. So an error here is remembered, and the exchange goes on; only when it has ended is
the error raised, and ``torch.distributed.checkpoint`` then fails on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
import torch.distributed as dist

from blobstore.integrations.torch_checkpoint.windows import Part, Window, parts_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from blobstore.integrations.torch_checkpoint.windows import Box

Item = TypeVar("Item", Window, Part)


@contextlib.contextmanager
def kept(errors: list[Exception]) -> Iterator[None]:
    """Keep an error of the block, to raise it when other ranks do not wait for this one any more."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the caller raises it
        errors.append(error)


def exchange(
    group: dist.ProcessGroup | None,
    streams: Sequence[Sequence[tuple[str, tuple[int, ...]]]],
    chunks: Sequence[Mapping[str, Sequence[Box]]],
    read: Callable[[Part], torch.Tensor],
    errors: list[Exception],
    *,
    window: int,
) -> Iterator[memoryview]:
    """Exchange the parts of all streams; yield the stream of this rank in pieces of one tensor each.

    Args:
        group: the processes.
        streams: the names and shapes of the tensors of each owner, in the order of its bytes.
        chunks: what each rank has: of all tensors for this rank, of those that this rank owns for others.
        read: returns the bytes of a part of this rank.
        errors: keeps those of ``read``.
        window: bytes that an owner gets in a round, at most.

    Raises:
        RuntimeError: a rank cannot be reached any more.
    """
    rank, device = dist.get_rank(group), _device(group)
    rounds = (rounds_of(stream, window) for stream in streams)
    for windows in itertools.zip_longest(*rounds, fillvalue=()):
        parts = [list(parts_of(its, chunks[rank])) for its in windows]
        coming = [list(parts_of(windows[rank], its)) for its in chunks]
        sent, received = _Buffer(parts, device), _Buffer(coming, device)
        with kept(errors):
            for part, target in sent.places:
                target.copy_(read(part))
        dist.all_to_all_single(
            received.memory, sent.memory, received.sizes, sent.sizes, group=group
        )
        own = dict(_Buffer([windows[rank]], torch.device("cpu")).places)
        for part, data in received.places:
            own[Window(part.key, part.window)][part.box.within(part.window)].copy_(data)
        yield from (place.view(-1).numpy().data for place in own.values())


def all_agree(group: dist.ProcessGroup | None, votes: Sequence[bool]) -> list[bool]:
    """Return of each vote whether all ranks say yes. Raises RuntimeError if one cannot be reached."""
    flags = torch.tensor(votes, dtype=torch.uint8, device=_device(group))
    dist.all_reduce(flags, dist.ReduceOp.MIN, group=group)
    return [bool(flag) for flag in flags.tolist()]


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose memory the group exchanges: that of the host if it can."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class _Buffer(Generic[Item]):
    """The parts of all ranks, one after the other."""

    def __init__(self, parts: Sequence[Sequence[Item]], device: torch.device) -> None:
        self.sizes = [sum(part.box.nbytes for part in its) for its in parts]
        self.memory = torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)
        every = list(itertools.chain.from_iterable(parts))
        pieces = torch.split(self.memory, [part.box.nbytes for part in every])
        views = [piece.view(part.box.sizes) for part, piece in zip(every, pieces, strict=True)]
        self.places: list[tuple[Item, torch.Tensor]] = list(zip(every, views, strict=True))
