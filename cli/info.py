"""``blobstore info``: prints what is known about a model, on one page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cli.output import Output
    from blobstore.operations.describe.info import ModelInfo
    from blobstore.store.local import LocalStore


@click.command("info", short_help="Show what is known about a model, on one page.")
@click.argument("name", type=arguments.MODEL_OR_ADDRESS)
@options.shared("plain-http", "store", "json")
def command(name: str, store: LocalStore, plain_http: bool | None, out: Output) -> None:
    """Show the architecture, source, types, license, base, names and disk usage of the model NAME.

    License and base are what the model card and the configs say. NAME may be the address of a model
    elsewhere, of which only headers and small files are fetched.
    """
    from blobstore.operations.describe.info import model_info

    model = arguments.model_or_address(store, name)
    info = model_info(model, store=store, plain_http=plain_http)
    out.result(_as_json(info), _as_text(info))
    output.exit_with(f"model {model}: {blob.fault}" for blob in info.description.faults)


def _as_text(info: ModelInfo) -> str:
    rows = list(_rows(info))
    width = max(len(key) for key, _ in rows)
    return "\n".join(f"{key.ljust(width)}  {value}" for key, value in rows)


def _rows(info: ModelInfo) -> Iterator[tuple[str, str]]:
    model = info.description
    yield "name", render.cell(model.reference)
    if info.aliases:
        yield "also named", ", ".join(map(render.cell, info.aliases))
    yield "ID", info.digest.short
    if info.modified is not None:
        yield "imported", render.human_age(info.modified)
    yield from _source_rows(info)
    kind = f" ({render.cell(model.model_type)})" if model.model_type else ""
    yield "architecture", f"{render.cell(model.architecture) or 'unknown'}{kind}"
    parameters = render.human_count(model.parameters)
    yield "parameters", f"{parameters} in {render.count_of(len(model.tensors), 'tensor')}"
    if model.metrics:
        yield "metrics", render.metrics(model.metrics)
    if model.published_scheme:
        yield "quantization", render.published(model.published_scheme)
    for name, count, size in info.types:
        yield "type", f"{render.cell(name)}: {render.count_of(count, 'tensor')}, {_size(size)}"
    if model.signatures or model.signatures is None:
        from blobstore.operations.sign.report import describe_signers

        yield "signed by", render.cell(describe_signers(model.signatures))
    yield "license", render.cell(info.license or "unknown")
    if info.bases:
        yield "base", ", ".join(map(render.cell, info.bases))
    if model.files:
        yield "files", ", ".join(render.cell(file.name) for file in model.files)
    frozen = f", {_size(model.frozen_size)} of it frozen" if model.frozen_size else ""
    yield "size", f"{_size(model.size)} in {render.count_of(info.blobs, 'blob')}{frozen}"
    if info.unique_size is None:
        yield "in the store", f"{_size(info.disk_size)} of it"
    else:
        yield (
            "on disk",
            f"{_size(info.disk_size)}, {_size(info.unique_size)} of it in no other model",
        )


def _source_rows(info: ModelInfo) -> Iterator[tuple[str, str]]:
    if info.store is not None:
        yield "store", render.cell(info.store)
    source = info.source
    if source is None:
        yield "source", "unknown"
        return
    yield "source", render.cell(render.origin(source))
    for key, value in source.options.items():
        yield "option", render.cell(f"{key} = {json.dumps(value)}")


def _size(count: int) -> str:
    return render.human_bytes(count)


def _as_json(info: ModelInfo) -> dict[str, Any]:
    model = info.description
    fields = (
        "name=reference format architecture model_type parameters published_scheme bytes=size "
        "frozen_bytes=frozen_size metrics"
    )
    shown = output.record(model, fields) | output.record(
        info, "digest aliases license bases source store"
    )
    if info.source is not None:
        shown["source"] = output.record(info.source, "kind repository commit options")
    return shown | {
        "modified": None if info.modified is None else output.timestamp(info.modified),
        "tensors": len(model.tensors),
        "types": [
            {"type": name, "tensors": count, "bytes": size} for name, count, size in info.types
        ],
        "files": [file.name for file in model.files],
        "disk": output.record(info, "blobs bytes=disk_size unique_bytes=unique_size"),
        "signatures": None
        if model.signatures is None
        else output.records(model.signatures, output.SIGNATURE_FIELDS),
        "faults": [blob.fault for blob in model.faults],
    }
