"""``blobstore lock``: writes which models the store has, and where they came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.core.escape import join_some, quote

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore

_MAX_LISTED = 5


@click.command("lock", short_help="Write a lock file of models, for sync on other machines.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL)
@click.option(
    "-o",
    "--out",
    "file",
    metavar="FILE",
    type=arguments.FILE_TO_WRITE,
    default="models.lock",
    show_default=True,
    help="The lock file, which is replaced.",
)
@click.option(
    "--remote",
    metavar="REMOTE",
    help="A store or the start of repositories that has the models that came from a folder.",
)
@options.shared("store", "json")
def command(
    names: tuple[str, ...], file: str, remote: str | None, store: LocalStore, out: Output
) -> None:
    """Write the models NAME, or all models, with their digests and where they came from, to a lock file.

    "blobstore sync" makes another store have exactly these. A model comes from where it was pulled, or
    from its repository and commit on the Hub. Other models are looked for at REMOTE, as push puts them
    there.
    """
    from blobstore.operations.transfer.sync import lock_models

    chosen = arguments.models(store, names, needs_store=True)
    arguments.note_states(store, chosen)
    models = lock_models(chosen, file, remote=remote, store=store)
    alone = [quote(model.reference) for model in models if not model.has_origin]
    fields = "name=reference manifest remote repository commit"
    records = output.records(models, fields)
    for record, model in zip(records, models, strict=True):
        record["manifest"] = str(model.manifest)
    notes = []
    if alone:
        notes.append(
            f"nothing says where {join_some(alone, _MAX_LISTED)} can be fetched; push "
            f"{'it' if len(alone) == 1 else 'them'}, and give --remote"
        )
    signed = [
        quote(model.reference)
        for model in models
        if model.repository and any(store.signatures(model.manifest))
    ]
    if signed:
        notes.append(
            f"sync fetches {join_some(signed, _MAX_LISTED)} from the Hub, without the signatures here; "
            "push what is signed, and pull it before it is locked"
        )
    out.result(
        {"path": file, "models": records},
        f"wrote {render.cell(file)}: {render.count_of(len(models), 'model')}",
        notes=notes,
    )
