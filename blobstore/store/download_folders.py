"""Folders of files that are downloaded to be imported.

A folder stays if the import is stopped or the connection is lost: the same command then continues it, and ``gc``
removes it when it is old. It is removed after the import, if its files are damaged, and if the disk is full.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import time
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote_place
from blobstore.core.files import make_folders
from blobstore.errors import BlobstoreError, DamagedSource, StoreBusy
from blobstore.store.locks import try_lock
from blobstore.store.partial import FULL
from blobstore.store.scan import is_folder, scan_folder, walk_files

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from blobstore.core.progress import Progress
    from blobstore.store.local import LocalStore

_PAUSE: Final = 0.1
_WAITERS: Final = "waiters"
"""The folder that processes lock which wait for the files."""


class Downloads:
    """The folders of one import, or of several from one source."""

    def __init__(
        self,
        store: LocalStore,
        *,
        is_quantized: bool,
        is_shared: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Make no folder yet.

        Args:
            store: what gets the models.
            is_quantized: whether it gets fewer bytes than the weights have.
            is_shared: whether parts of a source share a folder; :meth:`remove` then removes what was imported.
            progress: called while another process has the folder.
        """
        self._store = store
        self._progress = progress
        self._is_quantized = is_quantized
        self._is_shared = is_shared
        self._needed = 0
        self._folders: dict[Path, str] = {}
        """The folders that this process uses, and their sources."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)
        if self._needed and is_full(error):
            raise self._store.no_space(self._needed) from error

    def folder(self, source: str, version: str, part: str = "") -> Path:
        """Return the folder for files of a version of a source, or of a part of it, which only this process uses.

        If another process has it, this one waits for it, and gets its files.

        Raises:
            StoreBusy: another process was downloading the same for ``lock_timeout`` seconds.
            StoreError: the store cannot be written, or its file system has no locks.
        """
        name = f"{source} {version}" + (f" {part}" if part and not self._is_shared else "")
        folder = self._store.folder("downloads") / Digest.of(name.encode()).hex
        if folder not in self._folders:
            self._stack.enter_context(_locked(self._store, folder, source, self._progress))
            self._folders[folder] = source
        return folder

    def remove(self, names: Iterable[str]) -> None:
        """Remove files of a shared folder, which no other import needs, by their ends."""
        for folder in self._folders:
            for name in names:
                for path in folder.glob(f"*/{glob.escape(name)}"):
                    path.unlink()

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Let errors of the block say where the files are for the user."""
        try:
            yield
        except BlobstoreError as error:
            for folder, source in self._folders.items():
                below = re.escape(str(folder)) + r"/\w+"
                error.message = source.join(re.split(below, error.message))
            error.args = (error.message,)
            raise

    def check_space(self, to_fetch: int, weights: int) -> None:
        """Check that files can be downloaded, and their weights be stored next to them.

        The store may have some of the weights. How many is known only after the download, so all bytes that it
        has may be those.

        Raises:
            StoreError: there is not enough space.
        """
        self._needed = to_fetch if self._is_quantized else to_fetch + weights
        if self._needed > self._store.free_space():
            there = sum(entry.stat().st_size for entry in scan_folder(self._store.folder("blobs")))
            self._store.check_space(max(to_fetch, self._needed - there))


@contextlib.contextmanager
def _locked(
    store: LocalStore, folder: Path, source: str, progress: Progress | None
) -> Iterator[None]:
    with store.writing():
        descriptor = _lock(store, folder, source, progress)
        for entry in walk_files(folder):
            if is_folder(entry.path):  # a link of a stranger: ours lead to files
                folder.joinpath(entry.path).unlink()
    try:
        try:
            yield
        except BaseException as error:
            if isinstance(error, DamagedSource) or is_full(error):
                shutil.rmtree(folder, ignore_errors=True)
            raise
        if not _is_awaited(store, folder):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):  # it has files
            folder.rmdir()
        os.close(descriptor)


def _lock(store: LocalStore, folder: Path, source: str, progress: Progress | None) -> int:
    """Return the descriptor of the folder, which this process has locked."""
    deadline = time.monotonic() + store.lock_timeout
    waiter = None
    with contextlib.ExitStack() as stack:
        while (descriptor := _try(store, folder, fcntl.LOCK_EX)) is None:
            if time.monotonic() >= deadline:
                raise StoreBusy(
                    f"another process is downloading {quote_place(source)}; try again, or wait longer"
                )
            if progress is not None:
                progress(f"waiting for the process that downloads {source}", 0, 0)
            if waiter is None:
                waiter = _try(store, folder / _WAITERS, fcntl.LOCK_SH)
                if waiter is not None:
                    stack.callback(os.close, waiter)
            interrupts.sleep(_PAUSE)
        return descriptor


def _is_awaited(store: LocalStore, folder: Path) -> bool:
    """Return whether another process waits for the files of a folder."""
    if not is_folder(folder / _WAITERS):
        return False
    descriptor = _try(store, folder / _WAITERS, fcntl.LOCK_EX)
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None


def _try(store: LocalStore, path: Path, kind: int) -> int | None:
    """Return the descriptor of a folder, which is made, if its lock is free."""
    make_folders(path, store.root)
    with contextlib.suppress(FileNotFoundError):  # its process has just removed it
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        with contextlib.ExitStack() as failing:
            failing.callback(os.close, descriptor)
            if try_lock(descriptor, kind, store.root) and os.path.samestat(
                path.lstat(), os.fstat(descriptor)
            ):
                failing.pop_all()
                return descriptor
    return None


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or what caused it, is that the disk has no space left."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        error = error.__cause__ or error.__context__
    return False
