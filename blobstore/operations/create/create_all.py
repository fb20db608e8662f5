"""Imports every model of a Hub cache, of a folder of model folders, or of Ollama's folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, NameTaken, SourceError, SourceNotFound, StoreError
from blobstore.manifests.reference import Reference
from blobstore.operations.create.create import create
from blobstore.operations.create.ollama import SCHEME, ollama_models
from blobstore.sources.distributed.layout import find_checkpoint
from blobstore.sources.hub import cached_repository
from blobstore.sources.selection import is_model_folder
from blobstore.sources.sharded import WEIGHTS
from blobstore.store.local import LocalStore, StoreLike

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from pathlib import Path
    from typing import Unpack

    from blobstore.core.progress import Progress
    from blobstore.operations.create.create import Created, CreateOptions


_OWN_FILES = frozenset(
    ("config.json", "model_index.json", "modules.json", "adapter_config.json", "params.json")
)
"""Any of these makes a folder with weight files one model, whatever its folders have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedModel:
    """The outcome for one model of :func:`create_all`."""

    name: str
    """The name, valid or not."""
    source: Path | str
    """The path, or ``ollama://NAME``."""
    created: Created | None = None
    """None if it failed, or in a dry run."""
    error: BlobstoreError | None = None


def create_all(
    folder: str | os.PathLike[str],
    *,
    store: StoreLike = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    **options: Unpack[CreateOptions],
) -> list[CreatedModel]:
    """Import every model of a folder, and return what became of each.

    A model that fails does not keep the others from being imported.

    Args:
        folder: a cache of the Hub's client, whose models get the names of their repositories, or a
            folder of model folders, which get the names of the folders: ``name`` or ``org/name``. Files of
            weights next to these are left out; see :func:`loose_files`. Or ``ollama://``, for all that
            Ollama has.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        dry_run: only list the models.
        progress: called with the model and the current step, bytes done and total bytes.
        options: as for :func:`create`, for all models.

    Returns:
        what became of each model, sorted by name; a failure is part of the list.

    Raises:
        SourceNotFound: there is no such folder.
        SourceError: the folder cannot be read, has no models, or is a model.
        StoreError: the store cannot be used. Models imported before that stay.
    """
    store = LocalStore.of(store)
    first: dict[str, Path | str] = {}
    results = []
    models: Sequence[tuple[str, Path | str]] = (
        ollama_models() if folder == SCHEME else find_models(local_path(folder, "source"))
    )
    for number, (found, source) in enumerate(models, start=1):
        name, created, error = found, None, None
        try:
            reference = Reference.parse(found)
            name = str(reference)
            # Names that differ in case only cannot be in one store.
            if (other := first.setdefault(name.lower(), source)) is not source:
                raise NameTaken(f"{quote(other)} already has the name {name}")
            if not dry_run:
                step = progress and partial(
                    _report, progress, f"{number} of {len(models)} models, {name}"
                )
                created = create(source, reference, store=store, progress=step, **options)
        except StoreError:
            raise
        except BlobstoreError as failure:
            error = failure
        results.append(CreatedModel(name=name, source=source, created=created, error=error))
    return results


def _report(progress: Progress, name: str, what: str, done: int, total: int) -> None:
    progress(f"{name}: {what}", done, total)


def find_models(folder: Path) -> list[tuple[str, Path]]:
    """Return the names and sources of the models of a folder, or of a cache of the Hub's client.

    Raises:
        SourceNotFound: there is no such folder.
        SourceError: the folder cannot be read, has no models, or is a model.
    """
    if not folder.is_dir():
        raise SourceNotFound(f"no such folder: {quote(folder)}")
    if cached_repository(folder) or (_is_model(folder) and not _has_loose_files(folder)):
        raise SourceError(f"{quote(folder)} is a model itself; create it without --all")
    found: list[tuple[str, Path]] = []
    try:
        if (folder / "hub").is_dir() and any(map(cached_repository, (folder / "hub").iterdir())):
            folder /= "hub"  # what HF_HOME names
        for path in sorted(folder.iterdir()):
            if repository := cached_repository(path):
                found.append((repository, path))
            elif path.is_dir() and not path.name.startswith("."):
                # Folders of organizations have those of models.
                inside = [path] if _is_model(path) else sorted(path.iterdir())
                found += [(it.relative_to(folder).as_posix(), it) for it in inside if _is_model(it)]
    except OSError as error:
        where = quote(error.filename or folder)
        raise SourceError(f"cannot read {where}: {error.strerror}") from error
    if not found:
        raise SourceError(
            f"{quote(folder)} has no models; expected a cache of the Hub's client, a folder of "
            "model folders, or ollama:// for the folder of Ollama"
        )
    return found


def loose_files(folder: str | os.PathLike[str]) -> list[str]:
    """Return the weight files next to the folders of models, which :func:`create_all` does not import."""
    if folder == SCHEME:
        return []
    path = local_path(folder, "source")
    if not (path.is_dir() and _is_model(path) and _has_loose_files(path)):
        return []
    return sorted(item.name for item in path.iterdir() if item.name.endswith(WEIGHTS))


def _has_loose_files(folder: Path) -> bool:
    """Return whether weight files lie next to folders of models, and are not parts of one."""
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return False
    has_own = any(item.name in _OWN_FILES or ".index." in item.name for item in inside)
    return not has_own and any(
        item.is_dir() and not item.name.startswith(".") and _is_model(item) for item in inside
    )


def _is_model(folder: Path) -> bool:
    if is_model_folder(folder):
        return True
    return folder.is_dir() and find_checkpoint(folder) is not None
