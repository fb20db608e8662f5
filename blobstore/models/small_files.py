"""A stored model without its tensors: its manifest, config and small files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import did_you_mean, quote
from blobstore.core.fork import cached_property
from blobstore.errors import (
    BlobDamaged,
    BlobMissing,
    Damaged,
    FileNotFound,
    InvalidManifest,
    StoreError,
)
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.safetensors.header import PREFIX_SIZE, parse_header
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from blobstore.errors import BlobstoreError
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.store.protocols import BlobAccess


CONFIG_FILES = ("config.json", "model_index.json")
"""The files that may say what a model is."""
ARCHITECTURE_KEYS = ("architectures", "_class_name")


class ModelFiles:
    """The manifest, config and small files of the model ``reference``.

    ``manifest`` is the content of its manifest file.
    """

    @classmethod
    def of(cls, reference: str | Reference, store: StoreLike) -> ModelFiles:
        """Return the files of a stored model. Its tensor blobs are not opened.

        Raises:
            ModelNotFound: the store has no such name.
            InvalidManifest: the manifest is damaged.
        """
        reference = Reference.of(reference)
        store = LocalStore.to_read(store)
        data = store.read_manifest(reference)
        files = ModelFiles(reference, data, store)
        try:
            store.check_manifest(data, files.manifest)
        except InvalidManifest as error:
            raise error.at(str(reference)) from None
        return files

    def __init__(self, reference: Reference | str, manifest: bytes, store: BlobAccess) -> None:
        self.reference = reference
        """The model's name; a text if it is the path of a file."""
        self.store = store
        """The store that holds the model."""
        self._manifest = manifest

    @property
    def name(self) -> str:
        """The model's name as text, with its tag."""
        return str(self.reference)

    @property
    def digest(self) -> Digest:
        """The digest of the manifest, which identifies the model."""
        return Digest.of(self._manifest)

    @property
    def data(self) -> bytes:
        """The content of the manifest's file."""
        return self._manifest

    @cached_property
    def manifest(self) -> Manifest:
        """The model's manifest."""
        return Manifest.from_bytes(self._manifest)

    @property
    def config(self) -> dict[str, Any]:
        """The decoded ``config.json``, or an empty dictionary if the model has none.

        Raises:
            BlobMissing, BlobDamaged: the file is missing, damaged, or not a JSON object.
        """
        return self.read_json("config.json") if "config.json" in self.files else {}

    @property
    def architecture(self) -> str:
        """The class that ``config.json`` or ``model_index.json`` names; empty if none does.

        Raises as :func:`stated_by`.
        """
        config = stated_by(self, next((one for one in CONFIG_FILES if one in self.files), ""))
        return next(filter(None, (first_text(config, key) for key in ARCHITECTURE_KEYS)), "")

    def metadata(self) -> dict[str, str] | None:
        """Return the ``__metadata__`` of the safetensors files that the model was imported from.

        Returns None if they have none, as ``safetensors`` does, or if an earlier version imported
        the model. If files differ in the value of a key, the first file by name counts.

        Raises:
            BlobMissing, BlobDamaged, InvalidHeader: the record of the source is missing or damaged.
        """
        from blobstore.models.source_layers import read_source_record  # few readers ask for it

        record = read_source_record(self.store, self.manifest)
        found: dict[str, str] = {}
        for file in record.files if record is not None else ():
            if file.format == "safetensors":
                header = parse_header(file.start[PREFIX_SIZE:], file.size)
                found = {**header.metadata, **found}
        return found or None

    @property
    def files(self) -> Mapping[str, Descriptor]:
        """The small files of the model by name."""
        kinds = (media_types.JSON, media_types.FILE)
        return {
            layer.name: layer
            for layer in self.manifest.layers
            if layer.media_type in kinds and layer.name
        }

    def read_file(self, name: str) -> bytes:
        """Return the content of the small file ``name``, after checking its digest.

        Raises:
            FileNotFound: the model has no such file.
            BlobMissing, BlobDamaged: the file is missing or damaged.
        """
        layer = self._layer(name)
        with file_faults_located(self.reference, name):
            return self.store.read_blob(layer.digest, layer.size)

    def read_json(self, name: str) -> dict[str, Any]:
        """Return the JSON object that a small file contains.

        Raises:
            FileNotFound: the model has no such file.
            BlobMissing, BlobDamaged: the file is missing, damaged, or not a JSON object.
        """
        try:
            value = strict_json.loads_any(self.read_file(name))
        except ValueError as error:  # create stores the file as the source had it
            raise BlobDamaged(f"{name} of {self.reference} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise BlobDamaged(f"{name} of {self.reference} is not a JSON object")
        return value

    def file_path(self, name: str) -> Path:
        """Return the path of a small file's blob, for libraries that can only read from paths.

        Raises as :meth:`read_file`; BlobMissing also if the file is remote and has no local path.
        """
        layer = self._layer(name)
        if not self.store.is_local(layer.digest):
            raise BlobMissing(
                f"file {quote(name)} of model {self.reference} is remote and has no local path",
                advice="read it with read_file, or pull the model first",
            )
        with file_faults_located(self.reference, name):
            self.store.check_digest(layer.digest, layer.size)
        return Path(self.store.readable_path(layer.digest))

    def _layer(self, name: str) -> Descriptor:
        layer = self.files.get(name)
        if layer is None:
            raise FileNotFound(
                f"model {self.reference} has no file {quote(name)}",
                advice=did_you_mean(name, self.files),
            )
        return layer


def first_text(config: Mapping[str, Any], key: str) -> str:
    """Return the text under a key, or the first one of a list; empty if there is none."""
    value = config.get(key)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


@contextlib.contextmanager
def file_faults_located(reference: Reference | str, name: str) -> Iterator[None]:
    """Put a small file and its model in front of the messages of errors."""
    try:
        yield
    except (Damaged, StoreError) as error:
        raise error.at(f"file {quote(name)} of model {reference}") from None


@contextlib.contextmanager
def faults_located(model: ModelFiles) -> Iterator[None]:
    """Put the model, and the layer of the blob at fault, in front of the messages of errors.

    If a blob is missing or has a wrong size, that is reported instead: it is the likely cause.
    """
    try:
        yield
    except (Damaged, StoreError) as error:
        raise _located(model, error) from None


def _located(model: ModelFiles, error: Damaged | StoreError) -> BlobstoreError:
    layers = model.manifest.layers_of(*media_types.WEIGHTS)
    for layer in layers:
        try:
            model.store.check_size(layer.digest, layer.size)
        except (Damaged, StoreError) as found:
            return found.at(f"{model.reference}: layer {quote(layer.name or layer.media_type)}")
    for layer in layers:
        if layer.digest.hex in str(error):  # messages contain the path of the hot or cold blob
            return error.at(f"{model.reference}: layer {quote(layer.name or layer.media_type)}")
    return error.at(str(model.reference))


def stated_by(files: ModelFiles, name: str) -> dict[str, Any]:
    """Return the JSON object that a small file of a model contains, for what only shows it.

    It is empty if there is no such file, or if that is not a JSON object: files are kept as the source had them.

    Raises:
        BlobMissing, BlobDamaged: the file is missing, or its blob damaged.
    """
    try:
        value = strict_json.loads_any(files.read_file(name)) if name in files.files else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
