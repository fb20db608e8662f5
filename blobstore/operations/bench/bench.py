"""The operation ``bench``: how fast bytes arrive by bare reads and copies, and how fast by ``open``.

Each measurement reads all bytes again. Before one that is to come from the disk, the system is asked to
drop the pages of the files that it has in memory; nothing else of the page cache changes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import interrupts
from blobstore.core.escape import cli_command, quote, quote_url, without_secrets
from blobstore.core.files import open_regular
from blobstore.core.mmap import new_buffer
from blobstore.core.system import available_memory, can_drop_pages, direct_flag, drop_pages
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, NotFound, UnsupportedSource, UsageError
from blobstore.gguf.file import is_gguf
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.bench.device import AUTO, NONE, runs_to, target_of
from blobstore.operations.bench.measurements import (
    Benchmark,
    Measurement,
    Place,
    Run,
    advice_of,
    call_of_open,
    fits,
    measure_all,
    passes_of,
)
from blobstore.operations.open import open_model
from blobstore.remotes.addresses import find_model, is_address
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.core.workers import WorkerPool
    from blobstore.models.frameworks import ArrayTarget
    from blobstore.remotes.model_reader import RemoteModelSource

    _Range = tuple[Any, int, int]
    """A request: the path of a file, or the id of a blob; where the bytes begin; and how many."""

_REQUEST: Final = 8 << 20
_PAGE: Final = 4096
_MAX_BARE: Final = 4 << 30
"""Bytes that bare reads read at most."""
_WAYS: Final[tuple[dict[str, Any], ...]] = ({}, {"read": "populate"}, {"read": "pread"})
"""The options of ``open`` that are compared."""
_MAPPED: Final = _WAYS[:2]
"""Measurements that leave bytes in the page cache, or in a remote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """What lies on this machine."""

    name: str
    paths: list[Path]
    size: int
    """The bytes of the files, before compression."""
    openable: Path | Reference | None
    """What ``open`` reads, if it reads this."""
    store: LocalStore | None = None
    is_frozen: bool = False


def measure_reading(
    subject: str | os.PathLike[str] | Reference,
    *,
    store: StoreLike = None,
    device: str = NONE,
    jobs: int | None = None,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Benchmark:
    """Measure how fast the bytes of a model arrive: by bare reads and copies, and by ``open``.

    Args:
        subject: a model of the store, the address of one in a registry or in object storage, or the
            :class:`~pathlib.Path` of a file or folder, of which bare reads are measured, and ``open`` if it is
            a GGUF file.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        device: ``cpu``, ``cuda`` or ``cuda:N`` of torch, onto which the model is loaded too; ``none``; or
            ``auto``, the first CUDA device if torch can use one. What keeps that one from being measured is
            a notice, and no error.
        jobs: number of threads of concurrent bare reads; by default 8, for remotes 16.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        progress: called with what is measured, the bytes done and the total.

    Raises:
        ModelNotFound, NotFound: there is no such model, file or folder.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        RemoteError: the remote cannot be reached, or fails.
        UnsupportedSource: there is nothing to read.
        UsageError: an argument is invalid, there is no such device, or one is named for what is not
            loaded from this machine.
        MissingLibrary: a device is named, and torch is not installed.
        BlobstoreError: the device has too little memory, or fails.
    """
    check_jobs(jobs)
    notices: list[str] = []
    is_named = device not in (AUTO, NONE)
    if is_address(subject):
        if is_named:
            raise UsageError(
                f"{quote_url(subject)} is not on this machine, from where bytes are copied to a device",
                advice=f"{cli_command('pull', without_secrets(subject))} fetches it",
            )
        return _measure_remote(subject, jobs or 16, plain_http, progress)
    if isinstance(subject, os.PathLike):
        files = _files_of_path(Path(subject), notices)
    else:
        files = _files_of_model(Reference.of(subject), LocalStore.to_read(store), notices)
    if is_named and files.openable is None:
        raise UsageError(
            f"{quote(files.name)} is no model of a store and no GGUF file, which are loaded onto a device",
            advice="'blobstore create' imports models",
        )
    target = None if files.openable is None else target_of(device)
    runs = _runs(files, target, jobs or 8, notices, is_optional=not is_named)
    return _result(files.name, measure_all(runs, progress, notices), notices)


# Files


def _files_of_model(reference: Reference, store: LocalStore, notices: list[str]) -> _Files:
    layers = store.resolve(reference).layers_of(*media_types.WEIGHTS)
    for blob in layers:
        store.check_size(blob.digest, blob.size)
    blobs = {blob.digest: blob.size for blob in layers}
    stores = {
        digest: store.shared if store.shared and store.is_shared(digest) else store
        for digest in blobs
    }
    cold = {digest for digest, its in stores.items() if not its.has_hot(digest)}
    if cold:
        notices.append(
            f"{len(cold)} of {len(blobs)} blobs are frozen: bare reads are of compressed bytes, and open "
            "decompresses them, which 'blobstore thaw' would spare"
        )
    return _Files(
        name=str(reference),
        paths=[
            Path(its.cold_path(digest) if digest in cold else its.blob_path(digest))
            for digest, its in stores.items()
        ],
        size=sum(blobs.values()),
        openable=reference,
        store=store,
        is_frozen=bool(cold),
    )


def _files_of_path(root: Path, notices: list[str]) -> _Files:
    paths = _files_in(root)
    size = sum(path.stat().st_size for path in paths)
    openable = root if root.is_file() and is_gguf(root) else None
    if openable is None:
        notices.append("open reads models of a store and GGUF files, so it was not measured")
    return _Files(name=str(root), paths=paths, size=size, openable=openable)


def _files_in(root: Path) -> list[Path]:
    """Return the regular files of a folder, or the file itself, the largest first."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise NotFound(f"no such file or folder: {quote(root)}")
    found = [
        (path.stat().st_size, path)
        for folder, _, names in os.walk(root)
        for name in names
        if (path := Path(folder, name)).is_file() and not path.is_symlink()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def _runs(
    files: _Files, target: ArrayTarget | None, jobs: int, notices: list[str], *, is_optional: bool
) -> list[Run]:
    """Return all ways to measure. If the device is optional, its errors are notices."""
    ranges = list(_ranges([(path, path.stat().st_size) for path in files.paths]))
    if not ranges:
        raise UnsupportedSource(f"{quote(files.name)} has no bytes to read")
    before: dict[Place, Callable[[], object]] = {
        "disk": functools.partial(_drop_pages, files.paths)
    }
    if not can_drop_pages():
        before.clear()
        notices.append("this system cannot drop pages of files, so the disk was not measured")
    before["page cache"] = lambda: None
    ways = () if files.openable is None else _ways_of(files, notices)
    runs = []
    for place, prepare in before.items():
        runs += [_bare_run(place, prepare, ranges, count) for count in dict.fromkeys((1, jobs))]
        runs += [_open_run(place, prepare, files, way) for way in ways]
    if target is None or files.openable is None:
        return runs
    try:
        added = runs_to(target, files.openable, files.store, before, ways, jobs, notices)
        runs += [dataclasses.replace(run, is_optional=is_optional) for run in added]
    except BlobstoreError as error:
        if not is_optional:
            raise
        notices.append(f"{target.device} was not measured: {error}")
    return runs


def _ways_of(files: _Files, notices: list[str]) -> Sequence[dict[str, Any]]:
    """Return the options of ``open`` for which there is enough memory."""
    if fits(files.size, available_memory()):
        return _WAYS
    left_out = "" if files.is_frozen else ' with read="pread"'
    notices.append(f"too little memory is left for the model, so open was not measured{left_out}")
    return () if files.is_frozen else _MAPPED


def _bare_run(
    place: Place, before: Callable[[], object], ranges: Sequence[_Range], threads: int
) -> Run:
    size = _size_of(ranges)

    def measure(pool: WorkerPool) -> Measurement:
        reader = _FileReader(pool, is_direct=place == "disk")
        return _bare(place, threads, pool, ranges, reader)

    return Run(measure=measure, before=before, size=size, passes=passes_of(size), threads=threads)


def _open_run(
    place: Place, before: Callable[[], object], files: _Files, way: dict[str, Any]
) -> Run:
    def measure(pool: WorkerPool) -> Measurement:
        found = _opened(place, files.openable, way, pool, store=files.store)
        pool.report(max(files.size - found.size, 0), found.how)  # headers
        return found

    return Run(measure=measure, before=before, size=files.size, passes=passes_of(files.size))


def _ranges(files: Sequence[tuple[Any, int]]) -> Iterator[_Range]:
    """Yield the requests for these files, up to the limit of bare reads."""
    left = _MAX_BARE
    for file, size in files:
        for begin in range(0, min(size, left), _REQUEST):
            yield file, begin, min(_REQUEST, min(size, left) - begin)
        left -= min(size, left)


def _size_of(ranges: Sequence[_Range]) -> int:
    return sum(count for _, _, count in ranges)


def _drop_pages(files: Sequence[Path]) -> None:
    for path in files:
        with contextlib.suppress(OSError):
            descriptor, _ = open_regular(path)
            try:
                drop_pages(descriptor)
            finally:
                os.close(descriptor)


class _FileReader:
    """Reads ranges of files into one buffer per thread; past the page cache, if the file system can."""

    def __init__(self, pool: WorkerPool, *, is_direct: bool) -> None:
        self._pool = pool
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (direct_flag() if is_direct else 0)
        self._local = threading.local()

    def __call__(self, item: _Range) -> None:
        path, begin, count = item
        if not hasattr(self._local, "buffer"):
            self._local.buffer = new_buffer(_REQUEST)
        self._read(path, begin, count)
        self._pool.report(count, "bare reads")

    def _read(self, path: Path, begin: int, count: int) -> None:
        try:
            descriptor = os.open(path, self._flags)
        except OSError:  # the file system has no O_DIRECT
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at = 0
            # With O_DIRECT, requests are of whole pages; only the end of a file is shorter.
            while at < count:
                got = os.preadv(descriptor, [self._local.buffer[at:]], begin + at)
                if not got:
                    return
                at += got
        finally:
            os.close(descriptor)


# Remotes


def _measure_remote(
    address: str, jobs: int, plain_http: bool | None, progress: Progress | None
) -> Benchmark:
    notices: list[str] = []
    with find_model(address, plain_http=plain_http, with_files=True) as source:
        ranges = list(_ranges([(blob.id, blob.size) for blob in source.blobs]))
        size = sum(blob.size for blob in source.blobs)
        if not ranges:
            raise UnsupportedSource(f"{quote_url(address)} has no bytes to read")
        runs = [_remote_run(source, ranges, threads) for threads in dict.fromkeys((1, jobs))]
        if fits(size, available_memory()):
            scheme = {None: "oci://", True: "http://", False: "https://"}[plain_http]
            opened = address.replace("oci://", scheme, 1)
            runs += [_remote_open_run(opened, size, way) for way in _MAPPED]
        else:
            notices.append("too little memory is left for the model, so open was not measured")
        return _result(address, measure_all(runs, progress, notices), notices)


def _remote_run(source: RemoteModelSource, ranges: Sequence[_Range], threads: int) -> Run:
    def measure(pool: WorkerPool) -> Measurement:
        return _bare("network", threads, pool, ranges, _range_reader(source, pool))

    return Run(measure=measure, size=_size_of(ranges), threads=threads)


def _remote_open_run(address: str, size: int, way: dict[str, Any]) -> Run:
    def measure(pool: WorkerPool) -> Measurement:
        # A store of its own has none of the blobs.
        with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
            store = LocalStore(folder)
            return _opened("network", address, way, pool, store=store, cache="none")

    return Run(measure=measure, size=size)


def _range_reader(source: RemoteModelSource, pool: WorkerPool) -> Callable[[_Range], None]:
    def read(item: _Range) -> None:
        blob, begin, count = item
        for piece in source.read(blob.digest, blob.size, begin, begin + count):
            pool.report(len(piece), "bare reads")

    return read


# Both


def _bare(
    place: Place,
    threads: int,
    pool: WorkerPool,
    ranges: Sequence[_Range],
    read: Callable[[_Range], None],
) -> Measurement:
    """Read all ranges on so many threads, and return how long that took."""
    started = time.perf_counter()
    pool.run(ranges, read)
    seconds = time.perf_counter() - started
    how = f"{threads} thread{'s' if threads > 1 else ''}"
    return Measurement(place=place, reader="bare", how=how, size=_size_of(ranges), seconds=seconds)


def _opened(
    place: Place, subject: Any, way: dict[str, Any], pool: WorkerPool, **options: Any
) -> Measurement:
    """Open the model, touch each page of each tensor, and return how long that took."""
    how, size = call_of_open(way), 0
    started = time.perf_counter()
    with open_model(subject, **options, **way) as model:
        reading = model.read_ahead()
        for name in model:
            interrupts.check()
            data = model.view(name).data
            size += data.nbytes
            # One byte per page makes the system provide the page.
            sum(data.cast("B")[::_PAGE])
            pool.report(data.nbytes, how)
    seconds = time.perf_counter() - started
    if place == "network":
        reading = None
    return Measurement(
        place=place, reader="open", how=how, size=size, seconds=seconds, reading=reading
    )


def _result(subject: str, done: Sequence[Measurement], notices: Sequence[str]) -> Benchmark:
    return Benchmark(
        subject=subject,
        measurements=tuple(done),
        advice=advice_of(done),
        notices=tuple(notices),
    )
