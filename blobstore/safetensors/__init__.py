"""The safetensors format: a library with the interface of the reference, and the store's reader of blobs.

``header`` converts between bytes and checked values, ``serialization`` writes files, and ``handle`` opens
them. ``writer`` writes tensors one by one, and ``edit`` changes files. ``numpy``, ``torch`` and ``mlx`` save
and load, and turn bytes into tensors. The package needs numpy alone: it imports ``core`` and ``errors``,
knows no stores or manifests, and loads a framework when it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.errors import SafetensorError
    from blobstore.safetensors.edit import edit_file
    from blobstore.safetensors.handle import TensorMeta, prefetch, safe_open
    from blobstore.safetensors.prefetch_loader import PrefetchLoader
    from blobstore.safetensors.serialization import (
        TensorSpec,
        deserialize,
        serialize,
        serialize_file,
    )
    from blobstore.safetensors.slices import SafeSlice
    from blobstore.safetensors.writer import SafetensorsWriter

# Where each public name is defined.
_HOMES = {
    "PrefetchLoader": "blobstore.safetensors.prefetch_loader",
    "SafeSlice": "blobstore.safetensors.slices",
    "SafetensorsWriter": "blobstore.safetensors.writer",
    "SafetensorError": "blobstore.errors",
    "TensorMeta": "blobstore.safetensors.handle",
    "TensorSpec": "blobstore.safetensors.serialization",
    "deserialize": "blobstore.safetensors.serialization",
    "edit_file": "blobstore.safetensors.edit",
    "prefetch": "blobstore.safetensors.handle",
    "safe_open": "blobstore.safetensors.handle",
    "serialize": "blobstore.safetensors.serialization",
    "serialize_file": "blobstore.safetensors.serialization",
}

__all__ = [
    "PrefetchLoader",
    "SafeSlice",
    "SafetensorError",
    "SafetensorsWriter",
    "TensorMeta",
    "TensorSpec",
    "deserialize",
    "edit_file",
    "prefetch",
    "safe_open",
    "serialize",
    "serialize_file",
]

__version__ = "0.8.0"
"""The version of the reference library whose interface this is."""


if not TYPE_CHECKING:  # a type checker reports a name that does not exist

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value
