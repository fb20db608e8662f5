"""Where tensors come from: model folders, weight files of several kinds, the Hugging Face Hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.sources.pytorch.checkpoint import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'blobstore.sources' has no attribute {name!r}")
    from blobstore.sources.pytorch import checkpoint

    return getattr(checkpoint, name)
