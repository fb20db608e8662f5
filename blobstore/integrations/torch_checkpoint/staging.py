"""Copies the state that ``async_save`` saves on a thread, into memory that is kept from one save to the next."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_PLAIN = (type(None), bool, int, float, str, bytes)
_TENSORS = (torch.Tensor, torch.nn.Parameter, DTensor)


class Staging:
    """The copy of a state.

    A tensor is copied into the tensor of the last copy that had its place, if the two are alike. The stager of torch
    copies what describes a tensor too, which can take longer than its bytes. It is used for all else.
    """

    def __init__(self) -> None:
        self._copies: list[Any] = []
        self.is_free = False
        """Whether nothing reads the copy any more. If that is unknown, the next one is made elsewhere."""

    def __reduce__(self) -> Any:
        return Staging, ()  # another process has a copy of its own

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return a copy of a state in the memory of the host."""
        values, form = tree_flatten(state)
        before = self._copies[: len(values)] if self.is_free else []
        self._copies, self.is_free = [], False
        self._copies = list(itertools.starmap(_copied, itertools.zip_longest(values, before)))
        return tree_unflatten(self._copies, form)


def _copied(value: Any, before: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    form = _form(value)
    if form is not None and form == _form(before):
        _local(before).copy_(_local(value))
        return before
    if form is not None and type(value) is not DTensor:
        return value.detach().to("cpu", copy=True)
    if type(value) is DTensor:
        # Of its own bytes alone: the stager would copy a buffer of many with each.
        own = value.to_local().clone()
        options: dict[str, Any] = {"shape": value.shape, "stride": value.stride()}
        value = DTensor.from_local(own, value.device_mesh, value.placements, **options)
    return DefaultStager(StagingOptions(*[False] * 4)).stage(value)


def _form(value: Any) -> Any:
    """Return what two tensors have in common if one can be copied into the other; None for all else."""
    if type(value) not in _TENSORS or (local := _local(value)).layout != torch.strided:
        return None
    place = (value.device_mesh, value.placements, value.shape) if isinstance(value, DTensor) else ()
    return *place, local.dtype, local.shape


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
