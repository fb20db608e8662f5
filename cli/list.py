"""``blobstore list``: prints the models of a store."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from blobstore.cli import arguments, options, output, render
from blobstore.core.escape import quote
from blobstore.errors import Damaged, ModelNotFound, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.operations.describe.list import ListedModel
    from blobstore.store.local import LocalStore

Order = Literal["name", "size", "shared", "frozen", "modified"]

_FIELDS = (
    "name=reference digest bytes=size shared_bytes=shared frozen_bytes=frozen modified "
    "published_scheme source error"
)


@click.command("list", short_help="List the models of the store.")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, type=arguments.MODEL_OR_ADDRESS)
@options.sort_option(
    get_args(Order),
    "Order of the models: by name, largest first, or latest first for modified.",
    default="name",
)
@options.shared("plain-http", "store", "json")
def command(
    patterns: tuple[str, ...],
    order: Order,
    store: LocalStore,
    plain_http: bool | None,
    out: Output,
) -> None:
    """List the models of the store, or those that a PATTERN matches.

    A PATTERN is a name, a glob such as 'team/*', or the start of an ID; a name without a tag stands
    for all of its tags. With --quiet, only names are printed.

    If the only PATTERN is oci://host/repository, the tags of that repository are listed; if it is
    a store in object storage such as s3://bucket/prefix, its models.

    SHARED is the part that other names use too, so removing a name frees at most the rest. FROZEN
    is the part that "blobstore freeze" has compressed; it is shown if any model is frozen. ID is
    the start of the manifest's digest. A manifest that cannot be read is listed with its error, and
    the exit code is then 4. A folder of manifests that cannot be read is reported, and the exit code
    is then 1.
    """
    from blobstore.operations.describe.list import list_models
    from blobstore.remotes.addresses import is_address

    if any(map(is_address, patterns)):
        _show_remote(patterns, plain_http, out)
        return
    unreadable: list[StoreError] = []
    models: Sequence[ListedModel] = list_models(
        store, read_sources=out.is_json, on_error=unreadable.append
    )
    models = _selected(models, patterns, unreadable)
    if order != "name":
        models = sorted(models, key=attrgetter(order), reverse=True)
    out.result(
        lambda: _as_json(models, unreadable),
        _as_table(models) if models else "",
        names=[model.reference for model in models],
        notes=[] if store.root.exists() else [f"there is no store at {store.root} yet"],
    )
    errors = [listed.error for listed in models if listed.error is not None]
    exit_code = Damaged.exit_code if errors else StoreError.exit_code
    output.exit_with((*errors, *unreadable), exit_code)


def _show_remote(addresses: Sequence[str], plain_http: bool | None, out: Output) -> None:
    from blobstore.registry.store import list_tags
    from blobstore.remotes.addresses import is_in_objects

    if len(addresses) > 1:
        raise click.UsageError("a repository cannot be combined with other patterns")
    if is_in_objects(addresses[0]):
        _show_objects(addresses[0], out)
        return
    found = list_tags(addresses[0], plain_http=plain_http)
    rows = [(render.cell(name), digest.short if digest else "-") for name, digest in found]
    out.result(
        {
            "models": [
                {"name": str(name), "digest": digest and str(digest)} for name, digest in found
            ]
        },
        render.table(("NAME", "ID"), rows),
        names=[name for name, _ in found],
    )


def _show_objects(address: str, out: Output) -> None:
    from blobstore.objects.address import StoreAddress
    from blobstore.objects.store import ObjectStore

    found = [
        (name, item.modified.timestamp())
        for name, item in sorted(ObjectStore(StoreAddress.parse(address)).list_manifests())
    ]
    rows = [(render.cell(name), render.human_age(moment)) for name, moment in found]
    models = [{"name": str(name), "modified": output.timestamp(moment)} for name, moment in found]
    out.result(
        {"models": models},
        render.table(("NAME", "MODIFIED"), rows),
        names=[name for name, _ in found],
    )


def _as_json(models: Sequence[ListedModel], unreadable: Sequence[StoreError]) -> dict[str, Any]:
    shown = output.records(models, _FIELDS)
    for model in shown:
        if model["error"]:
            model.update(dict.fromkeys(("bytes", "shared_bytes", "frozen_bytes")))
        if model["source"]:
            model["source"] = output.record(model["source"], "kind repository commit options")
    return {"models": shown, "unreadable": list(map(str, unreadable))}


def _selected(
    models: Sequence[ListedModel], patterns: Sequence[str], unreadable: Sequence[StoreError]
) -> Sequence[ListedModel]:
    """Return the models that any pattern matches; all if there are no patterns."""
    for pattern in patterns:
        if not any(_matches(model, pattern) for model in models):
            if unreadable:  # which may have it
                raise unreadable[0]
            raise ModelNotFound(f"no model matches {quote(pattern)}")
    return [
        model
        for model in models
        if not patterns or any(_matches(model, pattern) for pattern in patterns)
    ]


def _matches(model: ListedModel, pattern: str) -> bool:
    from blobstore.manifests.reference import name_matches
    from blobstore.store.name_patterns import id_start, is_pattern

    start = id_start(pattern)
    if model.digest is not None and start and model.digest.hex.startswith(start):
        return True
    globs = [pattern] if is_pattern(pattern) else [pattern, f"{pattern}:*"]
    return any(name_matches(model.reference, text) for text in globs)


def _as_table(models: Sequence[ListedModel]) -> str:
    sizes = {"SIZE": "size", "SHARED": "shared"}
    if any(model.frozen for model in models):
        sizes["FROZEN"] = "frozen"
    has_published = any(model.published_scheme for model in models)
    rows = [
        (
            render.cell(model.reference),
            model.digest.short if model.digest else "UNREADABLE",
            *(
                "-" if model.error else render.human_bytes(getattr(model, key))
                for key in sizes.values()
            ),
            render.human_age(model.modified),
            *([render.published(model.published_scheme)] if has_published else []),
        )
        for model in models
    ]
    broken = [row for row, model in enumerate(models) if model.error]
    headings = ("NAME", "ID", *sizes, "MODIFIED", *(["QUANTIZATION"] if has_published else []))
    return render.table(headings, rows, right=range(2, 2 + len(sizes)), alarming=broken)
