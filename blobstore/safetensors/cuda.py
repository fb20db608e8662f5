"""Copies tensors into the memory of a CUDA device, from pinned memory on a separate stream.

Tensors are allocated on the caller's stream. The copies wait for the work that this stream had when the
tensor was allocated, because the memory may still be in use by that work. The caller's stream waits for
the copies before it receives a tensor. So a tensor can be freed at any time without synchronisation: the
caller's stream is then past its copies.

A thread that works for a caller does so on the caller's stream (:class:`CallerStream`).

On the CPU, copies are synchronous.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from blobstore.core.escape import escape
from blobstore.errors import BlobstoreError
from blobstore.safetensors.torch import check_device, empty_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.tensor import TensorSpec

_cuda: Any = torch.cuda  # parts of it have no types


class TorchDeviceStream:
    """Copies tensors to ``device``: ``cuda``, ``cuda:N`` or ``cpu``.

    ``cuda`` is the current device. Torch's host allocator keeps freed pinned memory for reuse.

    Raises:
        UsageError: torch cannot use the device.
    """

    def __init__(self, device: str) -> None:
        check_device(device)
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            with failures(self._device):
                if device == "cuda":
                    self._device = torch.device("cuda", torch.cuda.current_device())
                self._stream = _cuda.Stream(self._device)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return an uninitialised tensor in device memory."""
        with failures(self._device):
            return empty_tensor(spec, self._device)

    def mark(self) -> torch.cuda.Event | None:
        """Record an event on the current stream."""
        if self._stream is None:
            return None
        with failures(self._device):
            event: torch.cuda.Event = _cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            return event

    def staging(self, nbytes: int) -> TorchStagingBuffer:
        """Return a staging buffer."""
        with failures(self._device):
            return TorchStagingBuffer(nbytes, self._device, self._stream)

    def receive(self, sent: torch.cuda.Event | None) -> None:
        """Make the current stream wait for copies."""
        if sent is not None:
            with failures(self._device):
                torch.cuda.current_stream(self._device).wait_event(sent)

    def drain(self) -> None:
        """Wait until all copies have completed."""
        if self._stream is not None:
            with failures(self._device):
                self._stream.synchronize()


class TorchStagingBuffer:
    """A buffer in host memory, pinned if possible and there is a ``stream`` that copies it to ``device``."""

    def __init__(self, nbytes: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._sent: torch.cuda.Event | None = None
        self._enter()
        self._bytes = host_buffer(nbytes, is_pinned=stream is not None)
        self.memory = self._bytes.numpy().data

    def send(
        self, moves: Sequence[tuple[torch.Tensor, int, int, int]], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Start copies to device tensors, and return the event of their completion."""
        with failures(self._device):
            self._enter()
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            # This thread does not know the caller's mode. Inference mode may write to both kinds of
            # tensors.
            with torch.inference_mode():
                for tensor, start, at, count in moves:
                    target = tensor.view(-1).view(torch.uint8)[start : start + count]
                    target.copy_(self._bytes[at : at + count], non_blocking=True)
            if self._stream is not None:
                # A blocking event, so that waiting threads do not use a processor.
                event = _cuda.Event(blocking=True)
                event.record(self._stream)
                self._sent = event
            return self._sent

    def wait(self) -> None:
        """Wait until the last copies have read the buffer."""
        if self._sent is not None:
            with failures(self._device):
                self._sent.synchronize()

    def _enter(self) -> None:
        """Make the stream and its device current in this thread, which does nothing else."""
        # A context manager would switch back to the first device and allocate memory there.
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


class CallerStream:
    """The stream that is current for the thread that makes this, for threads that work in its place.

    A new thread has the first device and the default stream: ``cuda`` would be another device there, and what the
    thread requests would race with the caller.
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    @classmethod
    def of(cls, device: str) -> CallerStream | None:
        """Return the stream of a CUDA device, which may be given as a number; None for other devices."""
        is_number = device.isdigit()
        if not (is_number or device.partition(":")[0] == "cuda") or not torch.cuda.is_available():
            return None
        return cls(torch.cuda.current_stream(int(device) if is_number else device))

    def enter(self) -> None:
        """Make the stream and its device current in this thread, which does nothing else."""
        torch.cuda.set_stream(self._stream)

    def hand_over(self, tensor: torch.Tensor) -> None:
        """Let the current stream of this thread use a tensor that was made on the caller's."""
        current = torch.cuda.current_stream(self._stream.device)
        if current != self._stream:
            current.wait_stream(self._stream)
            tensor.record_stream(current)


def host_buffer(nbytes: int, *, is_pinned: bool) -> torch.Tensor:
    """Return host memory, pinned if that is wanted and the system allows it.

    Containers and virtual machines may limit pinned memory. Copies from other memory are slower.
    """
    empty = functools.partial(torch.empty, nbytes, dtype=torch.uint8, device="cpu")
    if is_pinned:
        with contextlib.suppress(RuntimeError):
            return empty(pin_memory=True)
    return empty()


@contextlib.contextmanager
def failures(device: torch.device) -> Iterator[None]:
    """Convert torch's errors to ours."""
    try:
        yield
    except RuntimeError as error:
        reason = escape(str(error).partition("\n")[0])
        raise BlobstoreError(f"loading onto {device} failed: {reason}") from None
