"""``blobstore rm``: removes model names."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.operations.maintenance.names import RemovedModels
    from blobstore.store.local import LocalStore


_NAMED = 3
"""The most models that a line lists by name."""


@click.command("rm", short_help="Remove model names.")
@click.argument(
    "names", metavar="NAME...", nargs=-1, required=True, type=arguments.MODEL_OR_ADDRESS
)
@click.option(
    "--keep-last",
    type=click.IntRange(min=0),
    metavar="N",
    help="Of the models NAME, keep the newest N tags of each name.",
)
@options.older_than_option(
    "Keep the models NAME that were written less than TIME ago, such as 30d."
)
@click.option("--dry-run", is_flag=True, help="Remove nothing; report what would be removed.")
@options.shared("plain-http", "store", "wait", "json")
def command(
    names: tuple[str, ...],
    store: LocalStore,
    keep_last: int | None,
    older_than: float | None,
    dry_run: bool,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Remove the names NAME, all or none, and report the space that "blobstore gc" can then free.

    No blob is removed. A name is removed even if its manifest cannot be read. NAMEs may be addresses
    in registries or object storage instead, with globs as for "blobstore pull";
    oci://host/repository@sha256:... removes a manifest with all of its tags.

    With --keep-last or --older-than, only some of the models NAME are removed: "rm 'run:*' --keep-last
    3". With both, those that neither keeps. An alias, such as run:best next to run:500 with the same
    manifest, does not count, and neither it nor its model is removed. The two names of a training step,
    such as run:500 and run:500.state, count as one.
    """
    from blobstore.remotes.addresses import is_address

    if any(map(is_address, names)):
        if not all(map(is_address, names)):
            raise click.UsageError("names in the store and addresses cannot be mixed")
        if keep_last is not None or older_than is not None:
            raise click.UsageError("--keep-last and --older-than are for models of the store")
        _remove_remote(names, out, dry_run=dry_run, plain_http=plain_http)
        return
    from blobstore.operations.maintenance.names import remove_models

    chosen = arguments.models(store, names, needs_name=True)
    removed = remove_models(
        chosen, keep_last=keep_last, older_than=older_than, store=store, dry_run=dry_run
    )
    if removed.kept:
        out.line(f"keeps {render.count_of(removed.kept, 'model')}")
    if keep_last is not None and len({name.parts[:-1] for name in chosen}) == len(chosen) > 1:
        output.show_note(
            f"--keep-last counts the tags of each name, and each of these {len(chosen)} names has one; "
            f"'blobstore mv' makes models tags of one name, such as run:{chosen[0].model}"
        )
    arguments.note_states(store, [entry.reference for entry in removed.names])
    data = {
        "dry_run": dry_run,
        "removed": output.records(removed.names, "name=reference digest error"),
        "unreferenced": output.record(removed, "blobs bytes=size"),
        "kept_as_bases": output.record(removed, "blobs=bases bytes=bases_size by=coded"),
        "unreadable": [entry.reference for entry in removed.unreadable],
        "notices": removed.notices,
    }
    out.result(data, _as_text(removed, dry_run=dry_run), notes=removed.notices)
    for entry in removed.names:
        if entry.error is not None:
            output.show_note(f"the blobs of {entry.reference} are unknown: {entry.error}")
    for entry in removed.unreadable:
        output.show_note(
            f'"blobstore gc" removes nothing until {entry.reference} is repaired or removed: '
            f"{entry.error}"
        )


def _remove_remote(
    names: tuple[str, ...], out: Output, *, dry_run: bool, plain_http: bool | None
) -> None:
    from blobstore.operations.maintenance.remote_names import remove_remote
    from blobstore.operations.transfer.many import find_remote_models
    from blobstore.remotes.addresses import is_in_objects
    from blobstore.store.name_patterns import is_pattern

    if patterns := [name for name in names if is_pattern(name)]:
        found = find_remote_models(patterns, plain_http=plain_http)
        plain = [name for name in names if not is_pattern(name)]
        names = tuple(dict.fromkeys([*plain, *(entry.address for entry in found)]))
    removed = remove_remote(names, dry_run=dry_run, plain_http=plain_http)
    verb = "would remove" if dry_run else "removed"
    notes = []
    if any(map(is_in_objects, names)):
        notes.append("'blobstore gc --remote ADDRESS' frees what no other model needs")
    if not all(map(is_in_objects, names)):
        notes.append("a registry frees space by its own collection of garbage")
    out.result(
        {"dry_run": dry_run, "removed": [str(address) for address in removed]},
        [f"{verb} {render.cell(address)}" for address in removed],
        notes=notes,
    )


def _as_text(removed: RemovedModels, *, dry_run: bool) -> str:
    verb = "would remove" if dry_run else "removed"
    lines = [f"{verb} {render.cell(entry.reference)}" for entry in removed.names]
    if not lines:
        return "nothing to remove"
    if removed.blobs:
        blobs = render.count_of(removed.blobs, "blob")
        command = f"blobstore gc{' --force' * removed.is_last}"
        wait = removed.removable - time.time()
        when = f" in {render.human_wait(wait)}" if wait > 0 else ""
        lines.append(
            f'"{command}" {"would then free" if dry_run else "frees"} '
            f"{render.human_bytes(removed.size)}{when}: {blobs} that no other model needs"
            f"{'; with --older-than 0s at once' * bool(when)}"
        )
    elif not any(entry.error for entry in removed.names):
        lines.append(f'"blobstore gc" {"would have" if dry_run else "has"} nothing to free')
    if removed.bases:
        blobs = render.count_of(removed.bases, "blob")
        names = ", ".join(str(render.cell(name)) for name in removed.coded[:_NAMED])
        more = len(removed.coded) - _NAMED
        lines.append(
            f"{render.human_bytes(removed.bases_size)} in {blobs} "
            f"{'would still be' if dry_run else 'is still'} needed as bases of frozen blobs of "
            f"{names or 'no model, which gc removes first'}"
            f"{f' and {more} more' if more > 0 else ''}; "
            '"blobstore rm" or "blobstore thaw" of these models frees it'
        )
    return "\n".join(lines)
