"""``blobstore inspect``: show the contents of a PyTorch checkpoint, and the globals that it uses."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.core.escape import escape, quote
from blobstore.errors import DamagedSource, SourceNotFound, UnsupportedSource
from blobstore.sources.distributed.layout import find_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.sources.pytorch.inspect import Inspection
    from blobstore.sources.pytorch.state_dict import Subtree


_PART_FIELDS = "path tensors bytes=nbytes"


@click.command(
    "inspect", short_help="Show the contents of a PyTorch checkpoint without executing it."
)
@click.argument("file", type=arguments.FILE)
@click.option("--subtree", metavar="PATH", help="List the tensors below these keys.")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@options.shared("json")
@click.pass_context
def command(
    ctx: click.Context, file: str, subtree: str | None, with_tensors: bool, out: Output
) -> None:
    """Show what the PyTorch checkpoint FILE contains, and every global that its pickles use.

    FILE can be a folder of torch.distributed.checkpoint too. Of a safetensors or GGUF file, a model folder or an archive, it lists what "blobstore show" does.
    No code of the file is executed. Files that create would refuse are shown too: with exit code 4 if they are damaged or ask for a global that is not known, else with 1.
    """
    from blobstore.cli.show_path import show_path

    if _is_listed(file):
        if subtree or with_tensors:
            raise click.UsageError("--subtree and --tensors apply only to PyTorch checkpoints")
        show_path(file, (), out)
        return
    try:
        inspected = _inspected(file, subtree)
    except SourceNotFound as error:
        raise SourceNotFound(
            error.message, advice="for a model in the store, use 'blobstore show'"
        ) from None
    out.result(
        lambda: _as_json(inspected), "\n\n".join(_sections(inspected, with_tensors=with_tensors))
    )
    if inspected.refusal is not None:
        asks_for_others = any(item.use is None for item in inspected.globals)
        kind = DamagedSource if inspected.is_damaged or asks_for_others else UnsupportedSource
        ctx.exit(kind.exit_code)


def _is_listed(file: str) -> bool:
    """Return whether a path is a model folder, an archive, or a safetensors or GGUF file, which show lists."""
    from blobstore.gguf.file import is_gguf

    path = Path(file)
    try:
        if path.is_dir():
            return find_checkpoint(path) is None
        if file.endswith(".bsar"):
            return True
        if is_gguf(path):
            return True
        if not path.is_file() or path.suffix != ".safetensors":
            return False
        with path.open("rb") as opened:  # a pickle may have any ending
            return opened.read(9)[8:] == b"{"
    except (OSError, ValueError):  # inspecting the file reports it
        return False


def _inspected(file: str, subtree: str | None) -> Inspection:
    from blobstore.sources.distributed.inspect import inspect_folder
    from blobstore.sources.pytorch.inspect import inspect_checkpoint

    path = Path(file)
    inner = None
    with contextlib.suppress(OSError, ValueError):  # inspecting the file reports it
        inner = find_checkpoint(path) if path.is_dir() else None
    if inner is not None:
        return inspect_folder(path, inner, subtree=subtree)
    return inspect_checkpoint(file, subtree=subtree)


def show_parts(file: str, out: Output) -> None:
    """Print the parts of a checkpoint that ``--subtree`` can name."""
    from blobstore.sources.pytorch.checkpoint import open_checkpoint
    from blobstore.sources.pytorch.state_dict import HasUnknownObjects

    if Path(file).is_dir() and not _is_listed(file):
        parts = _inspected(file, None).subtrees
    else:
        try:
            with open_checkpoint(file) as checkpoint:
                parts = checkpoint.subtrees
        except HasUnknownObjects as error:
            if not error.subtrees:
                raise
            parts = error.subtrees
    out.result(output.records(parts, _PART_FIELDS), _parts_table(parts))


def _as_json(inspected: Inspection) -> dict[str, Any]:
    fields = "file=path bytes=size kind refusal globals parts=subtrees tensors unreadable notices"
    return output.record(inspected, fields) | {
        "globals": output.records(inspected.globals, "name use pickle offset"),
        "parts": output.records(inspected.subtrees, _PART_FIELDS),
        "tensors": output.records(inspected.tensors, "name dtype=dtype.value shape bytes=nbytes"),
    }


def _sections(inspected: Inspection, *, with_tensors: bool) -> Iterator[str]:
    yield _summary(inspected)
    if inspected.globals:
        rows = [
            (
                render.cell(item.name),
                item.use or "REFUSED",
                f"{render.cell(item.pickle)}:{item.offset}" if item.pickle else str(item.offset),
            )
            for item in inspected.globals
        ]
        alarming = [index for index, item in enumerate(inspected.globals) if item.use is None]
        yield render.table(("ASKS FOR", "USE", "AT BYTE"), rows, alarming=alarming)
    if inspected.subtrees:
        yield _parts_table(inspected.subtrees)
    if with_tensors and inspected.tensors:
        shown = [
            (
                render.cell(spec.name),
                spec.dtype.value,
                "x".join(map(str, spec.shape)) or "scalar",
                render.human_bytes(spec.nbytes),
            )
            for spec in inspected.tensors
        ]
        yield render.table(("TENSOR", "TYPE", "SHAPE", "SIZE"), shown, right=(3,))


def _parts_table(subtrees: Sequence[Subtree]) -> str:
    """Return the parts of a checkpoint that ``--subtree`` can name."""
    headings: tuple[str, ...] = ("PART", "TENSORS")
    rows: list[tuple[str, ...]] = [
        (render.cell(part.path), f"{part.tensors:,}") for part in subtrees
    ]
    sizes = [part.nbytes for part in subtrees if part.nbytes is not None]
    if sizes:
        headings = (*headings, "SIZE")
        rows = [(*row, render.human_bytes(size)) for row, size in zip(rows, sizes, strict=True)]
    return render.table(headings, rows, right=(1, 2)[: len(headings) - 1])


def _summary(inspected: Inspection) -> str:
    what = inspected.kind or "refused"
    lines = [f"{escape(str(inspected.path))}: {what}, {render.human_bytes(inspected.size)}"]
    if inspected.refusal is None:
        total = sum(spec.nbytes for spec in inspected.tensors)
        lines.append(
            f"would import {render.count_of(len(inspected.tensors), 'tensor')}, "
            f"{render.human_bytes(total)}"
        )
    else:
        lines.append(f"refused: {escape(inspected.refusal)}")
    lines += [
        f"cannot read {quote(name)}: {escape(reason)}"
        for name, reason in inspected.unreadable.items()
    ]
    lines += map(escape, inspected.notices)
    return "\n".join(lines)
