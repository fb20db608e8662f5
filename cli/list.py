"""``blobstore list``: prints the models of a store."""

from __future__ import annotations

import contextlib
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.output import SIGNATURE_FIELDS
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobstoreError, Damaged, InvalidReference, ModelNotFound, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from blobstore.cli.output import Output
    from blobstore.core.digest import Digest
    from blobstore.manifests.reference import Reference
    from blobstore.operations.describe.list import ListedModel
    from blobstore.remotes.catalog import RemoteEntry
    from blobstore.store.catalog import CatalogEntry
    from blobstore.store.local import LocalStore

_Item = TypeVar("_Item")
Order = Literal["name", "size", "shared", "frozen", "modified"]
_ORDERS = get_args(Order)

_FIELDS = (
    "name=reference digest bytes=size shared_bytes=shared frozen_bytes=frozen modified "
    "published_scheme source metrics error store"
)


@click.command("list", short_help="List the models of the store.")
@click.argument("patterns", metavar="[PATTERN]...", nargs=-1, type=arguments.MODEL_OR_REMOTE)
@options.sort_option(
    _ORDERS,
    "Order of the models: by name, largest first, or latest first for modified. Or a metric, such as "
    "loss, smallest first, or -accuracy, largest first.",
    default="name",
    others=True,
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List the first N alone.")
@options.shared("plain-http", "store", "json")
def command(
    patterns: tuple[str, ...],
    order: str,
    limit: int | None,
    store: LocalStore,
    plain_http: bool | None,
    out: Output,
) -> None:
    """List the models of the store, or those that a PATTERN matches.

    A PATTERN is a name, a glob such as 'team/*', or the start of an ID; a name without a tag stands
    for all of its tags. With --quiet, only names are printed.

    If the only PATTERN is oci://host/repository, the tags of that repository are listed. If there is no
    such repository, the tags of those below it are, such as oci://host/team; oci://host stands for all
    of them. Not every registry lists its repositories. If it is a store in object storage, such as
    s3://bucket/prefix, its models are listed. SHARED is then the part that others of the list use.

    SHARED is the part that other names use too, so removing a name frees at most the rest. If each PATTERN
    is a name, it is shown only with --verbose or --sort shared, because all models are read for it. FROZEN
    is the part that "blobstore freeze" has compressed; it is shown if any model is frozen. ID is
    the start of the manifest's digest, the same in a store, a registry and object storage. A manifest
    that cannot be read is listed with its error, and a name whose manifest is lost is reported; the
    exit code is then 4. A folder of manifests that cannot be read is reported, and the exit code is
    then 1. With --verbose, SIGNED BY says who signed a model, as far as the keys of the policy can
    verify it.

    A metric is a number in the metrics.json of a model, where training keeps those of its steps. Models
    without it come last.
    """
    from blobstore.operations.describe.list import choose_models
    from blobstore.remotes.addresses import is_address

    if any(map(is_address, patterns)):
        _show_remote(store, patterns, plain_http, order, limit, out)
        return
    unreadable: list[BlobstoreError] = []
    repositories = _repositories(patterns)
    # If models are named, the others need not be read. `du` and `info` say what such a model shares.
    has_shared = not repositories or out.is_json or output.is_verbose() or order == "shared"
    models: Sequence[ListedModel] = choose_models(
        store,
        lambda reference, digest: _is_chosen(reference, digest, patterns),
        repositories=repositories,
        read_shared=has_shared,
        read_sources=out.is_json,
        read_signatures=out.is_json or output.is_verbose(),
        read_metrics=out.is_json or order not in _ORDERS,
        on_error=unreadable.append,
    )
    lost = _lost(store, patterns, unreadable.append)
    _check_found(store, [*models, *lost], patterns, unreadable)
    missing = [f"{entry.error}; 'blobstore repair' restores it" for entry in lost]
    metric = ""
    if order not in _ORDERS:
        metric = order.removeprefix("-")
        models = _by_metric(models, metric, is_reverse=order.startswith("-"))
    elif order != "name":
        models = sorted(models, key=attrgetter(order), reverse=True)
    models, notes = _first(models, limit)
    out.result(
        lambda: _as_json(models, [*unreadable, *missing]),
        _as_table(models, metric, has_shared=has_shared) if models else "",
        names=[model.reference for model in models],
        notes=(*arguments.store_notes(store), *notes),
    )
    errors = [listed.error for listed in models if listed.error is not None]
    exit_code = Damaged.exit_code if errors or lost else StoreError.exit_code
    output.exit_with((*errors, *missing, *unreadable), exit_code)


def _lost(
    store: LocalStore, patterns: Sequence[str], on_error: Callable[[BlobstoreError], object]
) -> list[CatalogEntry]:
    """Return the names whose manifests are lost. If patterns are names, the errors of absent ones say it."""
    from blobstore.store.catalog import lost_entry

    if _repositories(patterns):
        return []
    with contextlib.suppress(BlobstoreError, OSError):  # some readers may not read all folders
        lost = map(lost_entry, store.names.published.lost(on_error=on_error))
        return [it for it in lost if _is_chosen(it.reference, None, patterns)]
    return []


def _by_metric(
    models: Sequence[ListedModel], metric: str, *, is_reverse: bool
) -> Sequence[ListedModel]:
    """Return models in the order of a metric; those without it come last. Raises UsageError."""
    found = [model for model in models if metric in model.metrics]
    if not found:
        known = sorted({name for model in models for name in model.metrics})
        raise click.UsageError(
            f"no model here has a metric {quote(metric)}; there {_listed(known)}, and the orders "
            f"{', '.join(_ORDERS)}"
        )
    found.sort(key=lambda model: model.metrics[metric], reverse=is_reverse)
    return [*found, *(model for model in models if metric not in model.metrics)]


def _listed(metrics: Sequence[str]) -> str:
    if not metrics:
        return "are no metrics"
    return f"{'is' if len(metrics) == 1 else 'are'} {join_some([*map(quote, metrics)], 8)}"


def _repositories(patterns: Sequence[str]) -> list[Reference]:
    """Return the repositories of what patterns match; none if that may be in any."""
    from blobstore.manifests.reference import Reference
    from blobstore.store.name_patterns import id_start, is_pattern

    if any(is_pattern(one) or id_start(one) for one in patterns):
        return []
    return list(map(Reference.parse, patterns))


def _first(items: Sequence[_Item], limit: int | None) -> tuple[Sequence[_Item], list[str]]:
    """Return the items that are listed, and what to say of the others."""
    if limit is None or len(items) <= limit:
        return items, []
    return items[:limit], [f"{limit:,} of {len(items):,} models are listed"]


def _show_remote(
    store: LocalStore,
    addresses: Sequence[str],
    plain_http: bool | None,
    order: str,
    limit: int | None,
    out: Output,
) -> None:
    from blobstore.remotes.catalog import read_remote_catalog, shared_sizes

    if len(addresses) > 1:
        raise click.UsageError("an address cannot be combined with other patterns")
    entries = read_remote_catalog(addresses[0], plain_http=plain_http, kept_in=store)
    models: Sequence[tuple[RemoteEntry, int]]
    models = list(zip(entries, shared_sizes(entries), strict=True))
    keys: dict[str, Callable[[tuple[RemoteEntry, int]], float]] = {
        "size": lambda pair: pair[0].size or 0,
        "shared": lambda pair: pair[1],
        "modified": lambda pair: pair[0].modified or 0,
    }
    if order in keys:
        models = sorted(models, key=keys[order], reverse=True)
    elif order != "name":
        raise click.UsageError(f"--sort {order} is for models of the store")
    models, notes = _first(models, limit)
    out.result(
        {
            "models": [
                output.record(
                    entry, "name=address digest registry_digest bytes=size modified error"
                )
                | {"shared_bytes": None if entry.error else shared}
                for entry, shared in models
            ]
        },
        _remote_table(models) if models else "no models: all names were removed",
        names=[entry.address for entry, _ in models],
        notes=notes,
    )
    if output.is_verbose() and not out.is_json:
        from blobstore.operations.sign.report import describe_signers

        output.show_note(f"signatures: {describe_signers(None)}")
    output.exit_with(
        f"{entry.address}: {entry.error}" for entry, _ in models if entry.error is not None
    )


def _remote_table(models: Sequence[tuple[RemoteEntry, int]]) -> str:
    # Registries do not say when a tag was written.
    with_time = any(entry.modified is not None for entry, _ in models)
    rows = [
        (
            render.cell(entry.address),
            entry.digest.short if entry.digest else "-",
            *(
                ("-", "-")
                if entry.size is None
                else (render.human_bytes(entry.size), render.human_bytes(shared))
            ),
            *([render.human_age(entry.modified or 0)] if with_time else []),
        )
        for entry, shared in models
    ]
    broken = [row for row, (entry, _) in enumerate(models) if entry.error]
    headings = ("NAME", "ID", "SIZE", "SHARED", *(["MODIFIED"] if with_time else []))
    return render.table(headings, rows, right=(2, 3), alarming=broken)


def _as_json(models: Sequence[ListedModel], unreadable: Sequence[object]) -> dict[str, Any]:
    shown = output.records(models, _FIELDS)
    for listed, model in zip(models, shown, strict=True):
        model["signatures"] = output.records(listed.signatures, SIGNATURE_FIELDS)
        if model["error"]:
            model.update(dict.fromkeys(("bytes", "shared_bytes", "frozen_bytes")))
        if model["source"]:
            model["source"] = output.record(model["source"], "kind repository commit options")
    return {"models": shown, "unreadable": list(map(str, unreadable))}


def _check_found(
    store: LocalStore,
    models: Sequence[ListedModel | CatalogEntry],
    patterns: Sequence[str],
    unreadable: Sequence[BlobstoreError],
) -> None:
    """Check that each pattern matches one of the models."""
    for pattern in patterns:
        if not any(_matches(model.reference, model.digest, pattern) for model in models):
            if unreadable:  # which may have it
                raise unreadable[0]
            raise ModelNotFound(
                f"no model matches {quote(pattern)}",
                advice=arguments.address_advice(pattern)
                or arguments.shown_path_advice(pattern)
                or _similar(pattern, store),
            )


def _is_chosen(reference: Reference, digest: Digest | None, patterns: Sequence[str]) -> bool:
    return not patterns or any(_matches(reference, digest, one) for one in patterns)


def _matches(reference: Reference, digest: Digest | None, pattern: str) -> bool:
    from blobstore.manifests.reference import name_matches
    from blobstore.store.name_patterns import id_start, is_pattern

    start = id_start(pattern)
    if digest is not None and start and digest.hex.startswith(start):
        return True
    globs = [pattern] if is_pattern(pattern) else [pattern, f"{pattern}:*"]
    return any(name_matches(reference, text) for text in globs)


def _similar(pattern: str, store: LocalStore) -> str:
    from blobstore.manifests.reference import Reference

    if any(str(name).startswith(f"{pattern}/") for name in store.references()):
        return f"{quote(f'{pattern}/*')} matches those of this namespace"
    with contextlib.suppress(InvalidReference):  # a glob
        return store.not_found(Reference.parse(pattern)).advice
    return ""


def _as_table(models: Sequence[ListedModel], metric: str, *, has_shared: bool) -> str:
    sizes = {"SIZE": "size"}
    if has_shared:
        sizes["SHARED"] = "shared"
    if any(model.frozen for model in models):
        sizes["FROZEN"] = "frozen"
    from blobstore.operations.sign.report import describe_signers

    has_published = any(model.published_scheme for model in models)
    has_store = any(model.store for model in models)
    more = [render.cell(metric.upper())] if metric else []
    more += ["STORE"] * has_store
    more += ["QUANTIZATION"] * has_published + ["SIGNED BY"] * output.is_verbose()
    rows = [
        (
            render.cell(model.reference),
            model.digest.short if model.digest else "UNREADABLE",
            *(
                "-" if model.error else render.human_bytes(getattr(model, key))
                for key in sizes.values()
            ),
            render.human_age(model.modified),
            *([_metric_of(model, metric)] if metric else []),
            *(["shared" if model.store else "own"] * has_store),
            *([render.published(model.published_scheme)] if has_published else []),
            *([render.cell(describe_signers(model.signatures)) or "-"] * output.is_verbose()),
        )
        for model in models
    ]
    broken = [row for row, model in enumerate(models) if model.error]
    headings = ("NAME", "ID", *sizes, "MODIFIED", *more)
    return render.table(headings, rows, right=range(2, 2 + len(sizes)), alarming=broken)


def _metric_of(model: ListedModel, metric: str) -> str:
    return render.metric(model.metrics[metric]) if metric in model.metrics else "-"
