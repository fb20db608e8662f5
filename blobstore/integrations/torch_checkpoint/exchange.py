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
    from collections.abc import Callable, Iterator, Mapping, Sequence

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

    def sent(part: Window) -> torch.Tensor:
        with first.kept():
            if first.error is None:
                return read(part).reshape(-1).to(device)
        return torch.zeros(part.box.nbytes, dtype=torch.uint8, device=device)

    with ThreadPoolExecutor(1, thread_name_prefix="blobstore-step") as thread:
        receiving = thread.submit(receive)
        try:
            rounds = (rounds_of(stream, window) for stream in streams)
            for windows in itertools.zip_longest(*rounds, fillvalue=()):
                parts = [list(parts_of(its, chunks[rank])) for its in windows]
                coming = [list(parts_of(windows[rank], its)) for its in chunks]
                data = [torch.cat([_NOTHING.to(device), *map(sent, its)]) for its in parts]
                sizes = [sum(part.box.nbytes for part in its) for its in coming]
                buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
                dist.all_to_all_single(
                    buffer, torch.cat(data), sizes, list(map(len, data)), group=group
                )
                if windows[rank]:
                    incoming.put(_assembled(windows[rank], coming, buffer.cpu()))
        finally:
            incoming.put(None)
        receiving.result()


def all_succeed(group: dist.ProcessGroup | None, *, is_success: bool) -> bool:
    """Return whether all ranks have succeeded so far. Raises RuntimeError if one cannot be reached."""
    flag = torch.tensor([is_success], dtype=torch.uint8, device=_device(group))
    dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
    return bool(flag.item())


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose memory the group exchanges: that of the host if it can."""
    if "cpu:" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _assembled(
    windows: Sequence[Window], coming: Sequence[Sequence[Window]], buffer: torch.Tensor
) -> memoryview:
    """Return the bytes of windows in their order, from parts in the order of ranks."""
    memory = torch.empty(sum(window.box.nbytes for window in windows), dtype=torch.uint8)
    # By key and place, since a window of a tensor is contiguous and its parts lie in one window.
    places = []
    begin = 0
    for window in windows:
        places.append((window, memory[begin : begin + window.box.nbytes].view(window.box.sizes)))
        begin += window.box.nbytes
    begin = 0
    for parts in coming:
        # Parts of a rank are in the order of the windows.
        at = 0
        for part in parts:
            while True:
                window, target = places[at]
                if window.key == part.key and window.box.intersection(part.box) == part.box:
                    break
                at += 1
            data = buffer[begin : begin + part.box.nbytes].view(part.box.sizes)
            target[part.box.within(window.box)] = data
            begin += part.box.nbytes
    return memory.numpy().data
