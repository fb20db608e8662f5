"""The output of ``blobstore show`` for a GGUF file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from blobstore.cli import output, render
from blobstore.core.escape import escape
from blobstore.gguf.file import read_file_header
from blobstore.gguf.header import GgufArray
from blobstore.gguf.roles import role_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from blobstore.cli.output import Output
    from blobstore.gguf.header import Value


def show_gguf(path: Path, choose: Callable[[Collection[str]], set[str]], out: Output) -> None:
    """Print the tensors and the metadata of a file.

    ``choose`` returns the names to print of those of all tensors.

    Raises:
        InvalidGguf: the file breaks the format.
        SourceError: it cannot be read.
    """
    header = read_file_header(path)
    role = role_of(header.metadata, len(header.tensors), path.name)
    chosen = choose(header.tensors)
    tensors = [tensor for tensor in header.tensors.values() if tensor.name in chosen]
    size = sum(tensor.size for tensor in tensors)
    rows = [
        (
            render.cell(tensor.name),
            tensor.type_name,
            f"[{', '.join(map(str, tensor.shape))}]",
            render.human_bytes(tensor.size),
        )
        for tensor in tensors
    ]
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    part = "" if len(tensors) == len(header.tensors) else f"{len(tensors):,} of "
    total = (
        f"{escape(str(path))}: GGUF {header.version}, {role}, "
        f"{escape(header.architecture or 'no architecture')}, "
        f"{part}{render.count_of(len(header.tensors), 'tensor')}, "
        f"{render.human_count(parameters)} parameters, {render.human_bytes(size)}"
    )
    lines = [render.table(("NAME", "TYPE", "SHAPE", "SIZE"), rows, right=(3,)), total]
    lines += [
        f"  {render.cell(f'{key} = {_text(value)}')}" for key, value in header.metadata.items()
    ]
    data = {
        "source": path,
        "kind": "gguf",
        "role": role,
        "version": header.version,
        "bytes": size,
        "tensors": output.records(tensors, "name type=type_name shape offset=begin bytes=size"),
        "metadata": {key: _json(value) for key, value in header.metadata.items()},
    }
    out.result(data, lines)


def _text(value: Value) -> str:
    if isinstance(value, GgufArray):
        return f"{render.count_of(len(value), 'value')} of type {value.type}"
    return str(value)


def _json(value: Value) -> Any:
    """Return a value as JSON has it; of an array, type and length, since a tokenizer has megabytes."""
    if isinstance(value, GgufArray):
        return {"type": value.type, "count": len(value)}
    return value
