"""Opens a source by the text that names it: a path or a Hub id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.escape import quote, quote_place
from blobstore.core.schemes import advice_for, scheme_of
from blobstore.errors import SourceError, SourceNotFound, UsageError
from blobstore.sources import hub
from blobstore.sources.base import DEFAULT_OPTIONS, advising_download
from blobstore.sources.distributed.layout import open_distributed
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.meta.source import MetaFolder, is_meta_folder

if TYPE_CHECKING:
    from blobstore.core.files import Opener
    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions, TensorSource
    from blobstore.sources.fetched_tree import Downloads
    from blobstore.sources.meta.reordered_rows import Shard


def open_source(
    text: str | os.PathLike[str],
    options: SourceOptions = DEFAULT_OPTIONS,
    *,
    downloads: Downloads | None = None,
    progress: Progress | None = None,
) -> TensorSource:
    """Open a model folder, a weight file, or a Hub repository by its id or the URL of its page.

    An existing path wins over a Hub id of the same spelling; ``hf://`` forces the Hub.

    Args:
        text: the path, the Hub id or the URL.
        options: the part to read.
        downloads: where files of the Hub are downloaded to; by default to the cache of the Hub's client.
        progress: called with the current step, bytes done and total bytes while a repository is
            downloaded.

    Raises:
        SourceNotFound: neither a path nor a repository of this name exists.
        SourceError: the source cannot be read; see :class:`HuggingFaceFolder` for the kinds.
        UsageError: an option does not apply to the source.
    """
    if not isinstance(text, str | os.PathLike):
        raise UsageError(f"a source is a path or the id of a repository, got {quote(text)}")
    text, options = hub.with_quantization(os.fspath(text), options)
    name = os.path.expanduser(text)  # noqa: PTH111 - a URL is no path
    path = Path(name)
    try:
        # Path("") would be the working folder.
        is_url = name.startswith(hub.SCHEME) or hub.is_hub_url(name)
        exists = bool(name) and not is_url and path.exists()
    except (OSError, ValueError) as error:  # a name that is too long, a NUL byte, no permission
        raise SourceNotFound(f"cannot access {quote(name)}: {error}") from None
    if not exists:
        if not hub.is_hub_id(name) and not hub.is_hub_url(name):
            advice = advice_for(name, "source")
            if not advice and hub.is_hub_id(f"{hub.SCHEME}{name}"):
                advice = f"for the Hub's repository, say {hub.SCHEME}{name}"
            if scheme_of(name) is not None:
                raise SourceNotFound(
                    f"{quote_place(name)} is an address, not the path of a file or folder",
                    advice=advice,
                )
            raise SourceNotFound(f"no such folder or file: {quote_place(name)}", advice=advice)
        if options.keep_names:  # the files of Meta's releases are not downloaded from the Hub
            raise UsageError(
                f"{quote(name)} is a Hub repository; --keep-names applies only to Meta Llama folders"
            )
        return _open_snapshot(
            hub.download(name, options, downloads=downloads, progress=progress), options
        )
    try:
        with advising_download():
            return _open_local(path, options, progress)
    except OSError as error:
        raise SourceError(
            f"cannot read {quote(error.filename or path)}: {error.strerror}"
        ) from error


def _open_local(path: Path, options: SourceOptions, progress: Progress | None) -> TensorSource:
    if path.is_dir() and options.weights is None and is_meta_folder(path):
        if options.subtree is not None:
            raise UsageError(
                f"{quote(path)} is a Meta Llama folder, which has no parts for --subtree"
            )
        return MetaFolder(path, _open_shard, options)
    if options.keep_names:
        raise UsageError(
            f"{quote(path)} is not a Meta Llama folder; --keep-names applies only to those"
        )
    if (source := open_distributed(path, options)) is not None:
        return source
    if (snapshot := hub.open_cached(path, options, progress=progress)) is not None:
        return _open_snapshot(snapshot, options)
    return HuggingFaceFolder(path, options)


def _open_shard(path: Path, opener: Opener) -> Shard:
    # The readers of pickles take a while to import, and most models need none.
    from blobstore.sources.pytorch.checkpoint import Checkpoint

    return Checkpoint(path, opener=opener)


def _open_snapshot(snapshot: hub.HubSnapshot, options: SourceOptions) -> HuggingFaceFolder:
    source = HuggingFaceFolder(snapshot.folder, options, snapshot.tree)
    source.repository, source.commit = snapshot.repo, snapshot.revision
    source.digests = snapshot.digests
    source.notices.extend(snapshot.notices)
    return source
