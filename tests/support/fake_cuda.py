"""CUDA's streams without a GPU: what is requested of a stream runs as late as the rules of CUDA allow.

It runs when the host waits for it, or when a stream runs that waits for it. So a copy or a kernel that nothing
waits for has not happened when its result is read, and a buffer that is filled again too soon is copied late.
Tensors are in host memory. Each is noted with the device and stream that it was allocated on.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch


class Stream:
    def __init__(self, device: torch.device | int) -> None:
        self.device = torch.device("cuda", device) if isinstance(device, int) else device
        self._requests: deque[Callable[[], object]] = deque()
        self._requested = self._done = 0

    def request(self, work: Callable[[], object]) -> None:
        with _RUNNING:
            self._requests.append(work)
            self._requested += 1

    def run(self, until: int) -> None:
        with _RUNNING:
            while self._done < until:
                self._done += 1
                self._requests.popleft()()

    def synchronize(self) -> None:
        self.run(self._requested)

    def wait_event(self, event: Event) -> None:
        self.request(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    def __init__(self, *, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self, stream: Stream) -> None:
        self._stream, self._until = stream, stream._requested

    def synchronize(self) -> None:
        self._stream.run(self._until)


_RUNNING = threading.RLock()


class FakeCuda(threading.local):
    """Two devices. A new thread has the first one, and the default streams."""

    defaults = Stream(0), Stream(1)
    allocated: ClassVar[dict[int, Stream]] = {}
    """Of all threads: by the address of memory, the stream whose pool it is from."""
    used_on: ClassVar[dict[int, set[Stream]]] = {}
    """Of all threads: by the address of memory, the streams that ``record_stream`` was called with."""

    def __init__(self) -> None:
        self.device = 0
        self.streams = list(self.defaults)

    def index(self, device: Any = None) -> int:
        found = torch.device("cuda", device) if isinstance(device, int) else device
        found = torch.device(found or "cuda")
        return self.device if found.index is None else int(found.index)

    def current_stream(self, device: Any = None) -> Stream:
        return self.streams[self.index(device)]

    def set_stream(self, stream: Stream) -> None:
        self.device = self.index(stream.device)
        self.streams[self.device] = stream

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Make a stream current, as ``torch.cuda.stream`` does."""
        device, streams = self.device, self.streams.copy()
        self.set_stream(stream)
        try:
            yield stream
        finally:
            self.device, self.streams = device, streams

    def values(self, tensor: torch.Tensor) -> list[Any]:
        """Return the values that a kernel on the current stream reads."""
        found: list[list[Any]] = []
        stream = self.current_stream(self.allocated[_address(tensor)].device)
        stream.request(lambda: found.append(tensor.tolist()))
        stream.synchronize()
        return found[0]

    def stream_of(self, tensor: torch.Tensor) -> Stream:
        """Return the stream whose pool a tensor is from."""
        return self.allocated[_address(tensor)]

    def empty(self, empty: Callable[..., torch.Tensor], *size: Any, **options: Any) -> torch.Tensor:
        device = options.pop("device", None)
        options.pop("pin_memory", None)
        made = empty(*size, **options)
        if device is None or torch.device(device).type == "cpu":
            return made
        if torch.device(device).type == "meta":
            return empty(*size, **options, device=device)
        return self._made(made.fill_(0), self.current_stream(device))

    def to(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        """Copy pageable memory, for which the host waits."""
        stream = self.current_stream(device)
        stream.synchronize()
        return self._made(tensor.clone(), stream)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Request a copy on the stream that is current for the target's device."""

        def work() -> None:
            with torch.inference_mode():
                _COPY(target, source)

        self.current_stream(self.allocated[_address(target)].device).request(work)
        return target

    def _made(self, tensor: torch.Tensor, stream: Stream) -> torch.Tensor:
        self.allocated[_address(tensor)] = stream
        self.used_on[_address(tensor)] = set()
        return tensor


_COPY, _TO, _EMPTY = torch.Tensor.copy_, torch.Tensor.to, torch.empty


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Let torch have two CUDA devices until the test ends."""
    cuda = FakeCuda()

    def to(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        place = arguments[0] if arguments else options.get("device")
        is_device = isinstance(place, int) or str(place).startswith("cuda")
        return cuda.to(tensor, place) if is_device else _TO(tensor, *arguments, **options)

    def copy(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        return cuda.copy(target, source) if non_blocking else _COPY(target, source)

    def record(tensor: torch.Tensor, stream: Stream) -> None:
        cuda.used_on[_address(tensor)].add(stream)

    fakes = {
        "Stream": Stream,
        "Event": Event,
        "is_available": lambda: True,
        "current_device": cuda.index,
        "current_stream": cuda.current_stream,
        "set_stream": cuda.set_stream,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(
        torch, "empty", lambda *size, **options: cuda.empty(_EMPTY, *size, **options)
    )
    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    return cuda
