"""``blobstore cat``: prints a file of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.store.local import LocalStore


@click.command("cat", short_help="Print a file of a model.")
@click.argument("name", type=arguments.MODEL_OR_ADDRESS)
@click.argument("file", type=arguments.MODEL_FILE)
@options.shared("plain-http", "store", "json")
def command(name: str, file: str, store: LocalStore, plain_http: bool | None, out: Output) -> None:
    """Print the FILE of the model NAME, such as config.json, byte for byte.

    NAME may be the address of a model elsewhere, such as oci://host/repository or s3://bucket/name.

    The bytes are hashed while they are printed; a damaged file ends with an error. On a terminal,
    characters that are not printable are escaped. "blobstore show NAME --files" lists the files.
    """
    from blobstore.operations.describe.cat import open_file

    found = open_file(
        arguments.model_or_address(store, name), file, store=store, plain_http=plain_http
    )
    if not out.is_json:
        output.show_pieces(found.pieces())
        return
    data = found.read()
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    fields = "name=reference file=layer.name bytes=layer.size digest=layer.digest"
    output.show_json(output.record(found, fields) | {"text": text})
