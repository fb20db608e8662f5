"""Observes what an engine does with the tensors that it is given.

An engine that fuses weights may report a parameter as loaded after a part of it, and may skip tensors
that it does not know. Both can be seen from below, since every torch operation passes through here:
tensors that are never read, and parameters that are never written completely.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from blobstore.integrations.vllm.rank_reads import PartTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_Part = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Address, sizes and strides of memory that was written."""


class Offered:
    """An iterator over names and tensors that knows which tensors were never read.

    Iterating it again continues after the last tensor.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = iter(tensors)
        self._pending: dict[int | str, str] = {}
        self._dropped: list[str] = []
        self._is_made = True
        """False while the next tensor is computed: reads for that do not count."""
        self.last: tuple[str, torch.Tensor] | None = None
        """The last name and tensor; None before the first and after the end."""
        self.names: list[str] = []
        """The names of all tensors so far."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        self.last = None  # frees its memory
        self._is_made = False
        try:
            name, tensor = self.last = next(self._tensors)
        finally:
            self._is_made = True
        self.names.append(name)
        if tensor.numel():
            key = _identity(tensor)
            if key in self._pending:  # that tensor was freed, and its memory reused
                self._dropped.append(self._pending[key])
            self._pending[key] = name
        return self.last

    def saw(self, tensor: torch.Tensor) -> None:
        """Record that a tensor was read, or a view that begins at the same address."""
        if self._is_made:
            self._pending.pop(_identity(tensor), None)

    @property
    def is_unseen(self) -> bool:
        """Whether there is a tensor that was not read yet."""
        return bool(self._pending)

    @property
    def unused(self) -> list[str]:
        """The names of the tensors that were never read."""
        return [*self._dropped, *self._pending.values()]


class Watch(TorchDispatchMode):
    """Records which tensors are read and written in this thread while it is entered.

    Args:
        parameters: the parameters by name. Any change of their memory counts as a write.
        offered: the tensors that are offered in the meantime.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], offered: Offered) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._offered = offered
        self._parameters = parameters
        self._begins = {name: _address(tensor) for name, tensor in parameters.items()}
        self._parts: dict[int, dict[_Part, int]] = {
            tensor.untyped_storage().data_ptr(): {}
            for tensor in parameters.values()
            if _address(tensor)
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; True would wrap every operation again

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._offered.is_unseen:
            for value in chain(args, kwargs.values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, torch.Tensor):
                        self._offered.saw(item)
        result = func(*args, **kwargs)
        for place, name in _written_arguments(func):
            tensor = args[place] if place < len(args) else kwargs.get(name)
            if not isinstance(tensor, torch.Tensor) or not _address(tensor):
                continue
            parts = self._parts.get(tensor.untyped_storage().data_ptr())
            if parts is not None:
                parts[tensor.data_ptr(), tuple(tensor.shape), tensor.stride()] = tensor.numel()
        return result

    def written(self, name: str) -> int | None:
        """Return how many elements of a parameter were written; None if its memory was replaced."""
        tensor, begin = self._parameters[name], self._begins[name]
        if not begin or _address(tensor) != begin:
            return None
        end = begin + tensor.numel() * tensor.element_size()
        parts = self._parts[tensor.untyped_storage().data_ptr()]
        count = sum(numel for (address, _, _), numel in parts.items() if begin <= address < end)
        return min(count, tensor.numel())


def _identity(tensor: torch.Tensor) -> int | str:
    """Return a key that a tensor shares with the views that begin with it."""
    return tensor.part.name if isinstance(tensor, PartTensor) else tensor.data_ptr()


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Return position and name of the arguments that an operation changes."""
    return [
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)  # noqa: SLF001 - as torch's modes do
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor, or 0 if it has no memory."""
    if tensor.is_meta or not tensor.numel():
        return 0
    return tensor.data_ptr()
