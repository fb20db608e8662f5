"""Blobstore: a content-addressed store for model weights.

``blobstore.create`` takes a model apart into one verified blob per tensor; ``blobstore.open`` maps the
tensors back into a program without copying them. Names are loaded when they are first used, so that
importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blobstore.errors import BlobstoreError
    from blobstore.operations.create.create import Created, create
    from blobstore.operations.open import Model
    from blobstore.operations.open import open_model as open  # noqa: A004
    from blobstore.store.local import LocalStore

__all__ = ["BlobstoreError", "Created", "LocalStore", "Model", "create", "open"]

_HOMES = {
    "BlobstoreError": ("blobstore.errors", "BlobstoreError"),
    "Created": ("blobstore.operations.create.create", "Created"),
    "LocalStore": ("blobstore.store.local", "LocalStore"),
    "Model": ("blobstore.operations.open", "Model"),
    "create": ("blobstore.operations.create.create", "create"),
    "open": ("blobstore.operations.open", "open_model"),
}


def __getattr__(name: str) -> Any:
    try:
        module, attribute = _HOMES[name]
    except KeyError:
        raise AttributeError(f"module 'blobstore' has no attribute {name!r}") from None
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
