"""Tensors of which a rank reads only the part that it copies.

vLLM gives each rank all tensors, and the rank copies its part of each. With a remote model, the rest
need not be read. So vLLM is given tensors without memory. What it copies of them is noted, and read later
with many concurrent requests, at the latest when something else uses the memory that it was copied to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

from blobstore.core.escape import quote
from blobstore.models.frameworks import NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from blobstore.core.slicing import Index
    from blobstore.operations.open import Model

_ATEN = torch.ops.aten


@dataclass(frozen=True)
class Part:
    """A part of a stored tensor."""

    name: str
    ranges: tuple[tuple[int, int], ...]
    """Start and stop in each dimension of the stored tensor."""
    dims: tuple[int, ...]
    """The dimensions that are left; those that were indexed by an integer are not."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(self.ranges[dim][1] - self.ranges[dim][0] for dim in self.dims)

    @property
    def index(self) -> Index:
        """The index that selects the part from the stored tensor."""
        return tuple(
            slice(*bounds) if dim in self.dims else bounds[0]
            for dim, bounds in enumerate(self.ranges)
        )

    def slice(self, dim: int, start: int, stop: int) -> Part:
        """Return a slice in one dimension of the part. Bounds are clipped as Python does."""
        at, size = self.dims[dim], self.shape[dim]
        start, stop, _ = slice(start, stop).indices(size)
        begin = self.ranges[at][0]
        bounds = begin + start, begin + max(start, stop)
        return replace(self, ranges=(*self.ranges[:at], bounds, *self.ranges[at + 1 :]))

    def select(self, dim: int, number: int) -> Part:
        """Return one element of a dimension of the part, which must have it."""
        at, number = self.dims[dim], range(self.shape[dim])[number]
        one = self.slice(dim, number, number + 1)
        return replace(one, dims=tuple(other for other in self.dims if other != at))


class PartTensor(torch.Tensor):
    """A part of a tensor of a model, which is read when its values are needed."""

    part: Part
    model: Model
    _loaded: torch.Tensor | None

    @staticmethod
    def of(model: Model, part: Part, dtype: torch.dtype) -> PartTensor:
        """Return a part of a tensor of a model. Reads nothing."""
        made: PartTensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - as torch's own subclasses do
            PartTensor, part.shape, dtype=dtype
        )
        made.model, made.part, made._loaded = model, part, None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents  # torch would read the values
        return f"<PartTensor of {quote(self.part.name)}: {self.dtype} {list(self.shape)}>"

    def read(self) -> torch.Tensor:
        """Return the values. Raises as :meth:`blobstore.Model.read_parts`."""
        if self._loaded is None:
            (self._loaded,) = self.model.read_parts([(self.part.name, self.part.index)])
        return self._loaded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        del types
        if not kwargs and (take := _TAKES.get(func)) is not None:
            tensor, *rest = args
            found = take(tensor.part, *rest)
            if isinstance(found, Part):
                return cls.of(tensor.model, found, tensor.dtype)
            if found is not None:
                return [cls.of(tensor.model, one, tensor.dtype) for one in found]
        return func(*_read_all(args), **_read_all(kwargs or {}))


def _read_all(values: Any) -> Any:
    return tree_map_only(PartTensor, PartTensor.read, values)


def _slice(
    part: Part, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1
) -> Part | None:
    """Return a slice, or None if it has another step than 1."""
    size = part.shape[dim]
    first, last = 0 if start is None else start, size if stop is None else stop
    return part.slice(dim, first, last) if step == 1 else None


_TAKES: dict[Any, Any] = {
    _ATEN.detach.default: lambda part: part,
    _ATEN.alias.default: lambda part: part,
    _ATEN.slice.Tensor: _slice,
    _ATEN.select.int: Part.select,
    _ATEN.unbind.int: lambda part, dim=0: [
        part.select(dim, number) for number in range(part.shape[dim])
    ],
}
"""Operations whose result is a part of their argument, or a list of parts."""


def part_tensors(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors of a model, of which nothing was read. Raises as :meth:`blobstore.Model.specs`."""
    for name, spec in model.specs.items():
        ranges = tuple((0, size) for size in spec.shape)
        part = Part(name, ranges, tuple(range(len(ranges))))
        yield name, PartTensor.of(model, part, getattr(torch, NAMES[spec.dtype]))


class DeferredCopies(TorchDispatchMode):
    """Notes copies of :class:`PartTensor` while it is entered, and makes many at once.

    They are made when it is left without an error, or when another operation uses their memory.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._model = model
        self._copies: list[tuple[torch.Tensor, PartTensor]] = []
        self._storages: set[int] = set()
        """The addresses of the memory that is copied to."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; True would wrap every operation again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is _ATEN.copy_.default and isinstance(args[1], PartTensor):
            target, tensor = args[:2]
            if target.shape == tensor.shape:  # a tensor that is repeated is read at once
                self._copies.append((target, tensor))
                self._storages.add(_storage(target))
                return target
        if self._copies and func not in _VIEWS:
            used = (value for value in tree_iter((args, kwargs)) if isinstance(value, torch.Tensor))
            if not self._storages.isdisjoint(map(_storage, used)):
                self.flush()
        return func(*args, **(kwargs or {}))

    def flush(self) -> None:
        """Make the copies. Raises as :meth:`PartTensor.read`."""
        copies, self._copies = self._copies, []
        self._storages.clear()
        parts = [(tensor.part.name, tensor.part.index) for _, tensor in copies]
        for (target, _), values in zip(copies, self._model.read_parts(parts), strict=True):
            target.copy_(values)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None:
            self.flush()


_VIEWS = {
    _ATEN.detach.default,
    _ATEN.alias.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.view.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
}
"""Operations that read no values."""


def _storage(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory, 0 if it has none."""
    if isinstance(tensor, PartTensor) or tensor.is_meta:
        return 0
    return tensor.untyped_storage().data_ptr()
