"""Brings the parts of tensors from all ranks to their owners, a window at a time.

An owner hashes and writes one window before it gets the next one: its memory is two windows, whatever it owns. All
ranks take part in every round. So an error here is remembered, and the exchange goes on; only when it has ended is
the error raised, and ``torch.distributed.checkpoint`` then fails on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from blobstore.integrations.torch_checkpoint.windows import Window, parts_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.integrations.torch_checkpoint.windows import Box, Part

    Bytes = TypeVar("Bytes", Window, Part)


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
        sent, received = _buffer(parts, device), _buffer(coming, device)
        with kept(errors):
            for part, target in _places(parts, sent):
                target.copy_(read(part))
        sizes = list(map(_size, coming)), list(map(_size, parts))
        dist.all_to_all_single(received, sent, *sizes, group=group)
        own = [windows[rank]]
        places = dict(_places(own, _buffer(own, torch.device("cpu"))))
        for part, data in _places(coming, received):
            places[Window(part.key, part.window)][part.box.within(part.window)].copy_(data)
        yield from (place.view(-1).numpy().data for place in places.values())


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


def _size(parts: Iterable[Window | Part]) -> int:
    return sum(part.box.nbytes for part in parts)


def _buffer(parts: Sequence[Sequence[Window | Part]], device: torch.device) -> torch.Tensor:
    return torch.empty(sum(map(_size, parts)), dtype=torch.uint8, device=device)


def _places(
    parts: Sequence[Sequence[Bytes]], buffer: torch.Tensor
) -> Iterator[tuple[Bytes, torch.Tensor]]:
    """Yield where each part lies in a buffer that has the parts of all ranks, one after the other."""
    begin = 0
    for part in itertools.chain.from_iterable(parts):
        end = begin + part.box.nbytes
        yield part, buffer[begin:end].view(part.box.sizes)
        begin = end
