"""The digests of the files of a model's folder, mostly without reading a weight.

A small file is a blob, and so is each weight file of a folder of links. The source record may have the
digests of the files that a model was imported from. All other weight files are put together and hashed; on
the way, blobs are hashed that were not verified before.
"""

from __future__ import annotations

import contextlib
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Literal, NamedTuple

from blobstore.core.digest import Digest, Digester
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobstoreError, Damaged
from blobstore.folders.export_plan import check_no_gguf
from blobstore.folders.files import files_of
from blobstore.folders.link_plan import plan_links
from blobstore.folders.writer import HashedBlob, read_file, read_tensor
from blobstore.manifests import media_types
from blobstore.manifests.file_names import check_paths
from blobstore.models.contents import ModelContents
from blobstore.store.verified_cache import VerifiedBlobs

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence
    from typing import Self

    from typing_extensions import Buffer

    from blobstore.core.digest import BlobId
    from blobstore.core.progress import Progress
    from blobstore.folders.export_plan import FolderTensor
    from blobstore.folders.shards import WeightFile
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.store.local import LocalStore
    from blobstore.store.verified_cache import BlobState

_PIECE = 4 << 20
_OPEN_BLOBS = 8
"""Of a file. Tensors of a few blobs may take turns: those of experts do."""
_AHEAD = 4
"""Pieces that wait to be hashed."""
Layout = Literal["export", "link"]
"""The folder that ``export`` writes without options, or that of ``link``."""


class FolderDigests(NamedTuple):
    """The files of a folder."""

    files: dict[str, Digest]
    """By their names, relative to the folder."""
    hashed: int
    """Weight files that had to be put together and hashed."""
    bytes_hashed: int


def folder_digests(
    store: LocalStore,
    manifest: Manifest,
    layout: Layout,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> FolderDigests:
    """Return the digests of the files that ``export`` or ``link`` would write.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        BlobstoreError: the model has no such folder.
    """
    model = ModelContents(store, manifest)
    if layout == "export" and (known := _recorded(model)) is not None:
        return FolderDigests(known, 0, 0)
    files: dict[str, Digest] = {}
    if layout == "export":
        plan = files_of(model)
        weights, tensors = plan.weights, list(plan.tensors)
        contents, written = plan.files, plan.written
    else:
        links = plan_links(model)
        files |= {name: layer.digest for name, layer in links.links}
        weights = [*(item.file for item in links.relabelled), *links.gathered]
        tensors = [it for item in links.relabelled for it in item.tensors]
        tensors += links.gathered_tensors
        contents, written = links.files, links.written
    files |= {name: layer.digest for name, layer in contents.items()}
    files |= {name: Digest.of(content) for name, content in written.items()}
    files |= {file.name: file.sha256 for file in weights if file.sha256 is not None}
    unknown = [file for file in weights if file.sha256 is None]
    digests, size = _hash_files(store, unknown, tensors, jobs, progress)
    return FolderDigests(files | digests, len(unknown), size)


def has_folder(manifest: Manifest) -> bool:
    """Return whether ``export`` and ``link`` can write a folder of a model; they write no GGUF files."""
    try:
        check_no_gguf(manifest)
    except BlobstoreError:
        return False
    return bool(manifest.layers_of(media_types.TENSOR) or manifest.layers_of(media_types.FILE))


def _recorded(model: ModelContents) -> dict[str, Digest] | None:
    """Return the digests of the original files if the source record has all of them."""
    record, manifest = model.record, model.manifest
    if record is None or record.is_converted or not manifest.layers_of(media_types.TENSOR):
        return None
    found: dict[str, Digest] = {}
    for file in record.files:
        digest = Digest.of(file.start) if file.format == "index" else file.sha256
        if digest is None or file.format == "pytorch":
            return None
        found[file.name] = digest
    check_paths([*model.files, *found])
    return found | {name: layer.digest for name, layer in model.files.items()}


def _hash_files(
    store: LocalStore,
    files: Sequence[WeightFile],
    tensors: Sequence[FolderTensor],
    jobs: int | None,
    progress: Progress | None,
) -> tuple[dict[str, Digest], int]:
    """Return the digests of weight files, and the bytes of all of them together.

    Raises:
        BlobMissing, BlobDamaged: a blob is missing or damaged; blobs that were verified before, and
            have not changed since, are not hashed again.
    """
    by_name = {tensor.spec.name: tensor for tensor in tensors}
    verified = VerifiedBlobs(store)
    needed = {by_name[name].layer.id for file in files for name in file.offsets}
    unknown = verified.unknown(needed)
    total = sum(by_name[name].spec.nbytes for file in files for name in file.offsets)
    pool = WorkerPool(jobs, progress, total)

    def hash_file(file: WeightFile) -> tuple[Digest, int]:
        with (
            _OtherThread() as digester,
            contextlib.closing(_BlobChecks(store, unknown, verified)) as blobs,
        ):
            for piece in read_file(store, file, by_name, pool.report, blobs.read):
                digester.update(piece)
            blobs.finish()
            return digester.result()

    try:
        found = pool.run(files, hash_file)
    finally:
        verified.save()
    digests = {file.name: digest for file, (digest, _) in zip(files, found, strict=True)}
    return digests, sum(size for _, size in found)


class _Check(NamedTuple):
    """A blob that is being read and hashed."""

    layer: Descriptor
    before: BlobState
    pieces: Generator[memoryview, None, None]
    blob: HashedBlob


class _BlobChecks:
    """Reads the tensors of a file, and hashes their blobs on the way: each is decoded once for both digests."""

    def __init__(
        self, store: LocalStore, unknown: set[tuple[Digest, int]], verified: VerifiedBlobs
    ) -> None:
        """Read blobs of ``store``. Those that are checked here are removed from ``unknown``, which files share."""
        self._store, self._unknown, self._verified = store, unknown, verified
        self._open: dict[BlobId, _Check] = {}
        self._buffer = memoryview(bytearray(_PIECE))

    def read(self, tensor: FolderTensor) -> Iterator[memoryview]:
        """Yield the bytes of a tensor.

        Raises:
            BlobMissing, BlobDamaged: its blob, or one that was read before, is missing or damaged.
        """
        check = self._check(tensor.layer)
        if check is not None and tensor.begin < check.blob.digester.size:
            self._finish(check)  # its tensors are not in the order of the file
            check = None
        if check is None:
            yield from read_tensor(self._store, self._buffer, tensor)
            return
        with self._explained(check):
            check.blob.skip(tensor.begin - check.blob.digester.size)
            yield from check.blob.read(tensor.spec.nbytes)

    def finish(self) -> None:
        """Check the blobs whose last tensor was read. Raises as :meth:`read`."""
        for check in list(self._open.values()):
            self._finish(check)

    def close(self) -> None:
        """Close all files."""
        for check in self._open.values():
            check.pieces.close()

    def _check(self, layer: Descriptor) -> _Check | None:
        """Return the check of a blob, which may begin now; None if it was checked, or another file does that."""
        try:
            self._unknown.remove(layer.id)
        except KeyError:
            return self._open.get(layer.id)
        if len(self._open) >= _OPEN_BLOBS:
            self._finish(next(iter(self._open.values())))
        before = self._verified.look(layer.digest)
        pieces = None
        if not self._store.has_hot(layer.digest):
            with contextlib.suppress(BlobstoreError):  # thawed by now, or reading it says why
                cold, before = self._verified.open_cold(*layer.id)
                pieces = cold.pieces()
        pieces = pieces or self._store.read_pieces(*layer.id)
        check = self._open[layer.id] = _Check(layer, before, pieces, HashedBlob(pieces))
        return check

    def _finish(self, check: _Check) -> None:
        with self._explained(check):
            check.blob.skip(check.layer.size - check.blob.digester.size)
            check.blob.check(self._store, check.layer)
        check.pieces.close()
        self._verified.note(check.before)
        del self._open[check.layer.id]

    @contextlib.contextmanager
    def _explained(self, check: _Check) -> Iterator[None]:
        try:
            yield
        except BlobstoreError as error:
            if isinstance(error, Damaged):
                self._verified.forget(check.before)
            raise error.at(f"layer {quote(check.layer.name)}") from error


class _OtherThread:
    """A digest that is computed on another thread, while this one computes those of blobs."""

    def __init__(self) -> None:
        self._digester = Digester()
        self._thread = ThreadPoolExecutor(1, "digest")
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def update(self, piece: Buffer) -> None:
        """Add a piece, which may change afterwards."""
        if len(self._waiting) >= _AHEAD:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._digester.update, bytes(piece)))

    def result(self) -> tuple[Digest, int]:
        """Return the digest and the size of all pieces."""
        for piece in self._waiting:
            piece.result()
        return self._digester.digest(), self._digester.size
