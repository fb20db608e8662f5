"""``blobstore list``: prints the models of a store."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Literal

import click

from blobstore.cli import options, render
from blobstore.core.escape import quote
from blobstore.errors import Damaged, ModelNotFound, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.operations.describe.list import ListedModel
    from blobstore.store.local import LocalStore

Order = Literal["name", "size", "shared", "frozen", "modified"]

_FIELDS = (
    "name=reference digest bytes=size shared_bytes=shared frozen_bytes=frozen modified source error"
)


@click.command("list", short_help="List the models of the store.")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, type=options.MODEL_OR_ADDRESS)
@click.option(
    "--sort",
    "order",
    type=click.Choice(["name", "size", "shared", "frozen", "modified"]),
    default="name",
    show_default=True,
    help="Order of the models: by name, largest first, or latest first for modified.",
)
@options.plain_http_option
@options.store_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    patterns: tuple[str, ...],
    order: Order,
    store: LocalStore,
    plain_http: bool | None,
    as_json: bool,
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
        _show_tags(ctx, patterns, plain_http, as_json=as_json)
        return
    unreadable: list[StoreError] = []
    models: Sequence[ListedModel] = list_models(
        store, read_sources=as_json, on_error=unreadable.append
    )
    models = _selected(models, patterns, unreadable)
    if order != "name":
        models = sorted(models, key=attrgetter(order), reverse=True)
    if as_json:
        _show_json(models, unreadable)
    elif models:
        render.show(_as_table(models))
    elif not store.root.exists():
        render.show_note(f"there is no store at {store.root} yet")
    errors = [listed.error for listed in models if listed.error is not None]
    for error in (*errors, *unreadable):
        render.show_error(str(error))
    if errors or unreadable:
        ctx.exit(Damaged.exit_code if errors else StoreError.exit_code)


def _show_tags(
    ctx: click.Context, addresses: Sequence[str], plain_http: bool | None, *, as_json: bool
) -> None:
    from blobstore.registry.store import list_tags
    from blobstore.remotes.addresses import is_in_objects

    if len(addresses) > 1:
        raise click.UsageError("a repository cannot be combined with other patterns", ctx)
    if is_in_objects(addresses[0]):
        _show_objects(addresses[0], as_json=as_json)
        return
    found = list_tags(addresses[0], plain_http=plain_http)
    if as_json:
        models = [{"name": str(name), "digest": digest and str(digest)} for name, digest in found]
        render.show_json({"models": models})
    elif render.is_quiet():
        render.show("\n".join(render.cell(name) for name, _ in found))
    else:
        rows = [(render.cell(name), digest.short if digest else "-") for name, digest in found]
        render.show(render.table(("NAME", "ID"), rows))


def _show_objects(address: str, *, as_json: bool) -> None:
    from blobstore.objects.address import StoreAddress
    from blobstore.objects.store import ObjectStore

    found = sorted(ObjectStore(StoreAddress.parse(address)).list_manifests())
    if as_json:
        models = [
            {"name": str(name), "modified": render.timestamp(item.modified.timestamp())}
            for name, item in found
        ]
        render.show_json({"models": models})
    elif render.is_quiet():
        render.show("\n".join(render.cell(name) for name, _ in found))
    else:
        rows = [
            (render.cell(name), render.human_age(item.modified.timestamp())) for name, item in found
        ]
        render.show(render.table(("NAME", "MODIFIED"), rows))


def _show_json(models: Sequence[ListedModel], unreadable: Sequence[StoreError]) -> None:
    shown = render.records(models, _FIELDS)
    for model in shown:
        model["modified"] = render.timestamp(model["modified"])
        if model["error"]:
            model.update(dict.fromkeys(("bytes", "shared_bytes", "frozen_bytes")))
        if model["source"]:
            model["source"] = render.record(model["source"], "kind repository commit options")
    render.show_json({"models": shown, "unreadable": list(map(str, unreadable))})


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
    if render.is_quiet():
        return "\n".join(render.cell(model.reference) for model in models)
    sizes = {"SIZE": "size", "SHARED": "shared"}
    if any(model.frozen for model in models):
        sizes["FROZEN"] = "frozen"
    rows = [
        (
            render.cell(model.reference),
            model.digest.short if model.digest else "UNREADABLE",
            *(
                "-" if model.error else render.human_bytes(getattr(model, key))
                for key in sizes.values()
            ),
            render.human_age(model.modified),
        )
        for model in models
    ]
    broken = [row for row, model in enumerate(models) if model.error]
    headings = ("NAME", "ID", *sizes, "MODIFIED")
    return render.table(headings, rows, right=range(2, 2 + len(sizes)), alarming=broken)
