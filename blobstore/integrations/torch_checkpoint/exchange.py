"""Brings the parts of tensors from all ranks to their owners, a window at a time.

While an owner hashes and writes one window, it gets the next one: its memory is two windows, whatever it owns. All
ranks take part in every round. So an error here is remembered, and the exchange goes on; only when it has ended is
the error raised, and ``torch.distributed.checkpoint`` then fails on all ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from blobstore.integrations.torch_checkpoint.windows import Window, parts_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.integrations.torch_checkpoint.windows import Box, Part

    Bytes = TypeVar("Bytes", Window, Part)


class FirstError:
    """The first error of a rank, to be raised when other ranks do not wait for it any more."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the block instead of raising it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the caller raises it
            self.error = self.error or error


def exchange(
    group: dist.ProcessGroup | None,
    streams: Sequence[Sequence[tuple[str, tuple[int, ...]]]],
    chunks: Sequence[Mapping[str, Sequence[Box]]],
    read: Callable[[Part], torch.Tensor],
    consume: Callable[[Iterator[memoryview]], None],
    first: FirstError,
    *,
    window: int,
) -> None:
    """Exchange the parts of all streams.

    Args:
        group: the processes.
        streams: the keys and shapes of the tensors of each owner, in the order of its bytes.
        chunks: what each rank has: of all tensors for this rank, of those that this rank owns for others.
        read: returns the bytes of a part of this rank.
        consume: reads all of the stream of this rank, on another thread: pieces in order, of one tensor each.
        first: keeps the first error of ``read`` and ``consume``.
        window: bytes that an owner gets in a round, at most.

    Raises:
        RuntimeError: a rank cannot be reached any more.
    """
    rank = dist.get_rank(group)
    device = _device(group)
    arrived: queue.Queue[list[memoryview] | None] = queue.Queue(maxsize=1)
    incoming = itertools.chain.from_iterable(iter(arrived.get, None))

    def receive() -> None:
        with first.kept():
            consume(incoming)
        for _ in incoming:  # what is left, so that nobody waits
            pass

    def copy(part: Part, target: torch.Tensor) -> None:
        with first.kept():
            if first.error is None:
                target.copy_(read(part))

    with ThreadPoolExecutor(1, thread_name_prefix="blobstore-step") as thread:
        receiving = thread.submit(receive)
        try:
            rounds = (rounds_of(stream, window) for stream in streams)
            for windows in itertools.zip_longest(*rounds, fillvalue=()):
                parts = [list(parts_of(its, chunks[rank])) for its in windows]
                own, parts[rank] = parts[rank], []
                coming = [list(parts_of(windows[rank], its)) for its in chunks]
                coming[rank] = []
                sent, received = _buffer(parts, device), _buffer(coming, device)
                for part, target in _places(parts, sent):
                    copy(part, target)
                dist.all_to_all_single(
                    received, sent, list(map(_size, coming)), list(map(_size, parts)), group=group
                )
                if windows[rank]:
                    memory = _buffer([windows[rank]], torch.device("cpu"))
                    places = dict(_places([windows[rank]], memory))
                    for part in own:
                        copy(part, _target(part, places))
                    for part, data in _places(coming, received):
                        _target(part, places).copy_(data)
                    arrived.put([place.view(-1).numpy().data for place in places.values()])
        finally:
            arrived.put(None)
        receiving.result()


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


def _target(part: Part, places: Mapping[Window, torch.Tensor]) -> torch.Tensor:
    """Return where a part belongs in the memory of its window."""
    return places[Window(part.key, part.window)][part.box.within(part.window)]
