"""Models of mlx-lm from the store, with quantized layers unchanged.

mlx-lm builds the model as from a folder. Only the weights come from the store, when mlx-lm calls the
model's ``sanitize`` to convert them. MLX cannot adopt memory, so each tensor is copied once.

Importing mlx-lm lowers the limit of open files of the process. An open model of the store keeps no
file open.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.integrations.mlx_lm.loader import load, load_all, load_model

__all__ = ["load", "load_all", "load_model"]


def __getattr__(name: str) -> Any:
    """Import mlx-lm when it is first used, so that the server can say how to install it."""
    if name in __all__:
        return getattr(import_module(f"{__name__}.loader"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
