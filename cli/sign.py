"""``blobstore sign``: sign a model with a private key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.cli.prompt import read_passphrase
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cli.output import Output
    from blobstore.folders.digests import Layout
    from blobstore.operations.sign.sign import Signed
    from blobstore.store.local import LocalStore

_SHOWN = 16


@click.command("sign", short_help="Sign a model with a private key.")
@click.argument("name", type=arguments.MODEL)
@click.option(
    "--key",
    metavar="FILE",
    type=arguments.FILE,
    required=True,
    help="Private key in PEM, of the curve P-256, P-384 or P-521.",
)
@click.option(
    "--out",
    "file",
    metavar="FILE",
    type=arguments.FILE_TO_WRITE,
    help="Write the OMS bundle to this new file, too.",
)
@click.option(
    "--layout",
    type=click.Choice(["export", "link"]),
    default="export",
    show_default=True,
    help="The folder whose files the bundle lists.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@options.shared("store", "jobs", "json")
def command(
    name: str,
    key: str,
    file: str | None,
    layout: Layout,
    store: LocalStore,
    force: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Sign the model NAME: its manifest, and the files of its folder.

    The signatures are stored with the manifest and apply to all names of the model. Weights are read
    only if the digest of a file is not recorded. The passphrase of an encrypted key is read from
    $BLOBSTORE_KEY_PASSPHRASE, or from the terminal.
    """
    from blobstore.operations.sign.sign import sign_model

    model = arguments.model(store, name)
    with progress_bar() as progress:
        signed = sign_model(
            model,
            key,
            store=store,
            out=file,
            layout=layout,
            passphrase=read_passphrase,
            force=force,
            jobs=jobs,
            progress=progress,
        )
    place = f", written to {escape(str(signed.out))}" if signed.out else ""
    out.result(
        output.record(
            signed, "name=reference digest key files hashed bytes_hashed file=out notices seconds"
        ),
        f"signed {render.cell(signed.reference)} ({signed.digest.short}) with key "
        f"{signed.key[:_SHOWN]}: {render.count_of(signed.files, 'file')}{place}; "
        f"{render.human_seconds(signed.seconds)}",
        notes=_notes(signed),
    )


def _notes(signed: Signed) -> Iterator[str]:
    yield from signed.notices
    if not signed.files:
        yield "the model has no folder of safetensors files; only its manifest is signed"
    if signed.hashed:
        yield (
            f"hashed {render.count_of(signed.hashed, 'weight file')} of "
            f"{render.human_bytes(signed.bytes_hashed)}, because the model does not record their "
            "digests"
        )
