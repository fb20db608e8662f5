"""The output of ``blobstore show``, ``inspect`` and ``unpack --list`` for files and folders outside a store."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from blobstore.cli import output, render
from blobstore.cli.pack import SUFFIX
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import cli_command, escape, quote
from blobstore.core.globs import glob_matches
from blobstore.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from blobstore.cli.output import Output
    from blobstore.core.tensor import TensorSpec
    from blobstore.sources.base import TensorSource
    from blobstore.store.local import LocalStore


def show_path(
    path: str, patterns: Sequence[str], out: Output, store: LocalStore | None = None
) -> None:
    """Print the tensors of a source, or the models of an archive or of a folder of models."""
    from blobstore.cli.show_gguf import show_gguf
    from blobstore.gguf.file import is_gguf
    from blobstore.sources.hub import cached_repository
    from blobstore.sources.open import open_source
    from blobstore.sources.selection import is_model_folder

    folder = Path(path)
    if path.endswith(SUFFIX):
        show_archive(path, patterns, out, store)
    elif folder.is_dir() and not (
        is_model_folder(folder)
        or cached_repository(folder)
        or cached_repository(folder.parent.parent)
    ):
        _show_models(path, patterns, out)
    elif is_gguf(folder):
        show_gguf(folder, lambda names: _selected(names, patterns, path), out)
    else:
        with progress_bar() as progress:
            opened = open_source(path, progress=progress)
        with closing(opened):
            _show_source(path, opened, patterns, out)


def _selected(names: Collection[str], patterns: Sequence[str], path: str) -> set[str]:
    """Return the names that any pattern matches; all if there are no patterns."""
    found = set() if patterns else set(names)
    for pattern in patterns:
        matches = [name for name in names if glob_matches(name, pattern)]
        if not matches:
            raise NotFound(f"nothing in {quote(path)} matches {quote(pattern)}")
        found.update(matches)
    return found


def show_archive(path: str, patterns: Sequence[str], out: Output, store: LocalStore | None) -> None:
    """Print the models of an archive, or those that patterns match, and who signed them; no blob is read."""
    from blobstore.operations.archive.describe import describe_archive
    from blobstore.operations.sign.report import describe_signers

    archive = describe_archive(path, patterns, store=store)
    is_signed = any(model.signatures for model in archive.models)
    rows = [
        (
            render.cell(model.reference),
            model.digest.short,
            render.human_bytes(model.size),
            render.human_bytes(model.stored),
            *([render.cell(describe_signers(model.signatures)) or "-"] * is_signed),
        )
        for model in archive.models
    ]
    fields = "name=reference digest blobs bytes=size stored_bytes=stored"
    data = output.record(archive, "file=path bytes=size blobs deltas")
    total = (
        f"{escape(path)}: {render.count_of(len(archive.models), 'model')}, "
        f"{render.count_of(archive.blobs, 'blob')} ({archive.deltas:,} as deltas) in "
        f"{render.human_bytes(archive.size)}"
    )
    headings = ("NAME", "ID", "SIZE", "STORED", *["SIGNED BY"] * is_signed)
    models = output.records(archive.models, fields)
    for record, model in zip(models, archive.models, strict=True):
        record["signatures"] = output.records(model.signatures, output.SIGNATURE_FIELDS)
    out.result(data | {"models": models}, [render.table(headings, rows, right=(2, 3)), total])


def _show_models(path: str, patterns: Sequence[str], out: Output) -> None:
    from blobstore.operations.create.find_models import find_models

    models = find_models(path)
    chosen = _selected([model.name for model in models], patterns, "the folder")
    found = [(model.name, model.source) for model in models if model.name in chosen]
    rows = [(render.cell(name), render.cell(path)) for name, path in found]
    out.result(
        {"models": [{"name": name, "source": path} for name, path in found]},
        (
            render.table(("NAME", "SOURCE"), rows),
            f"{render.count_of(len(rows), 'model')}; {cli_command('create', '--all', path)} imports them",
        ),
    )


def _show_source(path: str, source: TensorSource, patterns: Sequence[str], out: Output) -> None:
    specs = list(source.specs.values())
    chosen = _selected([spec.name for spec in specs], patterns, path)
    specs = [spec for spec in specs if spec.name in chosen]
    output.show_note(*source.notices)
    metadata = {file.name: dict(entries) for file, entries in source.metadata.items() if entries}
    rows = [
        (
            render.cell(spec.name),
            spec.dtype.value,
            f"[{', '.join(map(str, spec.shape))}]",
            render.human_bytes(spec.nbytes),
        )
        for spec in specs
    ]
    lines = [
        render.table(("NAME", "TYPE", "SHAPE", "SIZE"), rows, right=(3,)),
        f"{escape(path)}: {_totals(specs, len(source.specs), len(source.files))}",
    ]
    lines += [
        f"  metadata of {render.cell(name)}: {render.cell(f'{key} = {value}')}"
        for name, entries in metadata.items()
        for key, value in entries.items()
    ]
    fields = "name type=dtype.value dtype=dtype.value shape bytes=nbytes"
    data = output.record(source.record(), "kind repository commit") | {
        "source": path,
        "bytes": sum(spec.nbytes for spec in specs),
        "tensors": output.records(specs, fields),
        "files": [file.name for file in source.files],
        "metadata": metadata,
        "notices": source.notices,
    }
    out.result(data, lines)


def _totals(specs: Sequence[TensorSpec], total: int, files: int) -> str:
    part = "" if len(specs) == total else f"{len(specs):,} of "
    others = f"; {render.count_of(files, 'other file')}" if files else ""
    return (
        f"{part}{render.count_of(total, 'tensor')}, "
        f"{render.human_count(sum(math.prod(spec.shape) for spec in specs))} parameters, "
        f"{render.human_bytes(sum(spec.nbytes for spec in specs))}{others}"
    )
