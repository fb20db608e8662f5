"""Copies the state that ``async_save`` saves on a thread, into memory that is kept from one save to the next."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

_PLAIN = (type(None), bool, int, float, str, bytes)
_DICTS = (dict, OrderedDict)
_TENSORS = (torch.Tensor, torch.nn.Parameter)


class Staging:
    """The copy of a state.

    A tensor is copied into its last copy if that is alike. The stager of torch copies what describes a tensor too,
    which can take longer than its bytes. It is used for all else.
    """

    def __init__(self) -> None:
        self._copy: Any = None
        self.is_free = False
        """Whether nothing reads the copy any more. If that is unknown, the next one is made elsewhere."""

    def __reduce__(self) -> Any:
        return Staging, ()  # another process has a copy of its own

    @torch.no_grad()
    def copy(self, state: Any) -> Any:
        """Return a copy of a state in the memory of the host."""
        before = self._copy if self.is_free else None
        self._copy, self.is_free = None, False
        self._copy = _copied(state, before)
        return self._copy


def _copied(value: Any, before: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _DICTS:
        found = before if type(before) in _DICTS else {}
        return kind((key, _copied(one, found.get(key))) for key, one in value.items())
    if kind in (list, tuple):
        parts = before if type(before) is kind else ()
        parts = [*parts, *[None] * len(value)][: len(value)]
        return kind(map(_copied, value, parts))
    if _is_alike(value, before):
        _local(before).copy_(_local(value))
        return before
    if kind in _TENSORS and value.layout == torch.strided:
        return value.detach().to("cpu", copy=True)
    if kind is DTensor:  # of its own bytes alone: the stager would copy a buffer of many with each
        own = value.to_local().clone()
        options = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        value = DTensor.from_local(own, value.device_mesh, value.placements, **options)
    return DefaultStager(StagingOptions(*[False] * 4)).stage(value)


def _is_alike(value: Any, before: Any) -> bool:
    """Return whether the bytes of a tensor fit into an earlier copy of it."""
    if type(value) is type(before) is DTensor:
        one = (value.device_mesh, value.placements, value.shape)
        is_alike = one == (before.device_mesh, before.placements, before.shape)
    else:
        is_alike = type(value) in _TENSORS and type(before) in _TENSORS
    if not is_alike:
        return False
    own, other = _local(value), _local(before)
    is_strided = own.layout == other.layout == torch.strided
    return is_strided and (own.dtype, own.shape) == (other.dtype, other.shape)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
