"""``blobstore find``: prints which models have a blob, a tensor or a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.core.escape import quote
from blobstore.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.operations.describe.find import FoundPlace
    from blobstore.store.local import LocalStore


@click.command("find", short_help="Find models by name, blob, tensor or file.")
@click.argument("what", metavar="DIGEST|NAME", type=arguments.TENSOR_OR_FILE)
@options.shared("store", "json")
def command(what: str, store: LocalStore, out: Output) -> None:
    """Find the models that have a blob whose digest begins with DIGEST, or a tensor or file NAME.

    DIGEST is four or more hexadecimal digits; it may be that of a manifest too. Models that have NAME in
    their own name are found too. NAME may be a glob such as '*.embed_tokens.*'. Only manifests and
    headers are read.
    """
    from blobstore.operations.describe.find import find_content
    from blobstore.store.name_patterns import is_pattern

    rows: output.GrowingLines = output.GrowingJson("places")
    if not out.is_json:
        rows = output.GrowingTable("MODEL", "KIND", "NAME", "SIZE", "DIGEST", right=(3,))

    def add(places: Sequence[FoundPlace]) -> None:
        if out.is_json:
            rows.add(output.records(places, "model=reference kind name bytes=size digest"))
            return
        rows.add(
            (
                render.cell(place.reference),
                place.kind,
                render.cell(place.name) or "-",
                render.human_bytes(place.size),
                place.digest.short,
            )
            for place in places
        )

    found = find_content(what, store=store, on_found=add)
    if not (found.places or found.errors):
        advice = "" if is_pattern(what) else arguments.glob_advice(what, has_near=found.has_near)
        raise NotFound(
            f"no model in the store {quote(store.root)} is called {quote(what)}, or has such a blob, "
            "tensor or file",
            advice=advice,
        )
    rows.end({"errors": found.errors})
    output.exit_with(found.errors)
