"""Libraries that are not installed with blobstore."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from blobstore.errors import MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = {
    "torch": "'tensor-blobstore[torch]'",
    "mlx": "'tensor-blobstore[mlx]'",
    "transformers": "'tensor-blobstore[torch]' transformers",
    "mlx_lm": "'tensor-blobstore[mlx]' mlx-lm",
    "vllm": "vllm",
    "starlette": "'tensor-blobstore[page]'",
    "uvicorn": "'tensor-blobstore[page]'",
    "cryptography": "'tensor-blobstore[sign]'",
}
"""What to install for a library."""


@contextlib.contextmanager
def optional_libraries() -> Iterator[None]:
    """Say how to install a library that an import in the block does not find.

    Raises:
        MissingLibrary: a library is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library not in _PACKAGES:
            raise
        raise MissingLibrary(
            f"{library} is not installed for this Python",
            advice=f"run: pip install {_PACKAGES[library]}",
        ) from None
