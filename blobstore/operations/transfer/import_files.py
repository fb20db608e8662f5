"""Imports the files of a model that another tool has pushed, as ``create`` imports a folder.

The files have been fetched, and their digests are right. Here they get the names that they have in the
folder, and tars are unpacked; everything else is the work of ``create``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import IO, TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.core.files import make_folders
from blobstore.core.tar_stream import InvalidTar, TarStream
from blobstore.errors import DamagedSource
from blobstore.manifests.file_names import is_safe_name
from blobstore.operations.create.create import create

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from blobstore.core.progress import Progress
    from blobstore.operations.create.create import Created
    from blobstore.registry.layouts.files import RemoteFile
    from blobstore.store.local import LocalStore
    from blobstore.store.names import NameUpdate

_MAX_RATIO: Final = 64
"""Limit of the unpacked size of a compressed tar, in sizes of the tar; beyond :data:`_MIN_LIMIT`."""
_MIN_LIMIT: Final = 64 * 2**20
_MAX_MEMBERS: Final = 100_000
_END: Final = 1024
"""Bytes that are looked for behind a tar whose end is missing."""


def import_files(
    files: Iterable[RemoteFile],
    path_of: Callable[[RemoteFile], Path | None],
    update: NameUpdate,
    *,
    store: LocalStore,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Created:
    """Import fetched files as a model.

    Args:
        files: the files of the model.
        path_of: returns where the content of a file is; None if only the store has it, frozen.
        update: the name.
        store: the store.
        jobs: number of threads; by default one per processor.
        progress: called with the current blob, bytes done and total bytes.

    Raises:
        DamagedSource: a tar is malformed, or has files that must not be written.
        BlobstoreError: as :func:`blobstore.create`.
    """
    with contextlib.ExitStack() as stack:
        with store.writing():
            # The name tells gc whose folder it is: that of a killed process is removed.
            folder = store.folder("temporary") / f"{stack.enter_context(store.lease()).name}-files"
            make_folders(folder.parent, store.root)
            folder.mkdir()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            for file in files:
                _place(file, path_of(file), folder, store)
        # While the lease lives, or gc could remove the folder that is being read.
        return create(folder, update, store=store, jobs=jobs, progress=progress)


def _place(file: RemoteFile, content: Path | None, folder: Path, store: LocalStore) -> None:
    """Give a file its name in the folder, or unpack it there."""
    target = folder / (file.path or f".{file.digest.hex}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        with target.open("xb") as out:
            out.writelines(store.read_pieces(file.digest, file.size))
    else:
        try:
            # A link spares a copy: nobody writes to either name.
            os.link(content, target)
        except OSError:  # the file system has no hard links
            shutil.copyfile(content, target)
    if file.is_tar:
        _unpack(file, target, folder)
        # Only this name of the tar: the partial file stays until the import has succeeded.
        target.unlink()


def _unpack(file: RemoteFile, content: Path, folder: Path) -> None:
    """Write the regular files of a tar. Links and devices are refused, as are unsafe names."""
    import gzip
    import zlib

    import zstandard

    # Without compression, nothing is larger than the tar.
    limit = file.size + _END if not file.compression else max(file.size * _MAX_RATIO, _MIN_LIMIT)
    try:
        with _decompressed(content, file.compression) as stream:
            for number, member in enumerate(TarStream(stream.read, limit).files()):
                name = member.name.removeprefix("./")
                if number >= _MAX_MEMBERS:
                    raise InvalidTar("it unpacks to too much")
                if not (member.is_regular and is_safe_name(name)):
                    raise InvalidTar(f"it has {quote(member.name)}, which must not be written")
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("xb") as out:  # never through a link
                    out.writelines(member.pieces)
    except (
        *(InvalidTar, EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError),
        *(FileExistsError, NotADirectoryError),  # two members are in each other's place
    ) as error:
        raise DamagedSource(f"the tar {file.digest.short} cannot be unpacked: {error}") from None


@contextlib.contextmanager
def _decompressed(content: Path, compression: str) -> Iterator[IO[bytes]]:
    """Open a file, and decompress it while it is read."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(content.open("rb"))
        if compression == "gzip":
            import gzip

            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif compression == "zstd":
            import zstandard

            file = stack.enter_context(zstandard.ZstdDecompressor().stream_reader(file))
        yield file
