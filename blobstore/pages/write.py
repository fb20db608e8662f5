"""The operation ``page``: writes a page that shows a store and its models as pictures."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.core.files import write_file
from blobstore.core.gc_pause import gc_paused
from blobstore.core.targets import check_target
from blobstore.errors import BlobstoreError, Damaged, NotFound, UnsupportedDType
from blobstore.pages.ancestry import find_delta_bases, find_parents
from blobstore.pages.family_view import family_view
from blobstore.pages.health_view import health_view
from blobstore.pages.largest_models import read_largest
from blobstore.pages.model_view import chosen_models, model_views
from blobstore.pages.sharing_view import sharing_view
from blobstore.pages.shell import render_page
from blobstore.pages.store_view import store_view
from blobstore.pages.text import shown
from blobstore.pages.weight_statistics import measure_model
from blobstore.store.catalog import read_entries
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import named_models

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Names, Reference
    from blobstore.pages.weight_statistics import Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """The result of :func:`blobstore.page`."""

    path: Path
    size: int
    """Bytes of the file."""
    models: int
    """Models of the store."""


def write_page(
    target: str | os.PathLike[str],
    references: Names = (),
    *,
    store: StoreLike = None,
    measure: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Page:
    """Write a self-contained HTML page about a store. An existing file is replaced.

    Args:
        target: the file.
        references: the models whose tensors are shown; by default all, up to a limit.
        store: the store or its path; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        measure: read the weights of these models, for histograms and errors against their bases.
        jobs: number of threads that read them; by default one per processor.
        progress: called with the current step, bytes done and total bytes.

    Returns:
        the file, its bytes, and the number of models.

    Raises:
        ModelNotFound: a model in ``references`` does not exist.
        StoreError: the store is not a folder or cannot be read.
        BlobstoreError: ``target`` is not a regular file, or cannot be written.
    """
    path = free_target(target)
    store = LocalStore.of(store)
    chosen = named_models(store, references)
    store = store.holder(*chosen)
    data = page_data(store, chosen, measure=measure, jobs=jobs, progress=progress)
    size = write_page_file(path, render_page(page_title(data), data))
    return Page(path=path, size=size, models=data["store"]["totals"]["models"])


def page_data(
    store: LocalStore,
    references: Sequence[Reference] = (),
    *,
    measure: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Return what the page shows: JSON values, by the names of the views."""
    read_entries(store, references)  # fails if one of them does not exist
    with gc_paused():
        return _page_data(store, references, measure, jobs, progress)


def _page_data(
    store: LocalStore,
    references: Sequence[Reference],
    measure: bool,
    jobs: int | None,
    progress: Progress | None,
) -> dict[str, Any]:
    disk, usage, rest = read_largest(store, references)
    parents = find_parents(disk)
    chosen = chosen_models(disk, references)
    measured: dict[Reference, dict[str, Measurement]] = {}
    for name in chosen if measure else ():
        base = parents[name].reference if name in parents else None
        # The views name what is damaged.
        with contextlib.suppress(Damaged, NotFound, UnsupportedDType):
            measured[name] = measure_model(store, name, base, jobs=jobs, progress=progress)
    return {
        "written": int(time.time()),
        "root": shown(store.root.name or store.root),
        "store": store_view(disk, usage),
        "sharing": sharing_view(disk),
        "family": family_view(disk, parents, find_delta_bases(disk, parents)),
        "model": model_views(disk, chosen, parents, measured),
        "health": health_view(disk, usage),
        "rest": rest,
    }


def page_title(data: dict[str, Any]) -> str:
    """Return the title of a page."""
    return f"{data['root']} \u2013 blobstore"


def write_page_file(path: Path, page: str) -> int:
    """Write a page, and return its bytes. An existing file is replaced.

    Raises:
        BlobstoreError: the file cannot be written.
    """
    content = page.encode()
    try:
        write_file(path, [content])
    except OSError as error:
        raise BlobstoreError(f"cannot write {quote(path)}: {error.strerror}") from error
    return len(content)


def free_target(file: str | os.PathLike[str]) -> Path:
    """Return the real path of a file that can be written or replaced.

    Raises:
        BlobstoreError: the path is not that of a regular file, or has no parent folder.
        UsageError: it is an address.
    """
    path = local_path(file)
    try:
        target = Path(os.path.realpath(path))
        is_other = not os.fspath(file) or (os.path.lexists(target) and not target.is_file())
        has_folder = target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise BlobstoreError(f"cannot access {quote(file)}: {error}") from error
    if is_other:
        raise BlobstoreError(f"{quote(file)} is not a regular file; choose a new file for the page")
    if not has_folder:
        raise BlobstoreError(
            f"cannot write {quote(file)}: there is no folder {quote(target.parent)}"
        )
    check_target(target)
    return target
