"""The operation ``bench``: how fast bytes arrive by bare reads, and how fast by ``open``.

Each measurement reads all bytes again. Before one that is to come from the disk, the system is asked to
drop the pages of the files that it has in memory; nothing else of the page cache changes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import threading
import time
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.core.system import can_drop_pages, direct_flag, drop_pages
from blobstore.core.workers import Steps, check_jobs
from blobstore.errors import NotFound, UnsupportedSource
from blobstore.gguf.file import is_gguf
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.operations.open import open_model
from blobstore.remotes.addresses import find_model, is_address
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.core.workers import WorkerPool
    from blobstore.remotes.model_reader import RemoteModelSource

Place = Literal["disk", "page cache", "network"]

_REQUEST: Final = 8 << 20
_PAGE: Final = 4096
_MAX_BARE: Final = 4 << 30
"""Bytes that bare reads read at most."""
_WAYS: Final[tuple[dict[str, Any], ...]] = ({}, {"prefetch": "read"}, {"read": "pread"})
"""The options of ``open`` that are compared."""
_REMOTE_WAYS: Final = _WAYS[:2]
_FEW: Final = 1 << 30
_PASSES: Final = 3
"""The fastest of so many measurements counts, if there are few bytes."""
_BETTER: Final = 1.2
"""A way that is so many times as fast is worth an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """How fast all bytes arrived in one way."""

    place: Place
    """Where they came from."""
    reader: Literal["bare", "open"]
    how: str
    """The number of threads of bare reads, or the call of ``open``."""
    size: int
    """Bytes."""
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.size / max(self.seconds, 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """The result of :func:`measure_reading`."""

    subject: str
    """The name, path or address."""
    measurements: tuple[Measurement, ...]
    advice: tuple[str, ...]
    """How near ``open`` comes to bare reads, and the options that would help."""
    notices: tuple[str, ...]
    """What was not measured, and why."""


def measure_reading(
    subject: str | os.PathLike[str] | Reference,
    *,
    store: StoreLike = None,
    jobs: int | None = None,
    plain_http: bool | None = None,
    progress: Progress | None = None,
) -> Benchmark:
    """Measure how fast the bytes of a model arrive: by bare reads, and by ``open``.

    Args:
        subject: a model of the store, the address of one in a registry or in object storage, or the
            :class:`~pathlib.Path` of a file or folder, of which bare reads are measured, and ``open`` if it is
            a GGUF file.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        jobs: number of threads of concurrent bare reads; by default 8, for remotes 16.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        progress: called with what is measured, the bytes done and the total.

    Raises:
        ModelNotFound, NotFound: there is no such model, file or folder.
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        RemoteError: the remote cannot be reached, or fails.
        UnsupportedSource: there is nothing to read.
        UsageError: an argument is invalid.
    """
    check_jobs(jobs)
    if is_address(subject):
        return _measure_remote(subject, jobs or 16, plain_http, progress)
    if isinstance(subject, os.PathLike):
        root = Path(subject)
        files, notices = _files_in(root), []
        openable = root if root.is_file() and is_gguf(root) else None
        if openable is None:
            notices.append("open reads models of a store and GGUF files, so it was not measured")
        return _measure_files(str(root), files, openable, None, notices, jobs or 8, progress)
    reference, local = Reference.of(subject), LocalStore.of(store)
    blobs = {blob.digest: blob for blob in local.resolve(reference).layers_of(*media_types.WEIGHTS)}
    cold = {digest for digest in blobs if not local.has_hot(digest)}
    files = [
        Path(local.cold_path(digest) if digest in cold else local.blob_path(digest))
        for digest in blobs
    ]
    notices = []
    if cold:
        notices.append(
            f"{len(cold)} of {len(blobs)} blobs are frozen: bare reads are of compressed bytes, and open "
            "decompresses them, which 'blobstore thaw' would spare"
        )
    return _measure_files(str(reference), files, reference, local, notices, jobs or 8, progress)


# Files


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


def _measure_files(
    subject: str,
    files: Sequence[Path],
    openable: Path | Reference | None,
    store: LocalStore | None,
    notices: list[str],
    jobs: int,
    progress: Progress | None,
) -> Benchmark:
    ranges = list(_ranges([(path, path.stat().st_size) for path in files]))
    size = sum(count for _, _, count in ranges)
    if not size:
        raise UnsupportedSource(f"{quote(subject)} has no bytes to read")
    runs: list[tuple[Place, int | dict[str, Any]]] = []
    places: tuple[Place, ...] = ("disk", "page cache")
    if not can_drop_pages():
        places = ("page cache",)
        notices.append("this system cannot drop pages of files, so the disk was not measured")
    for place in places:
        runs += [(place, count) for count in dict.fromkeys((1, jobs))]
        runs += [(place, way) for way in _WAYS if openable is not None]
    steps = Steps(1, progress)
    done = []
    passes = _PASSES if size < _FEW else 1
    for number, (place, way) in enumerate(runs):
        threads = way if isinstance(way, int) else None
        pool = steps.begin(passes * size, passes * size * (len(runs) - number - 1), threads)
        several = []
        for _ in range(passes):
            if place == "disk":
                _drop_pages(files)
            if isinstance(way, int):
                read = _FileReader(pool, is_direct=place == "disk")
                several.append(_bare(place, way, size, pool, ranges, read))
            elif openable is not None:
                several.append(_opened(place, openable, way, store=store))
                pool.report(size, several[-1].how)
        done.append(max(several, key=attrgetter("rate")))
    return _result(subject, done, notices)


def _ranges(files: Sequence[tuple[Any, int]]) -> Iterator[tuple[Any, int, int]]:
    """Yield file, begin and number of bytes of each request, up to the limit of bare reads."""
    left = _MAX_BARE
    for file, size in files:
        for begin in range(0, min(size, left), _REQUEST):
            yield file, begin, min(_REQUEST, min(size, left) - begin)
        left -= min(size, left)


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

    def __call__(self, item: tuple[Path, int, int]) -> None:
        path, begin, count = item
        if not hasattr(self._local, "buffer"):
            self._local.buffer = memoryview(mmap.mmap(-1, _REQUEST))
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
    steps = Steps(1, progress)
    done = []
    with find_model(address, plain_http=plain_http, with_files=True) as source:
        ranges = list(_ranges([(blob.id, blob.size) for blob in source.blobs]))
        size = sum(count for _, _, count in ranges)
        threads = tuple(dict.fromkeys((1, jobs)))
        for number, count in enumerate(threads):
            later = size * (len(threads) - number - 1 + len(_REMOTE_WAYS))
            pool = steps.begin(size, later, count)
            read = _range_reader(source, pool)
            done.append(_bare("network", count, size, pool, ranges, read))
    opened = address.replace("oci://", "http://", 1) if plain_http else address
    for number, way in enumerate(_REMOTE_WAYS):
        pool = steps.begin(size, size * (len(_REMOTE_WAYS) - number - 1))
        # A store of its own has none of the blobs.
        with tempfile.TemporaryDirectory(prefix="blobstore-") as folder:
            done.append(_opened("network", opened, way, store=LocalStore(folder), cache="none"))
        pool.report(size, done[-1].how)
    return _result(address, done, ())


def _range_reader(
    source: RemoteModelSource, pool: WorkerPool
) -> Callable[[tuple[Any, int, int]], None]:
    def read(item: tuple[Any, int, int]) -> None:
        blob, begin, count = item
        for piece in source.read(blob.digest, blob.size, begin, begin + count):
            pool.report(len(piece), "bare reads")

    return read


# Both


def _bare(
    place: Place,
    threads: int,
    size: int,
    pool: WorkerPool,
    ranges: Sequence[tuple[Any, int, int]],
    read: Callable[[tuple[Any, int, int]], None],
) -> Measurement:
    """Read all ranges on so many threads, and return how long that took."""
    started = time.perf_counter()
    pool.run(ranges, read)
    seconds = time.perf_counter() - started
    how = f"{threads} thread{'s' if threads > 1 else ''}"
    return Measurement(place=place, reader="bare", how=how, size=size, seconds=seconds)


def _opened(
    place: Place, subject: str | Path | Reference, way: dict[str, Any], **options: Any
) -> Measurement:
    """Open the model, touch each page of each tensor, and return how long that took."""
    how = "open(" + ", ".join(f'{name}="{value}"' for name, value in way.items()) + ")"
    size = 0
    started = time.perf_counter()
    with open_model(subject, **options, **way) as model:
        for name in model:
            data = model.view(name).data
            size += data.nbytes
            # One byte per page makes the system provide the page.
            sum(data.cast("B")[::_PAGE])
    seconds = time.perf_counter() - started
    return Measurement(place=place, reader="open", how=how, size=size, seconds=seconds)


def _result(subject: str, done: Sequence[Measurement], notices: Sequence[str]) -> Benchmark:
    advice: list[str] = []
    for place in dict.fromkeys(one.place for one in done):
        bare = max(one.rate for one in done if (one.place, one.reader) == (place, "bare"))
        opened = [one for one in done if (one.place, one.reader) == (place, "open")]
        if not opened:
            continue
        best = max(opened, key=lambda one: one.rate)
        advice.append(f"{place}: {best.how} reaches {best.rate / bare:.0%} of bare reads")
        if best.rate > _BETTER * opened[0].rate:
            times = best.rate / opened[0].rate
            advice.append(f"{place}: {best.how} is {times:.1f} times as fast as {opened[0].how}")
    return Benchmark(
        subject=subject,
        measurements=tuple(done),
        advice=tuple(advice),
        notices=tuple(notices),
    )
