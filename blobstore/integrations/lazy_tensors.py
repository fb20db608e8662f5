"""Tensors that transformers takes one by one, and that are loaded only then.

transformers is given a model's tensors as if they were all in memory. It decides from their shapes and
types which ones it takes, and takes each of them once, in several threads. Until then they have no memory:
weights that are dequantized or copied to a device are never in memory twice, nor all on the host.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from blobstore.core.escape import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from blobstore.safetensors.cuda import CallerStream


class TensorQueue:
    """The tensors of an iterator by name, in any order and from any thread.

    Args:
        tensors: yields names and tensors. Only one thread runs it at a time.
        rename: returns the tensors under which a tensor is taken, such as the parts of a stack.
        stream: the stream of a GPU that the thread which takes a tensor continues on; for other devices None.
    """

    def __init__(
        self,
        tensors: Iterator[tuple[str, torch.Tensor]],
        rename: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
        stream: CallerStream | None = None,
    ) -> None:
        self._tensors = tensors
        self._rename = rename
        self._stream = stream
        self._arrived: dict[str, torch.Tensor] = {}
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def lazy(self, expected: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors that have the shapes and types of ``expected``, and no memory yet."""
        return {name: _lazy_tensor(self, name, tensor) for name, tensor in expected.items()}

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, which can be taken once. Raises as the iterator does, for all threads."""
        if self._stream is not None:
            self._stream.enter()
        with self._lock:
            while name not in self._arrived:
                if self._error is not None:
                    raise self._error
                try:
                    stored, tensor = next(self._tensors)
                except StopIteration:
                    raise LookupError(f"tensor {quote(name)} was taken already") from None
                except Exception as error:
                    self._error = error
                    raise
                self._arrived.update(self._rename({stored: tensor}))
            return self._arrived.pop(name)

    def close(self) -> None:
        """Stop the iterator, and free the tensors that nobody took."""
        with self._lock:
            self._error = RuntimeError("the model is built, and its tensors are closed")
            if isinstance(self._tensors, Generator):
                self._tensors.close()
            self._arrived.clear()


class LazyTensor(torch.Tensor):
    """A tensor on the meta device that knows where its values come from."""

    _queue: TensorQueue
    _name: str
    # Operations give plain tensors of the meta device.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a part of the values, or for ``...`` this tensor, for :meth:`to` to load it."""
        return self if index is Ellipsis else self._queue.take(self._name)[index]

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> torch.Tensor:  # type: ignore[override]
        """Return the values. On the CPU means wherever they arrive: that is transformers' default."""
        tensor = self._queue.take(self._name)
        is_default = device is None or torch.device(device).type == "cpu"
        return tensor.to(dtype=dtype) if is_default else tensor.to(device, dtype)


def _lazy_tensor(queue: TensorQueue, name: str, expected: torch.Tensor) -> LazyTensor:
    tensor: LazyTensor = torch.Tensor._make_subclass(LazyTensor, expected)  # noqa: SLF001 - as torch does
    tensor._queue, tensor._name = queue, name  # noqa: SLF001 - its own
    return tensor
