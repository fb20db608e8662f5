"""``blobstore sign``: sign a model with a private key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import options, render
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from blobstore.operations.sign.folder_digests import Layout
    from blobstore.store.local import LocalStore

_SHOWN = 16


@click.command("sign", short_help="Sign a model with a private key.")
@click.argument("name", type=options.MODEL)
@click.option(
    "--key",
    metavar="FILE",
    type=options.FILE,
    required=True,
    help="Private key in PEM, of the curve P-256, P-384 or P-521.",
)
@click.option(
    "--out", metavar="FILE", type=options.FILE, help="Write the OMS bundle to this new file, too."
)
@click.option(
    "--layout",
    type=click.Choice(["export", "link"]),
    default="export",
    show_default=True,
    help="The folder whose files the bundle lists.",
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@options.store_option
@options.jobs_option
@options.json_option
def command(
    name: str,
    key: str,
    out: str | None,
    layout: Layout,
    store: LocalStore,
    force: bool,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Sign the model NAME: its manifest, and the files of its folder.

    The signatures are stored with the manifest and apply to all names of the model. Weights are read
    only if the digest of a file is not recorded. The passphrase of an encrypted key is read from
    $BLOBSTORE_KEY_PASSPHRASE, or from the terminal.
    """
    from blobstore.operations.sign.sign import sign_model

    with options.model(store, name) as model, render.progress_bar() as progress:
        signed = sign_model(
            model,
            key,
            store=store,
            out=out,
            layout=layout,
            passphrase=options.read_passphrase,
            overwrite=force,
            jobs=jobs,
            progress=progress,
        )
    if as_json:
        fields = "name=reference digest key files hashed bytes_hashed file=out notices seconds"
        render.show_json(render.record(signed, fields))
        return
    place = f", written to {escape(str(signed.out))}" if signed.out else ""
    render.show(
        f"signed {render.cell(signed.reference)} ({signed.digest.short}) with key "
        f"{signed.key[:_SHOWN]}: {render.count_of(signed.files, 'file')}{place}; "
        f"{render.human_seconds(signed.seconds)}"
    )
    for notice in signed.notices:
        render.show_note(notice)
    if not signed.files:
        render.show_note(
            "the model has no folder of safetensors files; only its manifest is signed"
        )
    if signed.hashed:
        render.show_note(
            f"hashed {render.count_of(signed.hashed, 'weight file')} of "
            f"{render.human_bytes(signed.bytes_hashed)}, because the model does not record their "
            "digests"
        )
