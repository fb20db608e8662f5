"""``blobstore page``: writes a web page that shows the store and its models as pictures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


@click.command("page", short_help="Write a web page with pictures of the store and its models.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=options.MODEL)
@click.argument("file", metavar="OUT.html", type=options.FILE)
@options.store_option
@click.option(
    "--measure",
    is_flag=True,
    help="Read the weights too: histograms of values, and errors against the bases. Kept as a cache.",
)
@options.jobs_option
@options.json_option
def command(
    names: tuple[str, ...],
    file: str,
    store: LocalStore,
    measure: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write a page that shows the store, and the tensors of the models NAME, to OUT.html.

    Without NAME, the page has the tensors of all models that fit in it. It is one file that needs
    no network. An existing file is replaced.
    """
    from blobstore.operations.page.write import write_page

    begin = time.monotonic()
    with options.models(store, names) as chosen, render.progress_bar() as progress:
        page = write_page(file, chosen, store=store, measure=measure, jobs=jobs, progress=progress)
    if as_json:
        shown = render.record(page, "path bytes=size models")
        render.show_json(shown | {"seconds": render.since(begin)})
        return
    models = render.count_of(page.models, "model")
    render.show(f"wrote {page.path}: {models}, {render.human_bytes(page.size)}")
