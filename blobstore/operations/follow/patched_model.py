"""A stored model with changes of a trainer, as a source that is imported like any other.

Only the headers are read when it is opened. The bytes of a tensor are those of the store, changed while the
import reads them. A wrong result fails the import, so that nothing of it gets a name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import join_some, quote
from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.folders.original import plan_original
from blobstore.manifests.source_record import SourceRecord
from blobstore.models.contents import ModelContents
from blobstore.planning.import_options import ImportOptions
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from blobstore.sources.base import SourceFile
from blobstore.sources.versions import SourceVersions
from blobstore.sources.weight_deltas import MAX_WINDOW

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.model import Manifest
    from blobstore.sources.weight_deltas import Patch
    from blobstore.sources.weight_versions import OpenChanges
    from blobstore.store.local import LocalStore

_PIECE: Final = 2**20


class TrainedModel:
    """The tensors of a stored model by the names that its trainer knows."""

    def __init__(self, store: LocalStore, manifest: Manifest) -> None:
        """Read the headers.

        Raises:
            BlobMissing, BlobDamaged: the model is damaged.
            UnsupportedSource: it was converted when it was imported, so that no trainer has its bytes.
        """
        self.store = store
        self.manifest = manifest
        contents = ModelContents(store, manifest)
        plan, record = plan_original(contents), contents.record
        if plan is None or record is None or record.left_out or record.stored_names:
            raise UnsupportedSource(
                "the model does not have the tensors of its source as they were: it was converted or "
                "quantized",
                advice="import the folder that the trainer started from, without --quantize",
            )
        if any(file.format not in ("safetensors", "index") for file in record.files):
            raise UnsupportedSource("the model was not imported from safetensors files")
        self.record = record
        self.contents = contents
        self.tensors = {tensor.spec.name: tensor for tensor in plan.tensors}

    def check(self, changes: OpenChanges) -> None:
        """Check that the model has all tensors that change. Raises DamagedSource."""
        if unknown := sorted(changes.checksums.keys() - self.tensors.keys()):
            raise DamagedSource(
                f"{quote(changes.version.folder)} changes tensor {join_some([*map(quote, unknown)], 1)}, "
                "which the model does not have"
            )

    def read(self, name: str, memory: memoryview) -> None:
        """Fill ``memory`` with the bytes of a tensor. Raises BlobMissing, BlobDamaged."""
        tensor = self.tensors[name]
        self.store.read_into(tensor.layer.digest, tensor.layer.size, tensor.begin, memory)

    def pieces(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, each piece in ``buffer``. Raises BlobMissing, BlobDamaged."""
        tensor = self.tensors[name]
        layer, nbytes = tensor.layer, tensor.spec.nbytes
        for begin in range(0, nbytes, len(buffer)):
            piece = buffer[: nbytes - begin]
            self.store.read_into(layer.digest, layer.size, tensor.begin + begin, piece)
            yield piece


class PatchedModel:
    """A :class:`TensorSource`: a stored model with the changes of some versions, oldest first."""

    def __init__(self, model: TrainedModel, versions: Sequence[OpenChanges]) -> None:
        """Read the small files. Raises DamagedSource as :meth:`TrainedModel.check`."""
        self._model = model
        self._versions = versions
        for version in versions:
            model.check(version)
        self.specs: Mapping[str, TensorSpec] = {
            name: tensor.spec for name, tensor in model.tensors.items()
        }
        contents = model.contents
        self.files: Sequence[SourceFile] = [
            SourceFile(name, Path(name), b"".join(map(bytes, model.store.read_pieces(*layer.id))))
            for name, layer in sorted(contents.files.items())
        ]
        config = contents.decoded("config.json")
        self.config: Mapping[str, Any] = config if isinstance(config, dict) else {}
        self.notices: Sequence[str] = ()
        self.metadata: Mapping[Path, Mapping[str, str]] = {
            Path(file.name): parse_header(file.start[PREFIX_SIZE:], file.size).metadata
            for file in model.record.files
            if file.format == "safetensors"
        }
        self.block_types: Mapping[str, str] = {}
        self.versions = SourceVersions()

    @property
    def options(self) -> ImportOptions:
        """The options of the import of the model. Raises BlobDamaged."""
        return ImportOptions.from_json(self._model.record.options)

    @property
    def reopen(self) -> Callable[[], PatchedModel]:
        """Raise UsageError, because other processes would read the changes again."""
        raise UsageError("a trainer's changes are imported only by threads of this process")

    def check_unchanged(self) -> None:
        """Do nothing: blobs of a store do not change, and the trainer's changes have checksums."""

    def record(self) -> SourceRecord:
        """See :class:`TensorSource`. The files are those of a folder that the trainer would have exported."""
        record = self._model.record
        return SourceRecord(
            kind="folder" if record.kind == "hub" else record.kind,
            files=tuple(file._replace(sha256=None) for file in record.files),
        )

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`TensorSource`."""
        nbytes = self.specs[name].nbytes
        whole: memoryview | None = None
        patches: list[Patch] = []
        for version in self._versions:
            if name not in version.checksums:
                continue
            patch = version.patch(name, nbytes)
            if not nbytes:
                patch.finish()
                continue
            patches.append(patch)
            # A small file may need a large window, and there may be many versions.
            if sum(one.memory for one in patches) > max(nbytes, MAX_WINDOW):
                whole = self._changed(name, patches, whole)
                patches = []
        for piece in self._pieces(name, buffer, whole):
            for patch in patches:
                patch.apply(piece)
            yield piece

    def _pieces(
        self, name: str, buffer: memoryview, whole: memoryview | None
    ) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, each piece in ``buffer``, from ``whole`` if some versions have changed that."""
        if whole is None:
            yield from self._model.pieces(name, buffer)
            return
        for begin in range(0, len(whole), len(buffer)):
            piece = buffer[: len(whole) - begin]
            piece[:] = whole[begin : begin + len(piece)]
            yield piece

    def _changed(self, name: str, patches: Sequence[Patch], whole: memoryview | None) -> memoryview:
        """Return all bytes of a tensor after some changes."""
        if whole is None:
            whole = memoryview(bytearray(self.specs[name].nbytes))
            self._model.read(name, whole)
        for begin in range(0, len(whole), _PIECE):
            for patch in patches:
                patch.apply(whole[begin : begin + _PIECE])
        return whole

    def close(self) -> None:
        """Close the files of the changes."""
        for version in self._versions:
            version.close()
