"""``blobstore list``: prints the models of a store."""

from __future__ import annotations

import contextlib
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.output import SIGNATURE_FIELDS
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobstoreError, Damaged, InvalidReference, ModelNotFound, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
_SIZES = ("SIZE", "SHARED", "FROZEN")
_UNREADABLE = "UNREADABLE"

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

    SHARED is the part that other names use too, so removing a name frees at most the rest. All models are
    read for it. So if each PATTERN is a name, or the store has 10,000 names or more, it is shown only with
    --verbose or --sort shared. Without it, models are printed while others are read, unless --sort needs
    all. FROZEN is the part that "blobstore freeze" has compressed; it is shown if any model is frozen. ID is
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
    chosen = _Chosen(store, patterns)
    named = _repositories(patterns)
    # If models are named, the others need not be read. `du` and `info` say what such a model shares.
    found = choose_models(
        store,
        chosen,
        repositories=named,
        read_shared=output.is_verbose() or order == "shared" or (out.is_json and bool(named)),
        read_sources=out.is_json,
        read_signatures=out.is_json or output.is_verbose(),
        read_metrics=out.is_json or order not in _ORDERS,
        on_error=unreadable.append,
    )
    models, metric = found.models, ""
    if order not in _ORDERS:
        metric = order.removeprefix("-")
        models = _by_metric([*models], metric, is_reverse=order.startswith("-"))
    elif order != "name":
        models = iter(sorted(models, key=attrgetter(order), reverse=True))
    notes = arguments.store_notes(store)
    first = list(islice(models, min(output.BATCH, limit or output.BATCH)))
    more = list(islice(models, 1))
    lost, absent = ([], None) if more else chosen.ended(unreadable)
    if absent is not None:
        raise absent
    models = chain(more, models)
    rest = islice(models, None if limit is None else limit - len(first))
    errors: list[object] = []
    shown, form = _form(store, out, first, metric, has_shared=found.has_shared, is_all=not more)
    for listed in chain(first, rest):
        shown.add([form(listed)])
        if listed.error is not None:
            errors.append(listed.error)
    if next(models, None) is not None:
        notes.append(f"there are more models than the {limit:,} listed")
    elif more:
        lost, absent = chosen.ended(unreadable)
    exit_code = Damaged.exit_code if errors or lost else StoreError.exit_code
    if absent is not None:
        errors, exit_code = [*errors, absent], exit_code if errors or lost else absent.exit_code
    missing = [f"{entry.error}; 'blobstore repair' restores it" for entry in lost]
    shown.end({"unreadable": list(map(str, [*unreadable, *missing]))})
    output.show_note(*([] if out.is_json else notes))
    output.exit_with((*errors, *missing, *unreadable), exit_code)


class _Chosen:
    """The models that the patterns match; all without patterns."""

    def __init__(self, store: LocalStore, patterns: Sequence[str]) -> None:
        self._store = store
        self._patterns = patterns
        self._absent = dict.fromkeys(patterns)

    def __call__(self, reference: Reference, digest: Digest | None) -> bool:
        """Return whether a pattern matches a model."""
        found = [one for one in self._patterns if _matches(reference, digest, one)]
        for one in found:
            self._absent.pop(one, None)
        return bool(found) or not self._patterns

    def ended(
        self, unreadable: list[BlobstoreError]
    ) -> tuple[list[CatalogEntry], BlobstoreError | None]:
        """Return the names whose manifests are lost, and the error of a pattern that matches no model.

        If patterns are names, the errors of absent ones say that a manifest is lost.
        """
        from blobstore.store.catalog import lost_entry

        lost: list[CatalogEntry] = []
        if not _repositories(self._patterns):
            # Some readers may not read all folders.
            with contextlib.suppress(BlobstoreError, OSError):
                names = self._store.names.published.lost(on_error=unreadable.append)
                lost = [lost_entry(name) for name in names if self(name, None)]
        for pattern in self._absent:
            error = ModelNotFound(
                f"no model matches {quote(pattern)} in the store {quote(self._store.root)}",
                advice=arguments.address_advice(pattern)
                or arguments.shown_path_advice(pattern)
                or _similar(pattern, self._store),
            )
            return lost, unreadable[0] if unreadable else error  # which may have it
        return lost, None


def _form(
    store: LocalStore,
    out: Output,
    first: Sequence[ListedModel],
    metric: str,
    *,
    has_shared: bool,
    is_all: bool,
) -> tuple[output.GrowingLines, Callable[[ListedModel], object]]:
    """Return what prints the models, and the form in which it takes each."""
    if out.is_json:
        return output.GrowingJson("models"), lambda it: _as_json(it, has_shared=has_shared)
    if output.is_quiet():
        return output.GrowingLines(), lambda it: render.cell(it.reference)
    columns = _columns(store, first, metric, has_shared=has_shared, is_all=is_all)
    sizes = [number for number, name in enumerate(columns) if name in _SIZES]
    rows = output.GrowingTable(*columns, right=sizes, alarming=[_UNREADABLE])
    return rows, lambda it: tuple(cell(it) for cell in columns.values())


def _by_metric(
    models: Sequence[ListedModel], metric: str, *, is_reverse: bool
) -> Iterator[ListedModel]:
    """Return models in the order of a metric; those without it come last. Raises UsageError."""
    found = [model for model in models if metric in model.metrics]
    if not found:
        known = sorted({name for model in models for name in model.metrics})
        raise click.UsageError(
            f"no model here has a metric {quote(metric)}; there {_listed(known)}, and the orders "
            f"{', '.join(_ORDERS)}"
        )
    found.sort(key=lambda model: model.metrics[metric], reverse=is_reverse)
    return chain(found, (model for model in models if metric not in model.metrics))


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


def _as_json(listed: ListedModel, *, has_shared: bool) -> dict[str, Any]:
    model = output.record(listed, _FIELDS)
    model["signatures"] = output.records(listed.signatures, SIGNATURE_FIELDS)
    if model["error"]:
        model.update(dict.fromkeys(("bytes", "shared_bytes", "frozen_bytes")))
    elif not has_shared:
        model["shared_bytes"] = None
    if model["source"]:
        model["source"] = output.record(model["source"], "kind repository commit options")
    return model


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


def _columns(
    store: LocalStore,
    first: Sequence[ListedModel],
    metric: str,
    *,
    has_shared: bool,
    is_all: bool,
) -> dict[str, Callable[[ListedModel], str]]:
    """Return the headings of the table, and what is in their columns.

    If the first models are not all, later ones may need each column.
    """
    from blobstore.operations.sign.report import describe_signers

    def size(key: str) -> Callable[[ListedModel], str]:
        return lambda it: "-" if it.error else render.human_bytes(getattr(it, key))

    def needs(key: str) -> bool:
        return not is_all or any(getattr(model, key) for model in first)

    columns: dict[str, Callable[[ListedModel], str]] = {
        "NAME": lambda it: render.cell(it.reference),
        "ID": lambda it: it.digest.short if it.digest else _UNREADABLE,
        "SIZE": size("size"),
    }
    if has_shared:
        columns["SHARED"] = size("shared")
    if needs("frozen") and (store.frozen() or store.shared is not None):
        columns["FROZEN"] = size("frozen")
    columns["MODIFIED"] = lambda it: render.human_age(it.modified)
    if metric:
        columns[render.cell(metric.upper())] = lambda it: (
            render.metric(it.metrics[metric]) if metric in it.metrics else "-"
        )
    if store.shared is not None and needs("store"):
        columns["STORE"] = lambda it: "shared" if it.store else "own"
    if needs("published_scheme"):
        columns["QUANTIZATION"] = lambda it: render.published(it.published_scheme)
    if output.is_verbose():
        columns["SIGNED BY"] = lambda it: render.cell(describe_signers(it.signatures)) or "-"
    return columns
