"""From what a person names to an open source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.errors import SourceError, SourceNotFound, UnsupportedSource
from blobstore.sources import hub
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.sources.base import TensorSource

_HUB_SCHEME = "hf://"


def open_source(
    text: str | os.PathLike[str],
    *,
    weights: str | None = None,
    ignore_unindexed: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> TensorSource:
    """Open a model folder, a ``.safetensors`` file, or a Hub repository by its id.

    An existing path wins over a Hub id of the same spelling; ``hf://`` forces the Hub. ``progress``
    gets what is being done, bytes done and bytes in all while a repository is fetched.

    Raises:
        SourceNotFound: there is neither such a path nor such a repository.
        SourceError: the source cannot be read; see :class:`HuggingFaceFolder` for the kinds.
    """
    name = os.fspath(text)
    path = Path(name)
    try:
        # An empty text would be the working folder.
        exists = bool(name) and not name.startswith(_HUB_SCHEME) and path.exists()
    except (OSError, ValueError) as error:  # too long a name, a NUL byte, no permission
        message = f"cannot look at {quoted(name)}: {error}"
        raise SourceNotFound(message) from None
    if exists:
        if path.is_file() and path.suffix != ".safetensors":
            message = (
                f"{quoted(name)} is not a folder or a .safetensors file; other checkpoint files "
                "are not supported yet"
            )
            raise UnsupportedSource(message)
        try:
            return HuggingFaceFolder(path, weights=weights, ignore_unindexed=ignore_unindexed)
        except OSError as error:
            message = f"cannot read {quoted(error.filename or name)}: {error.strerror}"
            raise SourceError(message) from error
    if not hub.is_hub_id(name):
        message = f"no such folder or file: {quoted(name)}"
        raise SourceNotFound(message)
    snapshot = hub.download(name, progress=progress)
    source = HuggingFaceFolder(snapshot.folder, weights=weights, ignore_unindexed=ignore_unindexed)
    source.notices.extend(snapshot.notices)
    return source
