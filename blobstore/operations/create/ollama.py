"""Opens what ``create`` imports: a source, or the GGUF files of a model in an Ollama folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import local_path
from blobstore.core.escape import cli_command, quote
from blobstore.errors import DamagedSource, SourceNotFound, UnsupportedSource
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
    from collections.abc import Iterator

    from blobstore.core.progress import Progress
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
            sizes = _link_files(name, folder)
            # Files that are listed may be links that lead out of the folder.
            tree = FileTree(folder, exclude=options.exclude, listed=sizes, label=source)
            others = (it for it in sizes if not it.endswith(GGUF))
            options = replace(options, keep=(*options.keep, *others))
            model = HuggingFaceFolder(folder, options, tree)
            stack.enter_context(contextlib.closing(model))
            model.kind = f"{SCHEME}{name}"[:255]  # as records have it
            yield model
        else:
            opened = open_source(source, options, downloads=downloads, progress=progress)
            yield stack.enter_context(contextlib.closing(opened))


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


def _link_files(name: Reference, folder: Path) -> dict[str, int]:
    """Make links to the blobs of a model of Ollama's and write its manifest; return the sizes by name."""
    store = _ollama_store()
    manifest, data = store.resolve(name), store.read_manifest(name)
    if not manifest.layers_of(media_types.MODEL) or manifest.layers_of(media_types.TENSOR):
        raise UnsupportedSource(
            f"{name} of {quote(store.root)} is no model in GGUF files",
            advice=f"{cli_command('cp', name, '--store', store.root, '--to', 'STORE')} copies it",
        )
    sizes = {MANIFEST: len(data)}
    (folder / MANIFEST).parent.mkdir()
    (folder / MANIFEST).write_bytes(data)
    for file, layer in ollama_files(manifest):
        if not is_valid_name(file):
            raise UnsupportedSource(f"{name} has a layer of the type {quote(layer.media_type)}")
        path = Path(store.blob_path(layer.digest))
        if not path.is_file() or path.stat().st_size != layer.size:
            raise DamagedSource(
                f"the download of {name} to {quote(store.root)} is not finished: {layer.digest} is absent",
                advice=f"run 'ollama pull {name}'",
            )
        (folder / file).symlink_to(path)
        sizes[file] = layer.size
    return sizes
