"""``blobstore show``: prints the tensors, layers or files of a model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.show_path import show_path
from blobstore.core.escape import quote
from blobstore.core.globs import any_glob_matches, glob_matches
from blobstore.errors import Damaged, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import TypeIs

    from blobstore.cli.output import Output
    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.operations.describe.show import (
        BlobDescription,
        ModelDescription,
        TensorDescription,
    )
    from blobstore.store.local import LocalStore

    Row: TypeAlias = TensorDescription | BlobDescription

View = Literal["tensors", "layers", "files", "manifest", "source"]
Order = Literal["name", "size", "type", "params"]
_Command = TypeVar("_Command", bound="Callable[..., Any]")
_VIEW_KEY = "blobstore.show"

_TENSOR_FIELDS = (
    "name type dtype shape parameters bytes=size bits_per_weight layer digest quant_type group_size"
)
_BLOB_FIELDS = "name media_type bytes=size digest state frozen=is_frozen"
_HEADINGS = {
    "tensors": ("NAME", "TYPE", "SHAPE", "BITS", "SIZE", "DIGEST"),
    "layers": ("NAME", "MEDIA TYPE", "SIZE", "DIGEST"),
    "files": ("NAME", "SIZE", "DIGEST"),
}
_SORT_KEYS: dict[Order, Callable[[Row], Any]] = {
    "name": lambda row: row.name,
    "size": lambda row: -row.size,
    "type": lambda row: row.media_type if _is_blob(row) else row.type,
    "params": lambda row: -getattr(row, "parameters", 0),
}


def _view_option(view: View, text: str) -> Callable[[_Command], _Command]:
    def choose(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        del param
        other = ctx.meta.get(_VIEW_KEY)
        if value and other:
            raise click.UsageError(f"--{other} and --{view} contradict each other")
        if value:
            ctx.meta[_VIEW_KEY] = view

    return click.option(f"--{view}", is_flag=True, expose_value=False, callback=choose, help=text)


@click.command("show", short_help="Show the tensors, layers or files of a model.")
@click.argument("name", metavar="NAME|PATH", type=arguments.MODEL_OR_PATH)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, type=arguments.TENSORS)
@options.shared("plain-http", "store")
@_view_option("layers", "List the manifest's layers.")
@_view_option("files", "List the small files.")
@_view_option("manifest", "Print the manifest, byte for byte.")
@_view_option("source", "Show what the model was imported from.")
@options.sort_option(
    get_args(Order),
    "Order of the rows; the manifest's by default. Largest first for size and params.",
)
@options.shared("json")
@click.pass_context
def command(
    ctx: click.Context,
    name: str,
    patterns: tuple[str, ...],
    store: LocalStore,
    order: Order | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Show the tensors of the model NAME: types, shapes, sizes and digests.

    A NAME that begins with oci:// is the address of a model in a registry, of which only headers and
    small files are fetched.

    PATH is a model that is not in the store: anything that create imports, an archive, or a folder
    of models such as the Hub's cache. A model in the store wins over a path of the same spelling.

    PATTERNs such as '*.mlp.*' select rows by name. A PATTERN that matches nothing is an error. If
    a blob is missing or damaged, its row says so and the exit code is 4. Only "blobstore verify"
    reads the data itself. Long names are shortened, except in JSON.
    """
    from blobstore.operations.describe.show import describe_model, model_source
    from blobstore.remotes.addresses import is_address, reading_models

    view: View | None = ctx.meta.get(_VIEW_KEY)
    if not is_address(name) and arguments.is_path(name, store):
        if view or order:
            raise click.UsageError(f"--{view or 'sort'} applies only to models in the store")
        show_path(name, patterns, out, store)
        return
    reference = arguments.model_or_address(store, name)
    if view in ("manifest", "source"):
        if patterns or order:
            raise click.UsageError(f"--{view} takes no PATTERN and no --sort")
        if view == "manifest":
            with reading_models(store, reference, plain_http=plain_http) as (reader, (own,)):
                output.show_bytes(reader.read_manifest(own))
        else:
            source = model_source(reference, store=store, plain_http=plain_http)
            _show_source(reference, source, out)
        return
    model = describe_model(reference, store=store, plain_http=plain_http)
    view = view or _default_view(model, out)
    rows = _selected(model, view, patterns)
    if order:
        rows = sorted(rows, key=lambda row: (_SORT_KEYS[order](row), row.name))
    out.result(lambda: _as_json(model, view, rows), _as_text(model, view, rows))
    output.show_note(*model.notices)
    messages = {(blob.digest, blob.size): blob.fault for blob in model.faults}
    output.exit_with(f"model {model.reference}: {message}" for message in messages.values())


def _default_view(model: ModelDescription, out: Output) -> View:
    if not (model.tensors or model.faults or out.is_json) and model.files:
        return "files"  # a model of files that were stored as they are
    return "tensors"


def _selected(model: ModelDescription, view: View, patterns: Sequence[str]) -> Sequence[Row]:
    """Return the rows of a view. Among the tensors, each faulty blob has a row of its own."""
    from blobstore.manifests import media_types

    rows: list[Row] = list(model.blobs if view == "layers" else model.files)
    if view == "tensors":
        # By digest too: several layers may have no name.
        by_layer: dict[tuple[str, Digest], list[TensorDescription]] = {}
        for tensor in model.tensors:
            by_layer.setdefault((tensor.layer, tensor.digest), []).append(tensor)
        rows = []
        for blob in model.blobs:
            if blob.media_type in media_types.WEIGHTS:
                rows += [blob] if blob.fault else by_layer.get((blob.name, blob.digest), ())
        rows += [blob for blob in model.faults if blob.media_type not in media_types.WEIGHTS]
    for pattern in patterns:
        if not any(glob_matches(row.name, pattern) for row in rows):
            message = f"nothing in model {quote(model.reference)} matches {quote(pattern)}"
            if model.faults:
                first = model.faults[0].fault
                raise Damaged(f"{message}, but not all of it can be read: {first}")
            part = arguments.glob_advice(pattern, has_near=any(pattern in row.name for row in rows))
            raise NotFound(message, advice=part)
    if not patterns:
        return rows
    return [row for row in rows if any_glob_matches(row.name, patterns)]


def _is_blob(row: Row) -> TypeIs[BlobDescription]:
    return hasattr(row, "media_type")


def _as_text(model: ModelDescription, view: View, rows: Sequence[Row]) -> Iterator[str]:
    headings = _HEADINGS[view]
    numbers = [index for index, heading in enumerate(headings) if heading in ("BITS", "SIZE")]
    alarming = [index for index, row in enumerate(rows) if _is_blob(row) and row.fault]
    architecture = render.cell(model.architecture) or "unknown architecture"
    kind = f" ({render.cell(model.model_type)})" if model.model_type else ""
    yield f"{render.cell(model.reference)}: {architecture}{kind}"
    if model.format == "gguf":
        yield "a model of Ollama: its tensors are in one GGUF file, not one blob each"
    if model.signatures or model.signatures is None:
        from blobstore.operations.sign.report import describe_signers

        signers = render.cell(describe_signers(model.signatures))
        yield f"{'signatures:' if model.signatures is None else 'signed by'} {signers}"
    if model.reading and model.reading.how == "pread":
        yield f"read with pread: {model.reading.reason}"
    if model.metrics:
        yield f"metrics: {render.metrics(model.metrics)}"
    cells = [_cells(view, row) for row in rows]
    yield render.table(headings, cells, right=numbers, alarming=alarming)
    yield ", ".join(_totals(model, view, rows))


def _cells(view: View, row: Row) -> tuple[str, ...]:
    name, end = render.cell(row.name), (render.human_bytes(row.size), row.digest.short)
    if not _is_blob(row):
        kind = render.cell(row.type) + (f" g{row.group_size}" if row.group_size else "")
        shape = render.cell(f"[{', '.join(map(str, row.shape))}]")
        return (name, kind, shape, _bits(row.size, row.parameters), *end)
    if view == "tensors":
        return (name or render.cell(row.media_type), row.state.upper(), "-", "-", *end)
    mark = f"{row.state.upper()} " if row.fault else ""
    if view == "files":
        return (f"{mark}{name}", *end)
    return (name, f"{mark}{render.cell(row.media_type)}", *end)


def _totals(model: ModelDescription, view: View, rows: Sequence[Row]) -> Iterator[str]:
    from blobstore.operations.describe.show import CONFIG_NAME

    size = sum(row.size for row in rows)
    blobs = {row.digest for row in rows}
    if view == "tensors":
        total = len(model.tensors)
        tensors = [row for row in rows if not _is_blob(row)]
        parameters = sum(tensor.parameters for tensor in tensors)
        part = "" if len(tensors) == total else f"{len(tensors):,} of "
        yield f"{part}{render.count_of(total, 'tensor')} in {render.count_of(len(blobs), 'blob')}"
        yield f"{render.human_count(parameters)} parameters"
        yield render.human_bytes(size)
        if model.published_scheme:
            yield render.published(model.published_scheme)
        if parameters:
            yield f"{_bits(size, parameters)} bits per weight"
    else:
        count = sum(row.name != CONFIG_NAME for row in rows)
        config = " and the config" if count < len(rows) else ""
        yield f"{render.count_of(count, view[:-1])}{config}"
        yield render.human_bytes(size)
    frozen = len(blobs & {blob.digest for blob in model.blobs if blob.is_frozen})
    if frozen:
        part = f"{frozen:,} of {render.count_of(len(blobs), 'blob')} " * (frozen < len(blobs))
        yield f"{part}frozen"


def _bits(size: int, elements: int) -> str:
    return f"{size * 8 / elements:.3g}" if elements else "-"


def _as_json(model: ModelDescription, view: View, rows: Sequence[Row]) -> dict[str, Any]:
    if view == "tensors":
        tensors = [row for row in rows if not _is_blob(row)]
        listed = output.records(tensors, _TENSOR_FIELDS)
        for tensor, shown in zip(tensors, listed, strict=True):
            if not tensor.is_quantized:
                del shown["quant_type"], shown["group_size"]
            if shown["bits_per_weight"] is not None:
                shown["bits_per_weight"] = round(shown["bits_per_weight"], 4)
    else:
        listed = output.records(rows, _BLOB_FIELDS)
    fields = (
        "name=reference format architecture model_type parameters published_scheme bytes=size "
        "frozen_bytes=frozen_size metrics"
    )
    faults = output.records(model.faults, f"{_BLOB_FIELDS} message=fault")
    signatures = None
    if model.signatures is not None:
        signatures = output.records(model.signatures, output.SIGNATURE_FIELDS)
    reading = model.reading and output.record(model.reading, "how reason")
    more = {"read": reading, "signatures": signatures, view: listed, "faults": faults}
    return output.record(model, fields) | more


def _show_source(name: Reference | str, source: SourceRecord | None, out: Output) -> None:
    if source is None:
        raise NotFound(f"model {name} does not say what it was imported from; import it again")
    files = output.records(source.files, "name format role bytes=size")
    for file, shown in zip(source.files, files, strict=True):
        shown["sha256"] = file.sha256.hex if file.sha256 else None
    fields = "kind repository commit options converted=is_converted"
    data = {"name": name} | output.record(source, fields) | {"files": files}
    out.result(data, _source_as_text(name, source))


def _source_as_text(name: Reference | str, source: SourceRecord) -> Iterator[str]:
    yield f"{render.cell(name)}: imported from {render.cell(render.origin(source))}"
    for key, value in source.options.items():
        yield render.cell(f"option {key}: {json.dumps(value)}")
    rows = [
        (
            render.cell(file.name),
            render.cell(f"{file.format} {file.role}".rstrip()),
            render.human_bytes(file.size),
            file.sha256.short if file.sha256 else "-",
        )
        for file in source.files
    ]
    yield render.table(("FILE", "FORMAT", "SIZE", "SHA256"), rows, right=(2,))
    if source.is_converted:
        yield "the import converted tensors, so an export writes new files"
