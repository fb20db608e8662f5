"""``blobstore create``: import a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import click

from blobstore.cli import render
from blobstore.cli.options import jobs_option, json_option, parse_name, store_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.creation import Created
    from blobstore.manifests.reference import Reference
    from blobstore.plan import BlobPlan
    from blobstore.store.local import LocalStore

ExpertForm = Literal["packed", "stacked"]


@click.command("create", short_help="Import a model: a folder, a file or a Hub repository.")
@click.argument("source")
@click.argument("name", callback=parse_name)
@store_option
@click.option(
    "--experts",
    type=click.Choice(["packed", "stacked"]),
    default="packed",
    show_default=True,
    help="Keep a layer's experts as they are in one blob, or join them to one tensor a projection.",
)
@click.option(
    "--weights",
    metavar="PATTERN",
    help="File names of the weights, where a folder holds several sets.",
)
@click.option(
    "--ignore-unindexed", is_flag=True, help="Leave out tensors that the index does not name."
)
@jobs_option
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing to the store.")
@json_option
def command(
    source: str,
    name: Reference,
    store: LocalStore,
    experts: ExpertForm,
    weights: str | None,
    ignore_unindexed: bool,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import SOURCE into the store under NAME.

    SOURCE is a Hugging Face model folder, a .safetensors file, or the id of a Hub repository
    (org/name, or hf://org/name@revision). NAME is [host/][namespace/]model[:tag]. Blobs that the
    store has already are not written again; the name appears last, when all of it is safe on disk.
    """
    if dry_run:
        _show_plan(source, name, store, experts, weights, ignore_unindexed, as_json)
        return
    from blobstore.creation import create

    with render.progress_bar() as progress:
        created = create(
            source,
            name,
            store=store,
            experts=experts,
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            jobs=jobs,
            progress=progress,
        )
    _show_created(created, as_json)


def _show_created(created: Created, as_json: bool) -> None:
    _show_notes(created.notices)
    if as_json:
        render.show_json(
            {
                "name": str(created.reference),
                "tensors": created.tensors,
                "blobs": created.blobs,
                "bytes_written": created.bytes_written,
                "bytes_present": created.bytes_present,
                "seconds": round(created.seconds, 3),
                "notices": list(created.notices),
            }
        )
        return
    render.show(
        f"created {created.reference}: {render.count_of(created.tensors, 'tensor')} in "
        f"{render.count_of(created.blobs, 'blob')}, "
        f"{render.human_bytes(created.bytes_written)} written, "
        f"{render.human_bytes(created.bytes_present)} already there, "
        f"{render.human_seconds(created.seconds)}"
    )


def _show_plan(
    source: str,
    name: Reference,
    store: LocalStore,
    experts: ExpertForm,
    weights: str | None,
    ignore_unindexed: bool,
    as_json: bool,
) -> None:
    from blobstore.creation import plan_source
    from blobstore.layerfile import blob_size
    from blobstore.sources.open import open_source

    store.check_name(name)
    with render.progress_bar() as progress:
        opened = open_source(
            source, weights=weights, ignore_unindexed=ignore_unindexed, progress=progress
        )
    try:
        planned = [(blob, blob_size(blob)) for blob in plan_source(opened, experts=experts)]
        files = [file.name for file in opened.files]
        notices = list(opened.notices)
    finally:
        opened.close()
    _show_notes(notices)
    if as_json:
        render.show_json(
            {
                "name": str(name),
                "tensors": sum(len(blob.tensors) for blob, _ in planned),
                "bytes": sum(size for _, size in planned),
                "blobs": [
                    {
                        "name": blob.name,
                        "tensors": [tensor.spec.name for tensor in blob.tensors],
                        "bytes": size,
                    }
                    for blob, size in planned
                ],
                "files": files,
                "notices": notices,
            }
        )
        return
    render.show(_plan_text(planned, len(files)))


def _plan_text(planned: Sequence[tuple[BlobPlan, int]], files: int) -> str:
    rows = [
        (render.cell(blob.name), f"{len(blob.tensors):,}", render.human_bytes(size))
        for blob, size in planned
    ]
    tensors = sum(len(blob.tensors) for blob, _ in planned)
    return (
        render.table(("BLOB", "TENSORS", "SIZE"), rows, right=(1, 2))
        + f"\n{render.count_of(tensors, 'tensor')} in {render.count_of(len(planned), 'blob')}, "
        f"{render.human_bytes(sum(size for _, size in planned))}; {render.count_of(files, 'file')}"
        "; nothing was written"
    )


def _show_notes(notices: Sequence[str]) -> None:
    for notice in notices:
        render.show_note(notice)
