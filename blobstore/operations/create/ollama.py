"""Opens what ``create`` imports: a source, or the GGUF files of a model in an Ollama folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.errors import SourceNotFound, UnsupportedSource
from blobstore.manifests import media_types
from blobstore.manifests.reference import Reference
from blobstore.sources.file_tree import FileTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions, TensorSource

SCHEME: Final = "ollama://"
_NAMES: Final = {
    media_types.MODEL: "model.gguf",
    media_types.PROJECTOR: "mmproj-model.gguf",
    media_types.LICENSE: "LICENSE",
}
"""The file that the first layer of a type becomes. Templates and parameters are not part of a model's folder."""


@contextlib.contextmanager
def opened_source(
    source: str | os.PathLike[str], options: SourceOptions, progress: Progress | None
) -> Iterator[TensorSource]:
    """Open a source as :func:`~blobstore.sources.open.open_source` does, also ``ollama://NAME``.

    That model is looked for in ``$OLLAMA_MODELS``, or else in ``~/.ollama/models``.

    Raises:
        ModelNotFound, SourceNotFound: there is no such model, or no folder of Ollama.
        InvalidReference, InvalidManifest: the name is not valid, or the model is damaged.
        UnsupportedSource: the model is not one GGUF file and perhaps its projector.
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
            yield stack.enter_context(contextlib.closing(HuggingFaceFolder(folder, options, tree)))
        else:
            opened = open_source(source, options, progress=progress)
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
    """Make links to the files of a model of Ollama's, and return their sizes."""
    store = _ollama_store()
    manifest = store.resolve(name)
    models, adapters = map(manifest.layers_of, (media_types.MODEL, media_types.ADAPTER))
    if len(models) != 1 or adapters:
        raise UnsupportedSource(
            f"{name} of {quote(store.root)} has {len(models)} GGUF files and {len(adapters)} adapters; "
            "expected one file, and perhaps its projector"
        )
    sizes = {}
    for media_type, file in _NAMES.items():
        for layer in manifest.layers_of(media_type)[:1]:
            (folder / file).symlink_to(store.blob_path(layer.digest))
            sizes[file] = layer.size
    return sizes
