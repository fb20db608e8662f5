"""From what a person names to an open source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.errors import SourceError, SourceNotFound, UsageError
from blobstore.sources import hub
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.meta.source import MetaFolder, is_meta_folder
from blobstore.sources.pytorch.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from blobstore.sources.base import TensorSource

_HUB_SCHEME = "hf://"


def open_source(
    text: str | os.PathLike[str],
    *,
    weights: str | None = None,
    ignore_unindexed: bool = False,
    subtree: str | None = None,
    keep_names: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> TensorSource:
    """Open a model folder, a weight file, or a Hub repository by its id.

    An existing path wins over a Hub id of the same spelling; ``hf://`` forces the Hub. ``progress``
    gets what is being done, bytes done and bytes in all while a repository is fetched.

    Raises:
        SourceNotFound: there is neither such a path nor such a repository.
        SourceError: the source cannot be read; see :class:`HuggingFaceFolder` for the kinds.
        UsageError: an option does not fit the source.
    """
    name = os.fspath(text)
    path = Path(name)
    try:
        # An empty text would be the working folder.
        exists = bool(name) and not name.startswith(_HUB_SCHEME) and path.exists()
    except (OSError, ValueError) as error:  # too long a name, a NUL byte, no permission
        raise SourceNotFound(f"cannot look at {quote(name)}: {error}") from None
    if exists:
        return _open_path(
            path,
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            keep_names=keep_names,
        )
    if not hub.is_hub_id(name):
        raise SourceNotFound(f"no such folder or file: {quote(name)}")
    snapshot = hub.download(name, progress=progress)
    source = HuggingFaceFolder(
        snapshot.folder, weights=weights, ignore_unindexed=ignore_unindexed, subtree=subtree
    )
    source.notices.extend(snapshot.notices)
    return source


def _open_path(
    path: Path,
    *,
    weights: str | None,
    ignore_unindexed: bool,
    subtree: str | None,
    keep_names: bool,
) -> TensorSource:
    try:
        if path.is_dir() and weights is None and is_meta_folder(path):
            if subtree is not None:
                raise UsageError(
                    f"{quote(path)} has no parts to choose with --subtree: it is Meta's Llama"
                )
            return MetaFolder(path, open_checkpoint, keep_names=keep_names)
        if keep_names:
            raise UsageError(
                f"{quote(path)} is no folder of Meta's, whose names --keep-names would keep"
            )
        return HuggingFaceFolder(
            path, weights=weights, ignore_unindexed=ignore_unindexed, subtree=subtree
        )
    except OSError as error:
        raise SourceError(
            f"cannot read {quote(error.filename or path)}: {error.strerror}"
        ) from error
