"""``blobstore show``: what a model is made of."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import click

from blobstore.cli import render
from blobstore.cli.options import json_option, parse_name, store_option, suggesting_names
from blobstore.core.escape import quote
from blobstore.errors import BlobMissing, BlobstoreError, Damaged, NotFound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.models.tensors import ModelTensors, StoredTensor
    from blobstore.store.local import LocalStore

View = Literal["tensors", "layers", "files", "manifest"]
Order = Literal["name", "size", "type", "params"]
Faults = dict[tuple["Digest", int], BlobstoreError]
"""What is wrong with a blob, by its digest and the size that the manifest promises."""

_CONFIG_NAME = "(config)"
_CONFIG_FILES = ("config.json", "model_index.json")
_HEADINGS = {
    "tensors": ("NAME", "TYPE", "SHAPE", "BITS", "SIZE", "DIGEST"),
    "layers": ("NAME", "MEDIA TYPE", "SIZE", "DIGEST"),
    "files": ("NAME", "SIZE", "DIGEST"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A tensor, or a blob that is listed as a whole."""

    name: str
    type: str
    size: int
    digest: Digest
    tensor: StoredTensor | None = None
    fault: BlobstoreError | None = None

    @property
    def parameters(self) -> int:
        return math.prod(self.tensor.shape) if self.tensor is not None else 0

    @property
    def state(self) -> str:
        """One word for what is wrong, or ``ok``."""
        if self.fault is None:
            return "ok"
        if isinstance(self.fault, BlobMissing):
            return "missing"
        return "damaged" if isinstance(self.fault, Damaged) else "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model as far as it can be read."""

    reference: Reference
    manifest: Manifest
    contents: ModelTensors
    faults: Faults
    architecture: str
    model_type: str
    is_gguf: bool
    """One of Ollama's own, whose weights are in one file."""
    frozen: Mapping[Digest, int]
    """The sizes of blobs that are coded, and no files at the moment."""

    @property
    def parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.contents.tensors.values())


@click.command("show", short_help="Show the tensors, layers or files of a model.")
@click.argument("name", callback=parse_name)
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1)
@store_option
@click.option("--layers", "view", flag_value="layers", help="List the manifest's layers.")
@click.option("--files", "view", flag_value="files", help="List the small files.")
@click.option(
    "--manifest", "view", flag_value="manifest", help="Print the manifest, byte for byte."
)
@click.option(
    "--sort",
    "order",
    type=click.Choice(["name", "size", "type", "params"]),
    help="Order of the rows; the manifest's by default. Largest first for size and params.",
)
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    name: Reference,
    patterns: tuple[str, ...],
    store: LocalStore,
    view: View | None,
    order: Order | None,
    as_json: bool,
) -> None:
    """Show the tensors of the model NAME: types, shapes, sizes and digests.

    PATTERNs such as '*.mlp.*' choose by name; one that matches nothing is an error. A blob that is
    missing or damaged is shown as such and the exit code is 4; only "blobstore verify" reads the
    data itself. Over-long names are shortened, but not in JSON.
    """
    with suggesting_names(store, [name]):
        if view == "manifest":
            if patterns or order:
                raise click.UsageError("--manifest takes no PATTERN and no --sort", ctx)
            render.show_bytes(store.read_manifest(name))
            return
        model = _read_model(store, name)
    if view is None:
        view = "layers" if model.is_gguf else "tensors"
    rows = _ordered(_chosen(_rows(model, view), patterns, model), order)
    if as_json:
        render.show_json(_as_json(model, view, rows))
    else:
        render.show(_as_text(model, view, rows))
    for error in model.faults.values():
        render.show_error(f"model {name}: {error}")
    if model.faults:
        ctx.exit(Damaged.exit_code)


# What there is to show


def _read_model(store: LocalStore, reference: Reference) -> _Model:
    from blobstore.manifests import media_types
    from blobstore.models.tensors import read_tensors

    manifest = store.resolve(reference)
    contents = read_tensors(store, manifest, collect_faults=True)
    faults = _faults(store, manifest, contents)
    has_tensors = bool(manifest.layers_of(media_types.TENSOR))
    is_gguf = not has_tensors and bool(manifest.layers_of(media_types.MODEL))
    if is_gguf:
        config = _read_json(store, manifest.config, faults)
        architecture = _text(config, "model_family")
    else:
        named = {layer.name: layer for layer in manifest.layers_of(media_types.JSON)}
        found = [named[name] for name in _CONFIG_FILES if name in named]
        config = _read_json(store, found[0], faults) if found else {}
        architecture = _text(config, "architectures") or _text(config, "_class_name")
    return _Model(
        reference=reference,
        manifest=manifest,
        contents=contents,
        faults=faults,
        architecture=architecture,
        model_type=_text(config, "model_type"),
        is_gguf=is_gguf,
        frozen={item.digest: item.size for item in manifest.blobs if store.is_cold(item.digest)},
    )


def _faults(store: LocalStore, manifest: Manifest, contents: ModelTensors) -> Faults:
    from blobstore.manifests import media_types

    faults: Faults = {}
    for blob in (manifest.config, *manifest.layers):
        if blob.media_type == media_types.TENSOR:
            error = contents.faults.get((blob.digest, blob.size))
            if error is not None:
                faults[blob.digest, blob.size] = error.at(f"layer {quote(blob.name)}")
            continue
        try:
            store.check_size(blob.digest, blob.size)
        except BlobstoreError as found:
            faults[blob.digest, blob.size] = found.at(f"layer {quote(_blob_name(blob, manifest))}")
    return faults


def _read_json(store: LocalStore, blob: Descriptor, faults: Faults) -> Mapping[str, Any]:
    """Return the object in a small blob, empty where there is none; note a fault of the blob."""
    try:
        value = json.loads(store.read_blob(blob.digest, blob.size))
    except BlobstoreError as error:
        faults.setdefault((blob.digest, blob.size), error.at(f"layer {quote(blob.name)}"))
        return {}
    except (ValueError, RecursionError):  # it is kept as the source had it, valid or not
        return {}
    return value if isinstance(value, dict) else {}


def _text(config: Mapping[str, Any], key: str) -> str:
    value = config.get(key)
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, str) else ""


def _blob_name(blob: Descriptor, manifest: Manifest) -> str:
    return blob.name or (_CONFIG_NAME if blob is manifest.config else "")


# Rows


def _rows(model: _Model, view: View) -> list[_Row]:
    from blobstore.manifests import media_types

    blobs = [
        _Row(
            name=_blob_name(blob, model.manifest),
            type=blob.media_type,
            size=blob.size,
            digest=blob.digest,
            fault=model.faults.get((blob.digest, blob.size)),
        )
        for blob in (model.manifest.config, *model.manifest.layers)
    ]
    if view == "layers":
        return blobs
    if view == "files":
        return [row for row in blobs if row.type in (media_types.JSON, media_types.FILE)]
    # By digest too: several layers may have no name.
    by_layer: dict[tuple[str, Digest], list[StoredTensor]] = {}
    for tensor in model.contents.tensors.values():
        by_layer.setdefault((tensor.layer.name, tensor.layer.digest), []).append(tensor)
    rows = [
        row
        for blob in blobs
        if blob.type == media_types.TENSOR
        for row in (
            [blob] if blob.fault else map(_tensor_row, by_layer.get((blob.name, blob.digest), ()))
        )
    ]
    return rows + [row for row in blobs if row.fault and row.type != media_types.TENSOR]


def _tensor_row(tensor: StoredTensor) -> _Row:
    return _Row(
        name=tensor.name,
        type=tensor.type_name,
        size=tensor.nbytes,
        digest=tensor.layer.digest,
        tensor=tensor,
    )


def _chosen(rows: list[_Row], patterns: Sequence[str], model: _Model) -> list[_Row]:
    for pattern in patterns:
        if not any(fnmatchcase(row.name, pattern) for row in rows):
            message = f"nothing in model {quote(model.reference)} matches {quote(pattern)}"
            if model.faults:
                first = next(iter(model.faults.values()))
                message += f", but not all of it can be read: {first}"
                raise Damaged(message)
            raise NotFound(message)
    if not patterns:
        return rows
    return [row for row in rows if any(fnmatchcase(row.name, item) for item in patterns)]


def _ordered(rows: list[_Row], order: Order | None) -> list[_Row]:
    if order == "size":
        return sorted(rows, key=lambda row: (-row.size, row.name))
    if order == "params":
        return sorted(rows, key=lambda row: (-row.parameters, row.name))
    if order == "type":
        return sorted(rows, key=lambda row: (row.type, row.name))
    return sorted(rows, key=lambda row: row.name) if order == "name" else rows


# What is printed


def _as_text(model: _Model, view: View, rows: Sequence[_Row]) -> str:
    texts = [_cells(view, row) for row in rows]
    headings = _HEADINGS[view]
    numbers = [index for index, heading in enumerate(headings) if heading in ("BITS", "SIZE")]
    alarming = [index for index, row in enumerate(rows) if row.fault]
    lines = [_title(model)]
    if model.is_gguf:
        lines.append("Ollama's own: the weights are one GGUF file, not blobs of tensors")
    lines.append(render.table(headings, texts, right=numbers, alarming=alarming))
    lines.append(_totals(model, view, rows) + _frozen(model, rows))
    return "\n".join(lines)


def _cells(view: View, row: _Row) -> tuple[str, ...]:
    state = row.state.upper()
    kind = render.cell(row.type)
    end = (render.human_bytes(row.size), row.digest.short)
    if view == "tensors":
        tensor = row.tensor
        if tensor is None:
            return (render.cell(row.name), state if row.fault else kind, "-", "-", *end)
        group = f" g{tensor.group_size}" if tensor.group_size else ""
        shape = render.cell(f"[{', '.join(map(str, tensor.shape))}]")
        return (
            render.cell(row.name),
            f"{kind}{group}",
            shape,
            _bits(row.size, row.parameters),
            *end,
        )
    mark = f"{state} " if row.fault else ""
    if view == "layers":
        return (render.cell(row.name), f"{mark}{kind}", *end)
    return (f"{mark}{render.cell(row.name)}", *end)


def _title(model: _Model) -> str:
    architecture = render.cell(model.architecture) or "unknown architecture"
    kind = f" ({render.cell(model.model_type)})" if model.model_type else ""
    return f"{render.cell(model.reference)}: {architecture}{kind}"


def _totals(model: _Model, view: View, rows: Sequence[_Row]) -> str:
    size = sum(row.size for row in rows)
    if view != "tensors":
        count = sum(row.name != _CONFIG_NAME for row in rows)
        config = " and the config" if count < len(rows) else ""
        return f"{render.count_of(count, view[:-1])}{config}, {render.human_bytes(size)}"
    total = len(model.contents.tensors)
    shown = sum(row.tensor is not None for row in rows)
    parameters = sum(row.parameters for row in rows)
    blobs = len({row.digest for row in rows})
    part = "" if shown == total else f"{shown:,} of "
    return (
        f"{part}{render.count_of(total, 'tensor')} in {render.count_of(blobs, 'blob')}, "
        f"{render.human_count(parameters)} parameters, {render.human_bytes(size)}"
        + (f", {_bits(size, parameters)} bits a weight" if parameters else "")
    )


def _frozen(model: _Model, rows: Sequence[_Row]) -> str:
    blobs = {row.digest for row in rows}
    frozen = len(blobs & model.frozen.keys())
    part = f"{frozen:,} of {render.count_of(len(blobs), 'blob')} " if frozen < len(blobs) else ""
    return f", {part}frozen" if frozen else ""


def _bits(size: int, elements: int) -> str:
    return f"{size * 8 / elements:.3g}" if elements else "-"


def _as_json(model: _Model, view: View, rows: Sequence[_Row]) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": str(model.reference),
        "format": "gguf" if model.is_gguf else "tensors",
        "architecture": model.architecture or None,
        "model_type": model.model_type or None,
        "parameters": None if model.is_gguf else model.parameters,
        "bytes": sum(blob.size for blob in model.manifest.blobs),
        "frozen_bytes": sum(model.frozen.values()),
    }
    if view == "tensors":
        value["tensors"] = [_tensor_json(row.tensor) for row in rows if row.tensor]
    else:
        value[view] = [_blob_json(model, row) for row in rows]
    faulty = [row for row in _rows(model, "layers") if row.fault]
    value["faults"] = [_blob_json(model, row) | {"message": str(row.fault)} for row in faulty]
    return value


def _tensor_json(tensor: StoredTensor) -> dict[str, Any]:
    quantized = {
        "quant_type": tensor.item.name if tensor.item else None,
        "group_size": tensor.group_size or None,
    }
    elements = math.prod(tensor.shape)
    return {
        "name": tensor.name,
        "type": tensor.type_name,
        "dtype": tensor.entry.spec.dtype.value,
        "shape": list(tensor.shape),
        "parameters": elements,
        "bytes": tensor.nbytes,
        "bits_per_weight": round(tensor.nbytes * 8 / elements, 4) if elements else None,
        "layer": tensor.layer.name,
        "digest": str(tensor.layer.digest),
    } | (quantized if tensor.companions else {})


def _blob_json(model: _Model, row: _Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "media_type": row.type,
        "bytes": row.size,
        "digest": str(row.digest),
        "state": row.state,
        "frozen": row.digest in model.frozen,
    }
