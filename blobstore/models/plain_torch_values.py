"""The values of torch that are plain: types of elements, devices and shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from blobstore.manifests.plain_values import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(name)
    return found


KINDS: Final[Mapping[type, tuple[str, Kind]]] = {
    torch.dtype: ("dtype", Kind(lambda value: str(value).removeprefix("torch."), _dtype)),
    torch.device: ("device", Kind(str, lambda text: torch.device(str(text)))),
    torch.Size: ("size", Kind(list, torch.Size)),
}
