"""``blobstore page``: writes a web page that shows the store and its models as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import quote

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore


@click.command("page", short_help="Write a web page with pictures of the store and its models.")
@click.argument("words", metavar="[NAME]... OUT.html", nargs=-1, type=arguments.MODEL_OR_PATH)
@options.shared("store")
@click.option(
    "--measure",
    is_flag=True,
    help="Read the weights too: histograms of values, and errors against the bases. Kept as a cache.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Serve the page on this machine instead, and follow the store. Needs 'tensor-blobstore[page]'.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8765,
    show_default=True,
    help="The port of --serve; 0 for any free one.",
)
@options.shared("jobs", "json")
def command(
    words: tuple[str, ...],
    store: LocalStore,
    measure: bool,
    serve: bool,
    port: int,
    jobs: int | None,
    out: Output,
) -> None:
    """Write a page that shows the store, and the tensors of the models NAME, to OUT.html.

    Without NAME, the page has the tensors of all models that fit in it. It is one file that needs
    no network. An existing file is replaced.

    With --serve, all words are names of models. The page follows the store until Ctrl-C, and
    measures models on request.
    """
    if serve:
        if measure or out.is_json:
            raise click.UsageError("--serve measures on request, and prints no JSON")
        _serve(store, words, port)
        return
    if not words:
        raise click.UsageError("missing argument 'OUT.html'")
    *names, file = words
    from blobstore.pages.write import write_page

    if not file.endswith((".html", ".htm")) and arguments.is_name(file, store):
        raise click.UsageError(f"the last word is the file to write, and {quote(file)} is a model")
    notes = arguments.store_notes(store)
    chosen = arguments.models(store, names)
    with progress_bar() as progress:
        page = write_page(file, chosen, store=store, measure=measure, jobs=jobs, progress=progress)
    models = render.count_of(page.models, "model")
    out.result(
        output.record(page, "path bytes=size models") | {"seconds": out.seconds},
        f"wrote {page.path}: {models}, {render.human_bytes(page.size)}",
        notes=notes,
    )


def _serve(store: LocalStore, names: Sequence[str], port: int) -> None:
    from blobstore.pages.live_page import serve_page

    serve_page(
        store,
        arguments.models(store, names),
        port=port,
        on_ready=lambda address: output.show(f"serving {address}; stop with Ctrl-C"),
    )
