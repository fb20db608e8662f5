"""Folders built whole or not at all, and weight files in them filled from blobs.

Every blob is one independent job on a pool of threads: it is read once, from its first byte to its
last, and each tensor is written to its place. Because a blob is always read whole and in order, its
digest is computed on the way, whatever the order of the tensors in the files is (stacked experts
are split over many places), and a damaged blob is found before the folder has its name. Memory is
one buffer a thread.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import sync_folder, write_all
from blobstore.core.mmap import MappedRegion
from blobstore.core.progress import Meter
from blobstore.errors import BlobDamaged, BlobstoreError
from blobstore.store.blobs import ADVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.export.folder import FolderTensor
    from blobstore.operations.export.shards import WeightFile
    from blobstore.store.local import LocalStore


def write_weights(
    store: LocalStore,
    files: Iterable[WeightFile],
    tensors: Sequence[FolderTensor],
    folder: Path,
    progress: Progress | None,
) -> None:
    """Write the weight files of a folder, and check the digests of the blobs on the way.

    Args:
        store: where the blobs are.
        files: what is to be written.
        tensors: all the tensors of ``files``, which are all those of their blobs, blob by blob.
        folder: where they are to be; it exists.
        progress: called with what is being done, bytes done and bytes in all.

    Raises:
        BlobMissing, BlobDamaged: a blob is not whole.
        OSError: a file cannot be written.
    """
    places: dict[str, tuple[Path, int]] = {}
    for file in files:
        path = folder / file.name
        write_new(path, file.header)
        places.update((name, (path, offset)) for name, offset in file.offsets.items())
    total = sum(tensor.spec.nbytes for tensor in tensors)
    copying = _Copying(store, places, Meter(progress, total))
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="blobstore-fill") as pool:
        try:
            jobs = [
                pool.submit(copying.copy, layer, sorted(group, key=attrgetter("begin")))
                # The tensors of a layer follow each other.
                for layer, group in groupby(tensors, key=attrgetter("layer"))
            ]
            for job in as_completed(jobs):
                job.result()
        except BaseException:  # also Ctrl-C: stop the threads before their files are removed
            copying.stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    for path in {path for path, _ in places.values()}:
        _sync(path)


class _Copying:
    """The job of one blob, with what all jobs share."""

    def __init__(
        self, store: LocalStore, places: Mapping[str, tuple[Path, int]], meter: Meter
    ) -> None:
        self.stop = threading.Event()
        self._store = store
        self._places = places
        self._meter = meter

    def copy(self, layer: Descriptor, tensors: Sequence[FolderTensor]) -> None:
        """Write the tensors of a blob, all and in its order, to their places; check its digest.

        Raises:
            BlobMissing, BlobDamaged: the blob is not whole.
            OSError: a file cannot be written.
        """
        try:
            if any(tensor.packed for tensor in tensors):
                self._compute(layer, tensors)
            else:
                self._copy(layer, tensors)
        except BlobstoreError as error:
            where = f"layer {quote(layer.name)}"
            raise error.at(where) from error

    def _copy(self, layer: Descriptor, tensors: Sequence[FolderTensor]) -> None:
        with contextlib.closing(self._store.read_pieces(layer.digest, layer.size)) as pieces:
            blob = _BlobReader(pieces)
            for _ in blob.read(tensors[0].begin):  # the header, only to be hashed
                pass
            for tensor in tensors:
                self._write(tensor.spec, blob.read(tensor.spec.nbytes), layer.name)
        if blob.digester.digest() != layer.digest:
            raise BlobDamaged(
                f"blob {quote(self._store.blob_path(layer.digest))} is damaged: its bytes "
                f"have digest {blob.digester.digest()}{ADVICE}"
            )

    def _compute(self, layer: Descriptor, tensors: Sequence[FolderTensor]) -> None:
        """Write the tensors of a blob, the quantized ones as plain numbers."""
        # A weight and its companions lie apart, so the blob is mapped, and hashed beforehand.
        self._store.check_digest(layer.digest, layer.size)
        region = MappedRegion([layer.size])
        for _ in self._store.map_blobs([(layer.digest, layer.size)], [0], region):
            pass
        for tensor in tensors:
            self._write(tensor.spec, _pieces(tensor, region), layer.name)

    def _write(self, spec: TensorSpec, buffers: Iterable[memoryview], what: str) -> None:
        path, offset = self._places[spec.name]
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            for buffer in buffers:
                if self.stop.is_set():
                    raise BlobstoreError("stopped")
                write_all(descriptor, buffer)
                self._meter.add(len(buffer), what)
        finally:
            os.close(descriptor)


def _pieces(tensor: FolderTensor, region: MappedRegion) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of a mapped blob, of a quantized one as plain numbers."""
    from blobstore.models.dequantize import plain_pieces, transposed_pieces
    from blobstore.models.frameworks import NAMES
    from blobstore.safetensors.numpy import as_bytes

    if tensor.packed is None:
        yield memoryview(region.memory)[tensor.begin : tensor.begin + tensor.spec.nbytes]
        return
    name = NAMES[tensor.spec.dtype]
    if tensor.is_transposed:
        for array in transposed_pieces(tensor.packed, region.memory, name, tensor.part):
            yield as_bytes(array)
        return
    for array in plain_pieces(tensor.packed, region.memory, name, tensor.part):
        yield as_bytes(array)


class _BlobReader:
    """The bytes of a blob from the first to the last, hashed as they are read."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self.digester = Digester()
        self._pieces = pieces
        self._left = memoryview(b"")
        """What is left of the last piece."""

    def read(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces, each good until the next is asked for.

        Raises:
            BlobDamaged: the blob ends before, or cannot be read.
        """
        while size:
            if not self._left:
                self._left = next(self._pieces, self._left)
            if not self._left:
                raise BlobDamaged(
                    f"the blob ended at byte {self.digester.size}, {size} bytes too early"
                )
            piece, self._left = self._left[:size], self._left[size:]
            self.digester.update(piece)
            yield piece
            size -= len(piece)


# The folder.


def free_target(folder: str | os.PathLike[str]) -> Path:
    """Return the real path of a folder that can be made.

    Raises:
        BlobstoreError: something is there, or it is a folder that cannot be replaced.
    """
    try:
        target = Path(os.path.realpath(folder))
        if not os.path.lexists(target):
            return target
        is_empty = target.is_dir() and not any(target.iterdir())
        # Neither could be replaced by the finished folder without surprise.
        is_fixed = target.is_mount() or target == Path.cwd()
    except (OSError, ValueError) as error:
        raise BlobstoreError(f"cannot look at {quote(os.fspath(folder))}: {error}") from error
    if not is_empty:
        raise BlobstoreError(f"{quote(target)} exists already; choose a new or an empty folder")
    if is_fixed:
        raise BlobstoreError(
            f"{quote(target)} is a mount point or the working directory; choose a new folder "
            "inside it"
        )
    return target


@contextlib.contextmanager
def building(target: Path) -> Iterator[Path]:
    """Give a temporary folder that becomes ``target`` on success and vanishes on an error."""
    folder = target.parent / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        yield folder
        for inner in (*folder.rglob("*/"), folder):
            sync_folder(inner)
        folder.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_new(path: Path, data: Buffer) -> None:
    """Write a file that must not exist yet, durably."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusively, for a file system may hold two names to be one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
