"""``blobstore cat``: prints a file of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from blobstore.store.local import LocalStore


@click.command("cat", short_help="Print a file of a model.")
@click.argument("name", type=options.MODEL)
@click.argument("file", type=options.MODEL_FILE)
@options.store_option
@options.json_option
def command(name: str, file: str, store: LocalStore, as_json: bool) -> None:
    """Print the FILE of the model NAME, such as config.json, byte for byte.

    The bytes are hashed while they are printed; a damaged file ends with an error. On a terminal,
    characters that are not printable are escaped. "blobstore show NAME --files" lists the files.
    """
    from blobstore.operations.describe.cat import open_file

    with options.model(store, name) as model:
        found = open_file(model, file, store=store)
    if as_json:
        data = found.read()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
        shown = render.record(found, "name=reference file=layer.name bytes=layer.size")
        render.show_json(shown | {"digest": str(found.layer.digest), "text": text})
    else:
        render.show_pieces(found.pieces())
