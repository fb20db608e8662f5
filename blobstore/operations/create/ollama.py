"""Opens what ``create`` imports: a source, or the GGUF files of a model in an Ollama folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.arguments import local_path
from blobstore.core.escape import cli_command, quote
from blobstore.core.workers import Cancelled
from blobstore.errors import BlobDamaged, DamagedSource, SourceNotFound, UnsupportedSource
from blobstore.manifests import media_types
from blobstore.manifests.file_names import is_valid_name
from blobstore.manifests.ollama_files import MANIFEST, ollama_files
from blobstore.manifests.reference import Reference
from blobstore.sources.file_tree import FileTree
from blobstore.sources.gguf import GGUF
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.sources.base import SourceOptions, TensorSource
    from blobstore.sources.fetched_tree import Downloads

SCHEME: Final = "ollama://"


@contextlib.contextmanager
def opened_source(
    source: str | os.PathLike[str],
    options: SourceOptions,
    progress: Progress | None,
    downloads: Downloads | None = None,
) -> Iterator[TensorSource]:
    """Open a source as :func:`~blobstore.sources.open.open_source` does, also ``ollama://NAME``.

    That model is looked for in ``$OLLAMA_MODELS``, or else in ``~/.ollama/models``.

    Raises:
        ModelNotFound, SourceNotFound: there is no such model, or no folder of Ollama.
        InvalidReference, InvalidManifest: the name is not valid, or the model is damaged.
        UnsupportedSource: the model is not in GGUF files.
        BlobstoreError: as :func:`~blobstore.sources.open.open_source`.
    """
    with contextlib.ExitStack() as stack:
        if isinstance(source, str) and source.startswith(SCHEME):
            name = Reference.parse(source.removeprefix(SCHEME))
            # Messages say which model it is, not only which file.
            made = tempfile.TemporaryDirectory(prefix=f"ollama-{name.model}-{name.tag}-")
            folder = Path(stack.enter_context(made))
            store = _ollama_store()
            layers = _link_files(store, name, folder)
            sizes = {file: (folder / file).stat().st_size for file in (MANIFEST, *layers)}
            # Files that are listed may be links that lead out of the folder.
            tree = FileTree(folder, exclude=options.exclude, listed=sizes, label=source)
            others = (it for it in sizes if not it.endswith(GGUF))
            options = replace(options, keep=(*options.keep, *others))
            model = _OllamaModel(folder, options, tree, store, layers.values())
            stack.enter_context(contextlib.closing(model))
            model.kind = f"{SCHEME}{name}"[:255]  # as records have it
            yield model
        else:
            opened = open_source(source, options, downloads=downloads, progress=progress)
            yield stack.enter_context(contextlib.closing(opened))


class _OllamaModel(HuggingFaceFolder):
    """A model of Ollama's. Its blobs are compared with their digests while they are imported."""

    def __init__(
        self,
        folder: Path,
        options: SourceOptions,
        tree: FileTree,
        store: LocalStore,
        layers: Iterable[Descriptor],
    ) -> None:
        self._store = store
        self._is_closed = threading.Event()
        # It reads next to the threads that import the blobs, so that a disk sends each byte once.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="blobstore-digests")
        super().__init__(folder, options, tree)
        self._check = self._thread.submit(self._check_digests, [*layers])

    def _check_digests(self, layers: Sequence[Descriptor]) -> None:
        for layer in layers:
            try:
                self._store.check_digest(layer.digest, layer.size, self._stop_if_closed)
            except BlobDamaged as error:
                raise DamagedSource(
                    error.message, advice="remove that file, and run 'ollama pull' for the model"
                ) from error

    def _stop_if_closed(self, _: int) -> None:
        if self._is_closed.is_set():
            raise Cancelled("stopped")

    def check_unchanged(self) -> None:
        """See :class:`TensorSource`. The first call waits for the digests."""
        while not wait([self._check], interrupts.POLL).done:
            interrupts.check()
        self._check.result()
        super().check_unchanged()

    def close(self) -> None:
        """See :class:`TensorSource`."""
        self._is_closed.set()
        self._thread.shutdown()
        super().close()


def ollama_models() -> list[tuple[str, str]]:
    """Return the names and sources of all models in Ollama's folder.

    Raises:
        SourceNotFound: there is no folder of Ollama, or it has no models.
        StoreError: it cannot be read.
    """
    store = _ollama_store()
    names = sorted(map(str, store.references()))
    if not names:
        raise SourceNotFound(f"{quote(store.root)} has no models of Ollama's")
    return [(name, f"{SCHEME}{name}") for name in names]


def _ollama_store() -> LocalStore:
    root = local_path(os.environ.get("OLLAMA_MODELS") or "~/.ollama/models", "source").resolve()
    if not root.exists():
        raise SourceNotFound(
            f"there is no folder of Ollama's models at {quote(root)}",
            advice="set OLLAMA_MODELS to the one that there is",
        )
    return LocalStore(root)


def _link_files(store: LocalStore, name: Reference, folder: Path) -> dict[str, Descriptor]:
    """Make links to the blobs of a model of Ollama's and write its manifest; return the layers by file."""
    manifest, data = store.resolve(name), store.read_manifest(name)
    if not manifest.layers_of(media_types.MODEL) or manifest.layers_of(media_types.TENSOR):
        raise UnsupportedSource(
            f"{name} of {quote(store.root)} is no model in GGUF files",
            advice=f"{cli_command('cp', name, '--store', store.root, '--to', 'STORE')} copies it",
        )
    (folder / MANIFEST).parent.mkdir()
    (folder / MANIFEST).write_bytes(data)
    layers = dict(ollama_files(manifest))
    for file, layer in layers.items():
        if not is_valid_name(file):
            raise UnsupportedSource(f"{name} has a layer of the type {quote(layer.media_type)}")
        path = Path(store.blob_path(layer.digest))
        if not path.is_file() or path.stat().st_size != layer.size:
            raise DamagedSource(
                f"the download of {name} to {quote(store.root)} is not finished: {layer.digest} is absent",
                advice=f"run 'ollama pull {name}'",
            )
        (folder / file).symlink_to(path)
    return layers
