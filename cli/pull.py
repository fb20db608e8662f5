"""``blobstore pull``: fetch a model from a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import resumable_progress

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.transfer.pull import Pulled
    from blobstore.store.local import LocalStore


@click.command("pull", short_help="Fetch a model from a registry.")
@click.argument("remote", metavar="REMOTE")
@click.argument("name", metavar="[NAME]", required=False, type=arguments.NEW_NAME)
@click.option(
    "--dry-run", "--plan", is_flag=True, help="Fetch no blobs; report what would be fetched."
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace another model that has the name, even if it was not pulled from REMOTE.",
)
@click.option(
    "--no-cold", is_flag=True, help="Fetch the blobs as they are, not their compressed forms."
)
@options.shared("streams", "limit-rate", "plain-http", "store", "jobs", "wait", "json")
def command(
    remote: str,
    name: Reference | None,
    store: LocalStore,
    dry_run: bool,
    force: bool,
    no_cold: bool,
    jobs: int | None,
    streams: int,
    limit_rate: int | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Fetch the model at REMOTE from a registry or object storage, and name it NAME.

    REMOTE is [oci://]host[:port]/repository[:tag|@sha256:...], or the address of a model in object
    storage such as s3://bucket/prefix/model:tag. Without NAME, the model gets the name that REMOTE
    spells. Blobs that the store already has are not fetched, and compressed forms are
    fetched if they are there and the store has the bases of deltas. The name appears last, when
    all digests were found right and all blobs are safe on disk. If pull is interrupted, the same
    command continues where it stopped.
    """
    from blobstore.operations.transfer.pull import pull_model

    with resumable_progress() as progress:
        pulled = pull_model(
            remote,
            name,
            store=store,
            jobs=jobs,
            force=force,
            cold=not no_cold,
            dry_run=dry_run,
            streams=streams,
            limit_rate=limit_rate,
            plain_http=plain_http,
            progress=progress,
        )
    output.show_note(*pulled.notices)
    fields = (
        "remote name=reference digest remote_shape=layout blobs blobs_fetched bytes_fetched "
        "bytes_resumed bytes_saved bytes_present signatures replaced seconds"
    )
    out.result(
        {"dry_run": dry_run} | output.record(pulled, fields),
        _as_text(pulled, dry_run=dry_run),
        notes=[
            f"blob {digest} was damaged; it was replaced and is now at {path}"
            for digest, path in pulled.repaired.items()
        ],
    )


def _as_text(pulled: Pulled, *, dry_run: bool) -> str:
    verb = "would fetch" if dry_run else "pulled"
    name = render.cell(pulled.reference)
    remote = render.cell(pulled.remote)
    source = f" from {remote}" if remote != name else ""
    if not pulled.blobs_fetched and pulled.is_new:
        verb = "would name" if dry_run else "named"
        blobs = render.count_of(pulled.blobs, "blob")
        return f"{verb} {name}{source}: {blobs} present, nothing to fetch"
    if not pulled.blobs_fetched:
        return f"{name} is up to date: {render.count_of(pulled.blobs, 'blob')} present, nothing to fetch"
    parts = [
        f"{render.human_bytes(pulled.bytes_fetched)} in {render.count_of(pulled.blobs_fetched, 'blob')}"
    ]
    if pulled.bytes_saved:
        parts.append(f"{render.human_bytes(pulled.bytes_saved)} saved by compression")
    if pulled.bytes_resumed:
        parts.append(f"{render.human_bytes(pulled.bytes_resumed)} fetched before")
    if pulled.bytes_present:
        parts.append(f"{render.human_bytes(pulled.bytes_present)} already present")
    end = "" if dry_run else f"; {render.human_seconds(pulled.seconds)}"
    return f"{verb} {name}{source}: {', '.join(parts)}{end}"
