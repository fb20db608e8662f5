"""Libraries that are not installed with blobstore."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import escape
from blobstore.errors import MissingLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGES = {
    "huggingface_hub": "'tensor-blobstore[hub]'",
    "httpx2": "'tensor-blobstore[registry]'",
    "torch": "'tensor-blobstore[torch]'",
    "mlx": "'tensor-blobstore[mlx]'",
    "transformers": "'tensor-blobstore[torch]' transformers",
    "lightning": "lightning",
    "mlx_lm": "'tensor-blobstore[mlx]' mlx-lm",
    "vllm": "vllm",
    "aiohttp": "'tensor-blobstore[serve]'",
    "cryptography": "'tensor-blobstore[sign]'",
    "obstore": "'tensor-blobstore[objects]'",
    "botocore": "'tensor-blobstore[aws]'",
    "xxhash": "'tensor-blobstore[follow]'",
    "blake3": "'tensor-blobstore[follow]'",
    "distributed": "'tensor-blobstore[dask]'",
    "ray": "'tensor-blobstore[ray]'",
}
"""What to install for a library."""


def install_command(library: str) -> str:
    """Return the command that installs an optional library."""
    return f"pip install {_PACKAGES[library]}"


@contextlib.contextmanager
def optional_libraries() -> Iterator[None]:
    """Say how to install a library that an import in the block does not find, or cannot load.

    Raises:
        MissingLibrary: a library is not installed, or a part of it is missing.
    """
    try:
        yield
    except ImportError as error:
        # A shared library that cannot be loaded is named by its last part alone, as core of mlx.core.
        named = [(error.name or "").partition(".")[0], *Path(error.path or "").parts]
        library = next((name for name in named if name in _PACKAGES), None)
        if library is None:
            raise
        reason = (
            "is not installed for this Python"
            if isinstance(error, ModuleNotFoundError)
            else f"is installed, but cannot be loaded: {escape(str(error), 200)}"
        )
        raise MissingLibrary(
            f"{library} {reason}", advice=f"run: {install_command(library)}"
        ) from None


def installed_version() -> str:
    """Return the version of this package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tensor-blobstore")
    except PackageNotFoundError:
        return "0+unknown"  # run from its sources
