"""Tensors in the memory of a CUDA device, filled from pinned memory by a stream of their own.

Memory is taken on the caller's stream. So the copies wait for what that stream was asked for when
the memory was taken, since the memory may have belonged to something it still works on; and the
caller's stream waits for the copies before a tensor is handed out. Nothing else needs to be known of
them: a tensor that is freed is free for the caller's stream, which is behind its copies by then.

On the processor the copies are plain ones, and there is nothing to wait for.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from blobstore.core.escape import escape
from blobstore.errors import BlobstoreError
from blobstore.safetensors.torch import check_device, empty_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.tensor import TensorSpec

_cuda: Any = torch.cuda  # parts of it have no types


class TorchLane:
    """The way into the memory of ``device``, ``cuda``, ``cuda:N`` or ``cpu``.

    ``cuda`` is the device that is current now. Torch keeps pinned memory for later use when it is
    freed; see its host allocator.

    Raises:
        UsageError: torch cannot use the device here.
    """

    def __init__(self, device: str) -> None:
        check_device(device)
        self._device = torch.device(device)
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            with _failures(self._device):
                if device == "cuda":
                    self._device = torch.device("cuda", torch.cuda.current_device())
                self._stream = _cuda.Stream(self._device)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Return a tensor without content in the device's memory."""
        with _failures(self._device):
            return empty_tensor(spec, self._device)

    def mark(self) -> torch.cuda.Event | None:
        """Mark the point that the current stream has got to."""
        if self._stream is None:
            return None
        with _failures(self._device):
            event: torch.cuda.Event = _cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            return event

    def staging(self, nbytes: int) -> TorchStaging:
        """Return a staging buffer."""
        with _failures(self._device):
            return TorchStaging(nbytes, self._device, self._stream)

    def receive(self, sent: torch.cuda.Event | None) -> None:
        """Have the current stream wait for what was sent."""
        if sent is not None:
            with _failures(self._device):
                torch.cuda.current_stream(self._device).wait_event(sent)

    def drain(self) -> None:
        """Wait until all that was sent has arrived."""
        if self._stream is not None:
            with _failures(self._device):
                self._stream.synchronize()


class TorchStaging:
    """Bytes of the host, pinned if there is a ``stream`` to send them to ``device``."""

    def __init__(self, nbytes: int, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self._device = device
        self._stream = stream
        self._sent: torch.cuda.Event | None = None
        self._enter()
        self._bytes = torch.empty(
            nbytes, dtype=torch.uint8, device="cpu", pin_memory=stream is not None
        )
        self.memory = self._bytes.numpy().data

    def send(
        self, moves: Sequence[tuple[torch.Tensor, int, int, int]], after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Ask for copies to tensors of the device, and return the event of their end."""
        with _failures(self._device):
            self._enter()
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            # Of the caller's mode this thread knows nothing; in this one both kinds of tensors
            # may be written to.
            with torch.inference_mode():
                for tensor, start, at, count in moves:
                    room = tensor.view(-1).view(torch.uint8)[start : start + count]
                    room.copy_(self._bytes[at : at + count], non_blocking=True)
            if self._stream is not None:
                # Blocking: those who wait for it shall not keep a processor busy.
                event = _cuda.Event(blocking=True)
                event.record(self._stream)
                self._sent = event
            return self._sent

    def wait(self) -> None:
        """Wait until what was sent last has left."""
        if self._sent is not None:
            with _failures(self._device):
                self._sent.synchronize()

    def _enter(self) -> None:
        """Make the stream and its device current in this thread, which serves nothing else.

        Not by a context, which would go back to the first device, and so take memory there.
        """
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)


@contextlib.contextmanager
def _failures(device: torch.device) -> Iterator[None]:
    """Turn torch's errors into one of ours."""
    try:
        yield
    except RuntimeError as error:
        reason = escape(str(error).partition("\n")[0])
        raise BlobstoreError(f"loading onto {device} failed: {reason}") from None
