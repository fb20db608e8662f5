"""``blobstore du``: prints the disk usage of models and of the store."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.operations.describe.disk_usage import ModelsUsage, ModelUsage, Space
    from blobstore.store.local import LocalStore

Order = Literal["name", "size", "unique"]

_HEADINGS = ("NAME", "ON DISK", "UNIQUE", "SHARED", "BLOBS")
_SPACES = {
    "bases": "among these: bases of frozen blobs, in no model themselves",
    "below": "not counted: blobs that models here need, in the shared store",
    "unreferenced": 'blobs that no model needs; "blobstore gc" frees them',
    "foreign": "other files in the folder of blobs",
    "temporary": "temporary files",
    "partial": "unfinished downloads",
    "quarantine": "damaged files in quarantine",
    "caches": "caches",
    "copies": 'copies for servers, made by "blobstore run"; "blobstore gc" frees them',
    "manifests": "manifests",
}
_UNSURE = "blobs that no manifest needs that can be read; 'blobstore repair' restores manifests"
"""What is not referenced, if some manifest is damaged or lost: ``gc`` does not free it."""


@click.command("du", short_help="Show the disk usage of models and the store.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL_OR_REMOTE)
@options.sort_option(
    get_args(Order), "Order of the models; largest first for size and unique.", default="name"
)
@options.shared("plain-http", "store", "json")
def command(
    names: tuple[str, ...],
    store: LocalStore,
    order: Order,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Show the disk usage of the models NAME, or of all models and the whole store.

    A model needs its blobs, and the bases that frozen ones were compressed against. UNIQUE is the
    part that no other name needs; it is free once the name is removed and "blobstore gc" has run.
    SHARED is the rest. Sizes are those of the files on disk. Blobs that are missing or
    have a wrong size are reported, and the exit code is then 4.

    If NAME is an address such as oci://host/repository:tag or s3://bucket/prefix/model, the size of
    the model there is shown, and how much of it the store has. The address of a store in object
    storage, of a registry or of repositories stands for all models there.
    """
    from blobstore.operations.describe.disk_usage import measure_models, measure_usage
    from blobstore.remotes.addresses import is_address

    if any(map(is_address, names)):
        if not all(map(is_address, names)):
            raise click.UsageError("names and addresses in registries cannot be combined")
        _show_remote(store, names, plain_http, out)
        return
    usage: ModelsUsage
    if names:
        usage = measure_models(arguments.models(store, names), store=store)
    else:
        usage = measure_usage(store=store)
    rows: Sequence[ModelUsage] = usage.models  # by name, unless some were named
    if names or order != "name":
        key = attrgetter("reference" if order == "name" else order)
        rows = sorted(rows, key=key, reverse=order != "name")
    notes = arguments.store_notes(store)
    out.result(
        lambda: _as_json(usage, rows) | {"seconds": out.seconds},
        _as_text(usage, rows),
        notes=notes,
    )
    output.exit_with(_errors(usage))


def _errors(usage: ModelsUsage) -> Iterator[str]:
    for model in usage.models:
        if model.faults:
            more = f"; and {len(model.faults) - 1:,} more of its blobs" * (len(model.faults) > 1)
            yield f"model {model.reference}: {model.faults[0]}{more}"
    for error in usage.unreadable:
        yield f"{error}; its blobs count as needed by no model"


def _show_remote(
    store: LocalStore, addresses: Sequence[str], plain_http: bool | None, out: Output
) -> None:
    from blobstore.operations.describe.remote_usage import measure_remote

    usage = measure_remote(addresses, store=store, plain_http=plain_http)
    models, together = usage.models, usage.together
    rows = [
        (render.cell(model.address), "UNREADABLE", "-", "-", "-")
        if model.error
        else (
            render.cell(model.address),
            *map(render.human_bytes, (model.size, model.present, model.missing)),
            f"{model.blobs:,}",
        )
        for model in models
    ]
    sizes = "blobs bytes=size bytes_present=present bytes_missing=missing"
    headings = ("NAME", "SIZE", "IN STORE", "TO FETCH", "BLOBS")
    broken = [row for row, model in enumerate(models) if model.error]
    lines = [render.table(headings, rows, right=(1, 2, 3, 4), alarming=broken)] if rows else []
    if len(models) != 1:
        lines.append(
            f"together: {render.count_of(len(models), 'model')}, "
            f"{render.human_bytes(together.size)} in {render.count_of(together.blobs, 'blob')}; "
            f"without sharing {render.human_bytes(usage.without_sharing)}"
        )
    out.result(
        {
            "models": output.records(models, f"name=address {sizes} error"),
            "together": output.record(together, sizes)
            | {"bytes_without_sharing": usage.without_sharing},
        },
        lines,
    )
    output.exit_with(f"{model.address}: {model.error}" for model in models if model.error)


def _as_text(usage: ModelsUsage, rows: Sequence[ModelUsage]) -> Iterator[str]:
    from blobstore.operations.describe.disk_usage import StoreUsage

    if isinstance(usage, StoreUsage) and not usage.size:
        return
    if rows:
        broken = [row for row, model in enumerate(rows) if model.error or model.faults]
        cells = [
            (render.cell(model.reference), "UNREADABLE", "-", "-", "-")
            if model.error
            else (
                render.cell(model.reference),
                *map(render.human_bytes, (model.size, model.unique, model.shared)),
                f"{model.blobs:,}",
            )
            for model in rows
        ]
        yield render.table(_HEADINGS, cells, right=(1, 2, 3, 4), alarming=broken)
    if not isinstance(usage, StoreUsage):
        yield (
            f"together {render.human_bytes(usage.together.size)}, of which "
            f"no other model needs {render.human_bytes(usage.together_unique.size)}"
        )
        return
    ratio = usage.dedup_ratio
    saved = f" ({ratio:.2f} times as much)" if ratio is not None else ""
    yield (
        f"store: {render.count_of(usage.names, 'model')}, "
        f"{render.human_bytes(usage.referenced.size)} in "
        f"{render.count_of(usage.referenced.files, 'blob')}; without sharing "
        f"{render.human_bytes(usage.without_sharing)}{saved}"
    )
    if usage.cold.files:
        share = f" ({usage.saved_share:.1%})" if usage.saved_share is not None else ""
        yield (
            f"  {render.human_bytes(usage.hot)} hot, {render.human_bytes(usage.cold.size)} cold in "
            f"{render.count_of(usage.cold.files, 'blob')}; {render.human_bytes(usage.saved)} saved{share}"
        )
    meanings = _SPACES | ({"unreferenced": _UNSURE} if usage.unreadable else {})
    for name, meaning in meanings.items():
        space: Space = getattr(usage, name)
        if space.files:
            count = render.count_of(space.files, "file")
            yield f"  {render.human_bytes(space.size)} in {count}: {meaning}"
    yield f"  {render.human_bytes(usage.size)} in all"


def _as_json(usage: ModelsUsage, rows: Sequence[ModelUsage]) -> dict[str, Any]:
    from blobstore.operations.describe.disk_usage import StoreUsage

    models = output.records(
        rows, "name=reference blobs bytes=size unique_bytes=unique shared_bytes=shared faults error"
    )
    for model in models:
        if model["error"]:
            model.update(dict.fromkeys(("blobs", "bytes", "unique_bytes", "shared_bytes")))
    data = {
        "models": models,
        "together": output.record(usage, "bytes=together.size unique_bytes=together_unique.size"),
        "errors": usage.unreadable,
    }
    if isinstance(usage, StoreUsage):
        data["cold"] = output.record(
            usage, "files=cold.files bytes=cold.size hot_bytes=hot saved_bytes=saved saved_share"
        )
        data["store"] = output.record(
            usage,
            "models=names blobs=referenced.files bytes=referenced.size "
            "bytes_without_sharing=without_sharing dedup_ratio bytes_in_all=size",
        )
        for name in _SPACES:
            data[name] = output.record(getattr(usage, name), "files bytes=size")
    return data
