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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from blobstore.core.workers import Cancelled
from blobstore.integrations.torch_checkpoint.windows import parts_of, rounds_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from blobstore.integrations.torch_checkpoint.windows import Box, Window


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


class Windows:
    """The stream of bytes of an owner, which one thread writes and another one reads, a window behind."""

    def __init__(self) -> None:
        self._arrived: queue.Queue[memoryview | None] = queue.Queue(maxsize=1)
        self._current = memoryview(b"")

    def put(self, window: memoryview | None) -> None:
        """Add a window; None at the end. Waits until the one before it is being read."""
        self._arrived.put(window)

    def take(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes. Raises Cancelled if the stream ends before."""
        while size:
            if not self._current:
                window = self._arrived.get()
                if window is None:
                    self._arrived.put(None)
                    raise Cancelled("the exchange with other ranks has ended early")
                self._current = window
            piece, self._current = self._current[:size], self._current[size:]
            size -= len(piece)
            yield piece

    def drain(self) -> None:
        """Read what is left, so that nobody waits."""
        while self._arrived.get() is not None:
            pass


def exchange(
    group: dist.ProcessGroup | None,
    streams: Sequence[Sequence[tuple[str, tuple[int, ...]]]],
    chunks: Sequence[Mapping[str, Sequence[Box]]],
    read: Callable[[Window], torch.Tensor],
    consume: Callable[[Windows], None],
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
        consume: reads all of the stream of this rank, on another thread.
        first: keeps the first error of ``read`` and ``consume``.
        window: bytes that an owner gets in a round, at most.

    Raises:
        RuntimeError: a rank cannot be reached any more.
    """
    rank = dist.get_rank(group)
    device = _device(group)
    incoming = Windows()

    def receive() -> None:
        with first.kept():
            consume(incoming)
        incoming.drain()

    def copy(part: Window, target: torch.Tensor) -> None:
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
                    memory = torch.empty(_size(windows[rank]), dtype=torch.uint8)
                    targets = _Targets(windows[rank], memory)
                    for part in own:
                        copy(part, targets.of(part))
                    for part, data in _places(coming, received):
                        targets.of(part).copy_(data)
                    incoming.put(memory.numpy().data)
        finally:
            incoming.put(None)
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


def _size(parts: Iterable[Window]) -> int:
    return sum(part.box.nbytes for part in parts)


def _buffer(parts: Sequence[Sequence[Window]], device: torch.device) -> torch.Tensor:
    return torch.empty(sum(map(_size, parts)), dtype=torch.uint8, device=device)


def _places(
    parts: Sequence[Sequence[Window]], buffer: torch.Tensor
) -> Iterator[tuple[Window, torch.Tensor]]:
    """Yield where each part lies in a buffer that has the parts of all ranks, one after the other."""
    begin = 0
    for part in itertools.chain.from_iterable(parts):
        end = begin + part.box.nbytes
        yield part, buffer[begin:end].view(part.box.sizes)
        begin = end


class _Targets:
    """Where the parts of windows belong in their memory."""

    def __init__(self, windows: Sequence[Window], memory: torch.Tensor) -> None:
        self._windows: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for window, place in _places([windows], memory):
            self._windows.setdefault(window.key, []).append((window.box, place))

    def of(self, part: Window) -> torch.Tensor:
        """Return the memory of a part, which lies within one window."""
        for box, place in self._windows[part.key]:
            if box.intersection(part.box) == part.box:
                return place[part.box.within(box)]
        raise AssertionError
