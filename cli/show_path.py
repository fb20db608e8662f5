"""What ``blobstore show`` and ``inspect`` print of files and folders that are not in a store."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.cli import render
from blobstore.cli.pack import SUFFIX
from blobstore.core.escape import escape, quote
from blobstore.core.globs import glob_matches
from blobstore.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.base import TensorSource


def show_path(path: str, patterns: Sequence[str], *, as_json: bool) -> None:
    """Print the tensors of a source, or the models of an archive or of a folder of models."""
    from blobstore.operations.create.create_all import find_models
    from blobstore.sources.hub import cached_repository
    from blobstore.sources.open import open_source
    from blobstore.sources.selection import is_model_folder

    folder = Path(path)
    if path.endswith(SUFFIX):
        _show_archive(path, patterns, as_json=as_json)
    elif folder.is_dir() and not (
        is_model_folder(folder)
        or cached_repository(folder)
        or cached_repository(folder.parent.parent)
    ):
        _show_models(find_models(folder), patterns, as_json=as_json)
    else:
        with render.progress_bar() as progress:
            opened = open_source(path, progress=progress)
        with closing(opened):
            _show_source(path, opened, patterns, as_json=as_json)


def _selected(names: Sequence[str], patterns: Sequence[str], path: str) -> set[str]:
    """Return the names that any pattern matches; all if there are no patterns."""
    found = set() if patterns else set(names)
    for pattern in patterns:
        matches = [name for name in names if glob_matches(name, pattern)]
        if not matches:
            raise NotFound(f"nothing in {quote(path)} matches {quote(pattern)}")
        found.update(matches)
    return found


def _show_archive(path: str, patterns: Sequence[str], *, as_json: bool) -> None:
    from blobstore.operations.archive.describe import describe_archive

    archive = describe_archive(path, patterns)
    if as_json:
        fields = "name=reference digest blobs bytes=size stored_bytes=stored"
        models = render.records(archive.models, fields)
        shown = render.record(archive, "file=path bytes=size blobs deltas")
        render.show_json(shown | {"models": models})
        return
    rows = [
        (
            render.cell(model.reference),
            model.digest.short,
            render.human_bytes(model.size),
            render.human_bytes(model.stored),
        )
        for model in archive.models
    ]
    render.show(render.table(("NAME", "ID", "SIZE", "STORED"), rows, right=(2, 3)))
    render.show(
        f"{escape(path)}: {render.count_of(len(archive.models), 'model')}, "
        f"{render.count_of(archive.blobs, 'blob')} ({archive.deltas:,} as deltas) in "
        f"{render.human_bytes(archive.size)}"
    )


def _show_models(
    models: Sequence[tuple[str, Path]], patterns: Sequence[str], *, as_json: bool
) -> None:
    chosen = _selected([name for name, _ in models], patterns, "the folder")
    found = [(name, path) for name, path in models if name in chosen]
    if as_json:
        render.show_json({"models": [{"name": name, "source": path} for name, path in found]})
        return
    rows = [(render.cell(name), render.cell(path)) for name, path in found]
    render.show(render.table(("NAME", "SOURCE"), rows))
    render.show(f"{render.count_of(len(rows), 'model')}; 'blobstore create --all' imports them")


def _show_source(
    path: str, source: TensorSource, patterns: Sequence[str], *, as_json: bool
) -> None:
    specs = list(source.specs.values())
    chosen = _selected([spec.name for spec in specs], patterns, path)
    specs = [spec for spec in specs if spec.name in chosen]
    for notice in source.notices:
        render.show_note(notice)
    metadata = {file.name: dict(entries) for file, entries in source.metadata.items() if entries}
    if as_json:
        record = source.record()
        result: dict[str, Any] = render.record(record, "kind repository commit")
        listed = render.records(specs, "name type=dtype.value dtype=dtype.value shape bytes=nbytes")
        result |= {"source": path, "bytes": sum(spec.nbytes for spec in specs), "tensors": listed}
        files = [file.name for file in source.files]
        render.show_json(result | {"files": files, "metadata": metadata, "notices": source.notices})
        return
    rows = [
        (
            render.cell(spec.name),
            spec.dtype.value,
            f"[{', '.join(map(str, spec.shape))}]",
            render.human_bytes(spec.nbytes),
        )
        for spec in specs
    ]
    render.show(render.table(("NAME", "TYPE", "SHAPE", "SIZE"), rows, right=(3,)))
    render.show(f"{escape(path)}: {_totals(specs, len(source.specs), len(source.files))}")
    for name, entries in metadata.items():
        for key, value in entries.items():
            render.show(f"  metadata of {render.cell(name)}: {render.cell(f'{key} = {value}')}")


def _totals(specs: Sequence[TensorSpec], total: int, files: int) -> str:
    part = "" if len(specs) == total else f"{len(specs):,} of "
    others = f"; {render.count_of(files, 'other file')}" if files else ""
    return (
        f"{part}{render.count_of(total, 'tensor')}, "
        f"{render.human_count(sum(math.prod(spec.shape) for spec in specs))} parameters, "
        f"{render.human_bytes(sum(spec.nbytes for spec in specs))}{others}"
    )
