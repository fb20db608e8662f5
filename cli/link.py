"""``blobstore link``: a model as a Hugging Face folder of links to its blobs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import render
from blobstore.cli.options import json_option, parse_name, store_option, suggesting_names
from blobstore.core.escape import escape

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.manifests.reference import Reference
    from blobstore.operations.export.link import Linked
    from blobstore.store.local import LocalStore


@click.command("link", short_help="Make a Hugging Face folder of links to a model's blobs.")
@click.argument("name", callback=parse_name)
@click.argument("folder", metavar="DIR")
@store_option
@click.option(
    "--hard",
    is_flag=True,
    help="Make hard links, which stay whole whatever the store removes, and not symbolic ones.",
)
@click.option(
    "--old-keys",
    is_flag=True,
    help="Let config.json say also under the keys of transformers 4 what it says under those of 5; "
    "mlx-lm reads them.",
)
@click.option("--thaw", is_flag=True, help="Thaw the model first, if it is frozen.")
@json_option
def command(
    name: Reference,
    folder: str,
    store: LocalStore,
    hard: bool,
    old_keys: bool,
    thaw: bool,
    as_json: bool,
) -> None:
    """Make the new folder DIR, from which servers load the model NAME as from an export.

    Its weight files are links to blobs. Only blobs whose tensors have other names in such a folder
    become files, such as those of quantized weights.
    """
    from blobstore.cli.thaw import thaw_whole
    from blobstore.operations.export.link import link_model

    with suggesting_names(store, [name]), render.progress_bar() as progress:
        if thaw:
            thaw_whole(name, store, progress)
        linked = link_model(
            name, folder, store=store, hard=hard, old_keys=old_keys, progress=progress
        )
    for notice in linked.notices:
        render.show_note(notice)
    if as_json:
        render.show_json(
            {
                "name": str(name),
                "folder": str(linked.folder),
                "files": linked.files,
                "tensors": linked.tensors,
                "links": linked.links,
                "bytes_linked": linked.bytes_linked,
                "shared": linked.shared,
                "bytes_shared": linked.bytes_shared,
                "copied": linked.copied,
                "bytes_copied": linked.bytes_copied,
                "notices": list(linked.notices),
                "seconds": round(linked.seconds, 3),
            }
        )
        return
    render.show(
        f"linked {name} in {escape(str(linked.folder))}: "
        f"{render.count_of(linked.tensors, 'tensor')} in {', '.join(_kinds(linked))}; "
        f"{render.human_seconds(linked.seconds)}"
    )


def _kinds(linked: Linked) -> Iterator[str]:
    """Yield what kinds of weight files there are."""
    if linked.links:
        yield f"{render.count_of(linked.links, 'link')} ({render.human_bytes(linked.bytes_linked)})"
    if linked.shared:
        size = render.human_bytes(linked.bytes_shared)
        yield f"{render.count_of(linked.shared, 'file')} sharing {size} with blobs"
    if linked.copied:
        size = render.human_bytes(linked.bytes_copied)
        yield f"{render.count_of(linked.copied, 'file')} copied ({size})"
