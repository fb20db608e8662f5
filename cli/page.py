"""``blobstore page``: writes a web page that shows the store and its models as pictures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.store.local import LocalStore


@click.command("page", short_help="Write a web page with pictures of the store and its models.")
@click.argument("words", metavar="[NAME]... OUT.html", nargs=-1, type=options.MODEL_OR_PATH)
@options.store_option
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
@options.jobs_option
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    words: tuple[str, ...],
    store: LocalStore,
    measure: bool,
    serve: bool,
    port: int,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write a page that shows the store, and the tensors of the models NAME, to OUT.html.

    Without NAME, the page has the tensors of all models that fit in it. It is one file that needs
    no network. An existing file is replaced.

    With --serve, all words are names of models. The page follows the store until Ctrl-C, and
    measures models on request.
    """
    if serve:
        if measure or as_json:
            raise click.UsageError("--serve measures on request, and prints no JSON", ctx)
        _serve(store, words, port)
        return
    if not words:
        raise click.UsageError("missing argument 'OUT.html'", ctx)
    *names, file = words
    from blobstore.pages.write import write_page

    begin = time.monotonic()
    with options.models(store, names) as chosen, render.progress_bar() as progress:
        page = write_page(file, chosen, store=store, measure=measure, jobs=jobs, progress=progress)
    if as_json:
        shown = render.record(page, "path bytes=size models")
        render.show_json(shown | {"seconds": render.since(begin)})
        return
    models = render.count_of(page.models, "model")
    render.show(f"wrote {page.path}: {models}, {render.human_bytes(page.size)}")


def _serve(store: LocalStore, names: Sequence[str], port: int) -> None:
    from blobstore.pages.serve import serve_page

    with options.models(store, names) as chosen:
        serve_page(
            store,
            chosen,
            port=port,
            on_ready=lambda address: render.show(f"serving {address}; stop with Ctrl-C"),
        )
