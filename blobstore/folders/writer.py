"""Writes the weight files of a folder from blobs, in a folder that appears complete or not at all.

Each blob is one job of a thread pool. It is read once, from start to end, and each tensor is written
to its offset in a file. The digest is computed on the way, even if the tensors of a blob are
scattered over many files, as stacked experts are. So a damaged blob is found before the folder gets
its name. A file whose own digest is known is one job instead, written from start to end. Each thread
needs one buffer.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.core import interrupts
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digester
from blobstore.core.escape import quote
from blobstore.core.files import make_folders, sync_folder, write_all
from blobstore.core.mmap import MappedRegion
from blobstore.core.targets import check_target
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, BlobstoreError, UsageError
from blobstore.store.blobs import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.folders.export_plan import FolderTensor
    from blobstore.folders.shards import WeightFile
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.local import LocalStore

_BUFFER_SIZE = 4 << 20
_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
"""Endings that a user gives to a file, and not to a folder."""
_WEIGHTS = (".safetensors", ".safetensors.index.json")
"""Endings of files of an older export that another form of export may lack."""


def write_weights(
    store: LocalStore,
    files: Iterable[WeightFile],
    tensors: Sequence[FolderTensor],
    folder: Path,
    jobs: int | None,
    progress: Progress | None,
) -> None:
    """Write the weight files of a folder, and check the digests of the blobs on the way.

    Args:
        store: where the blobs are.
        files: the files to write.
        tensors: all tensors of ``files``, grouped by blob. They are all tensors of their blobs.
        folder: an existing folder.
        jobs: number of threads; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing or damaged.
        OSError: a file cannot be written.
    """
    places: dict[str, tuple[Path, int]] = {}
    whole = []
    paths = []
    for file in files:
        path = folder / file.name
        paths.append(path)
        write_new(path, file.header)
        if file.sha256 is not None:
            whole.append(file)
            continue
        places.update((name, (path, offset)) for name, offset in file.offsets.items())
        with path.open("r+b") as stream:
            for offset, data in file.constants:
                stream.seek(offset)
                stream.write(data)
    pool = WorkerPool(jobs, progress, sum(tensor.spec.nbytes for tensor in tensors))
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    pool.run(whole, lambda file: _write_file(store, pool, file, by_name, folder))
    by_blob = [
        sorted(group, key=attrgetter("begin"))
        for _, group in groupby(
            (tensor for tensor in tensors if tensor.spec.name in places), key=attrgetter("layer")
        )
    ]
    pool.run(by_blob, partial(_write_blob, store, pool, places))
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_file(
    store: LocalStore,
    pool: WorkerPool,
    file: WeightFile,
    tensors: Mapping[str, FolderTensor],
    folder: Path,
) -> None:
    """Write all tensors of a file whose digest is known, in their order: a job of ``pool``."""
    digester = Digester()
    with (folder / file.name).open("r+b", buffering=0) as stream:
        for piece in read_file(store, file, tensors, pool.report):
            digester.update(piece)
            write_all(stream.fileno(), piece)
    if digester.digest() == file.sha256:
        return
    layers = {tensors[name].layer.id: tensors[name].layer for name in file.offsets}
    for layer in layers.values():  # the damaged one, if any, explains it
        try:
            store.check_digest(layer.digest, layer.size)
        except BlobstoreError as error:
            raise error.at(f"layer {quote(layer.name)}") from error
    raise BlobDamaged(
        f"file {quote(file.name)} of the source has digest {digester.digest()}, but the source layer "
        f"records {file.sha256}, although all blobs are intact"
    )


def read_file(
    store: LocalStore,
    file: WeightFile,
    tensors: Mapping[str, FolderTensor],
    report: Callable[[int, str], None],
    read: Callable[[FolderTensor], Iterator[memoryview]] | None = None,
) -> Iterator[Buffer]:
    """Yield the bytes of a weight file in order; a piece is valid until the next one.

    ``report`` is called with the bytes and the layer of each piece of a tensor. Digests of blobs are not
    checked, unless ``read``, which yields the bytes of a tensor, does that. The tensors are as stored, none of
    them dequantized.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing, or has another size.
    """
    read = read or partial(read_tensor, store, memoryview(bytearray(_BUFFER_SIZE)))
    parts: list[tuple[int, FolderTensor | bytes]] = [
        *((offset, tensors[name]) for name, offset in file.offsets.items()),
        *file.constants,
    ]
    yield file.header
    for _, part in sorted(parts, key=itemgetter(0)):
        if isinstance(part, bytes):
            yield part
            continue
        pieces = read(part)
        for piece in _reciprocal(pieces) if part.is_reciprocal else pieces:
            yield piece
            report(len(piece), part.layer.name)


def read_tensor(
    store: LocalStore, buffer: memoryview, tensor: FolderTensor
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor as stored, in a buffer; see :func:`read_file`."""
    layer = tensor.layer
    for done in range(0, tensor.spec.nbytes, len(buffer)):
        piece = buffer[: tensor.spec.nbytes - done]
        store.read_into(layer.digest, layer.size, tensor.begin + done, piece)
        yield piece


def _write_blob(
    store: LocalStore,
    pool: WorkerPool,
    places: Mapping[str, tuple[Path, int]],
    tensors: Sequence[FolderTensor],
) -> None:
    """Write all tensors of one blob to their places: a job of ``pool``."""
    layer = tensors[0].layer
    try:
        with contextlib.closing(_tensor_bytes(store, tensors)) as contents:
            for tensor, pieces in contents:
                path, offset = places[tensor.spec.name]
                descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    os.lseek(descriptor, offset, os.SEEK_SET)
                    for piece in pieces:
                        write_all(descriptor, piece)
                        pool.report(len(piece), layer.name)
                finally:
                    os.close(descriptor)
    except BlobstoreError as error:
        raise error.at(f"layer {quote(layer.name)}") from error


def _tensor_bytes(
    store: LocalStore, tensors: Sequence[FolderTensor]
) -> Generator[tuple[FolderTensor, Iterator[memoryview]], None, None]:
    """Yield each tensor of a blob with its bytes, to be read at once; check the blob's digest.

    Raises:
        BlobMissing, BlobDamaged: the blob is missing or damaged.
    """
    layer = tensors[0].layer
    if any(tensor.packed for tensor in tensors):
        # A weight and its quantization parameters lie apart, so the blob is mapped, and hashed before.
        store.check_digest(layer.digest, layer.size)
        region = MappedRegion([layer.size])
        store.map_blob(layer.digest, layer.size, 0, region)
        for tensor in tensors:
            yield tensor, _dequantized(tensor, region)
        return
    with contextlib.closing(store.read_pieces(layer.digest, layer.size)) as pieces:
        blob = HashedBlob(pieces)
        for tensor in tensors:
            blob.skip(tensor.begin - blob.digester.size)
            data = blob.read(tensor.spec.nbytes)
            yield tensor, _reciprocal(data) if tensor.is_reciprocal else data
        blob.skip(layer.size - blob.digester.size)
    blob.check(store, layer)


def _dequantized(tensor: FolderTensor, region: MappedRegion) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of a mapped blob, dequantized if it is quantized."""
    from blobstore.models.dequantize import plain_pieces, transposed_pieces
    from blobstore.models.frameworks import NAMES
    from blobstore.safetensors.numpy import as_bytes

    if tensor.packed is None:
        yield memoryview(region.memory)[tensor.begin : tensor.begin + tensor.spec.nbytes]
        return
    pieces = transposed_pieces if tensor.is_transposed else plain_pieces
    for array in pieces(tensor.packed, region.memory, NAMES[tensor.spec.dtype], tensor.part):
        yield as_bytes(array)


def _reciprocal(pieces: Iterator[memoryview]) -> Iterator[memoryview]:
    """Yield the bytes of the reciprocal of an F32 value."""
    import numpy as np

    with np.errstate(all="ignore"):
        yield memoryview((np.float32(1) / np.frombuffer(b"".join(pieces), "<f4")).tobytes())


class HashedBlob:
    """Reads a blob from start to end, and hashes it on the way."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self.digester = Digester()
        self._pieces = pieces
        self._left = memoryview(b"")
        """The unread rest of the last piece."""

    def skip(self, size: int) -> None:
        """Hash the next ``size`` bytes: a header, or tensors that the folder does not have."""
        for _ in self.read(size):
            pass

    def read(self, size: int) -> Iterator[memoryview]:
        """Yield the next ``size`` bytes in pieces. Each is valid until the next is requested.

        Raises:
            BlobDamaged: the blob ends too early or cannot be read.
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

    def check(self, store: LocalStore, layer: Descriptor) -> None:
        """Check the digest of the bytes, all of which were read."""
        if self.digester.digest() != layer.digest:
            raise BlobDamaged(
                f"blob {quote(store.blob_path(layer.digest))} is damaged: its bytes "
                f"have digest {self.digester.digest()}",
                advice=ADVICE,
            )


# The folder


def resolve_target(folder: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Return the real path of a folder that does not exist yet, is empty, or may be replaced.

    Raises:
        BlobstoreError: it exists and is not empty, is a mount point, or is the working directory.
        UsageError: it would be called as a file of weights.
    """
    try:
        target = Path(os.path.realpath(local_path(folder)))
        check_target(target)
        is_new = not os.path.lexists(target)
        is_empty = is_new or (target.is_dir() and not any(target.iterdir()))
        # Replacing one of these would surprise its users.
        is_fixed = target.is_mount() or target == Path.cwd()
    except (OSError, ValueError) as error:
        raise BlobstoreError(f"cannot access {quote(os.fspath(folder))}: {error}") from error
    if is_new and target.suffix in _FILES:
        raise UsageError(f"{quote(target)} would be a folder with the name of a file")
    if not is_empty and not (force and target.is_dir()):
        raise BlobstoreError(
            f"{quote(target)} exists already",
            advice="choose a new or an empty folder, or replace the model in it with force=True",
        )
    if is_fixed:
        raise BlobstoreError(
            f"{quote(target)} is a mount point or the working directory; choose a new folder "
            "inside it"
        )
    return target


@contextlib.contextmanager
def atomic_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Create a temporary folder that becomes ``target`` on success and is removed on an error.

    With ``force``, it replaces the files of a model there.
    """
    folder = target.parent / f".{os.getpid()}-{secrets.token_hex(8)}.tmp"
    try:
        make_folders(target.parent, target.parent)
        folder.mkdir()
        yield folder
        for inner in (*folder.rglob("*/"), folder):
            sync_folder(inner)
        if force and target.is_dir() and any(target.iterdir()):
            _replace_export(target, folder)
        else:
            folder.replace(target)
        sync_folder(target.parent)
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(target)}: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace_export(target: Path, folder: Path) -> None:
    """Put a complete folder in the place of one with files of a model, and then remove that.

    Raises:
        BlobstoreError: the older folder has files besides weights that this model does not have.
    """
    for path in target.rglob("*"):
        name = path.relative_to(target)
        is_folder = path.is_dir() and not path.is_symlink()
        if not (is_folder or os.path.lexists(folder / name) or path.name.endswith(_WEIGHTS)):
            raise BlobstoreError(
                f"{quote(target)} has the file {quote(name)}, which is not one of this model; remove "
                "it, or choose a new folder"
            )
    old = folder.with_suffix(".old")
    target.replace(old)
    try:
        folder.replace(target)
    except OSError:
        old.replace(target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def write_blob(store: LocalStore, layer: Descriptor, path: Path) -> None:
    """Write the bytes of a blob to a new file, and check their digest.

    Raises:
        BlobMissing, BlobDamaged: the blob is missing or damaged.
    """
    with contextlib.closing(store.read_pieces(layer.digest, layer.size)) as pieces:
        blob = HashedBlob(pieces)
        write_new(path, blob.read(layer.size))
    blob.check(store, layer)


def write_new(path: Path, data: Buffer | Iterator[Buffer]) -> None:
    """Write and sync a file that must not exist yet, from bytes or pieces of them."""
    interrupts.check()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive, because a file system may treat two names as one.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        for piece in data if isinstance(data, Iterator) else (data,):
            write_all(descriptor, piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
