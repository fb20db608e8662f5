"""``blobstore pull``: fetch a model from a registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import resumable_progress
from blobstore.cli.transferred import show_many

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.transfer.pull import Pulled
    from blobstore.store.local import LocalStore


@click.command("pull", short_help="Fetch a model from a registry.")
@click.argument("words", metavar="REMOTE... [NAME]", nargs=-1, required=True, type=arguments.REMOTE)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Fetch every model of the stores or repositories REMOTE.",
)
@options.shared("as")
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
    words: tuple[str, ...],
    is_all: bool,
    prefix: str | None,
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

    REMOTE is [oci://]host[:port]/repository[:tag|@sha256:...], http://host:port/name[:tag] of a
    'blobstore serve', or the address of a model in object storage such as
    s3://bucket/prefix/model:tag. Without NAME, the model gets the name that REMOTE
    spells. Blobs that the store already has are not fetched, and compressed forms are
    fetched if they are there and the store has the bases of deltas. The name appears last, when
    all digests were found right and all blobs are safe on disk. If pull is interrupted, the same
    command continues where it stopped.

    Several models are fetched with several REMOTEs that begin with a scheme such as oci://, with a
    glob such as 's3://bucket/prefix/team/*', 'host/repository:v*' or 'host/team/*', or with --all. They
    get the names that they have there, where '__' stands for each further slash of a repository.
    Failures are listed last.
    """
    from blobstore.operations.transfer.pull import pull_model

    choices: dict[str, Any] = {
        "prefix": prefix,
        "jobs": jobs,
        "force": force,
        "cold": not no_cold,
        "dry_run": dry_run,
        "streams": streams,
        "limit_rate": limit_rate,
        "plain_http": plain_http,
    }
    for word in words if is_all else words[:1]:
        arguments.check_remote(word, store, is_all=is_all)
    remote, name = _one_model(words)
    if name is not None and prefix is not None:
        raise click.UsageError("--as and NAME contradict each other")
    if is_all or remote is None:
        _pull_many(words, is_all=is_all, store=store, choices=choices, out=out)
        return
    with resumable_progress() as progress:
        pulled = pull_model(remote, name, store=store, progress=progress, **choices)
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


def _one_model(words: tuple[str, ...]) -> tuple[str | None, Reference | None]:
    """Return the address and the name if the words are those of one model; else None."""
    from blobstore.manifests.reference import Reference
    from blobstore.remotes.addresses import is_address
    from blobstore.store.name_patterns import is_pattern

    remote, *more = words
    if any(map(is_pattern, words)) or len(more) > 1 or any(map(is_address, more)):
        return None, None
    return remote, Reference.parse(more[0]) if more else None


def _pull_many(
    words: tuple[str, ...],
    *,
    is_all: bool,
    store: LocalStore,
    choices: dict[str, Any],
    out: Output,
) -> None:
    from blobstore.operations.transfer.many import find_remote_models, pull_models

    plain_http, dry_run = choices["plain_http"], choices["dry_run"]
    found = find_remote_models(words, all_models=is_all, plain_http=plain_http)
    with resumable_progress() as progress:
        models = pull_models(found, store=store, progress=progress, **choices)
    done = [model.result for model in models if model.result is not None]
    for pulled in done:
        output.show_note(*pulled.notices)
    fetched = sum(pulled.bytes_fetched for pulled in done)
    present = sum(pulled.bytes_present for pulled in done)
    show_many(
        models,
        "reference digest blobs_fetched bytes_fetched bytes_present replaced",
        (_as_text(pulled, dry_run=dry_run) for pulled in done),
        f"{'would pull' if dry_run else 'pulled'} {render.count_of(len(done), 'model')}: "
        f"{render.human_bytes(fetched)} {'to fetch' if dry_run else 'fetched'}, "
        f"{render.human_bytes(present)} already present",
        out,
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
