"""``blobstore push``: push a model to a registry or to object storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar, resumable_progress
from blobstore.cli.prompt import read_passphrase
from blobstore.cli.transferred import show_many
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.compression.level import Level
    from blobstore.manifests.reference import Reference
    from blobstore.operations.follow.push_version import Receiver
    from blobstore.operations.transfer.push import Pushed
    from blobstore.registry.layouts.plan import RemoteLayout
    from blobstore.store.local import LocalStore

_DEFAULTS = (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
_NOT_WITH_AS = (
    *("layout", "max_layers", "mount_from", "no_mount", "part_size", "sign_key", "plain_http"),
    *("cold", "level", "verify", "dry_run", "streams", "limit_rate"),
)
"""Options that say nothing about a trainer's folder."""
_LAYOUTS = click.Choice(["oci", "ollama", "image"])


@click.command("push", short_help="Push a model to a registry or to object storage.")
@click.argument(
    "words",
    metavar="NAME... [REMOTE]",
    nargs=-1,
    required=True,
    type=arguments.NAMES_AND_REMOTE,
)
@click.option(
    "--all", "is_all", is_flag=True, help="Push every model of the store; give only REMOTE."
)
@click.option(
    "--layout",
    type=_LAYOUTS,
    default="oci",
    show_default=True,
    help="A ModelPack artifact, Ollama's manifest, or a container image that runtimes mount.",
)
@click.option(
    "--max-layers",
    type=click.IntRange(min=1),
    metavar="N",
    default=400,
    show_default=True,
    help="Divide models of the layout oci into parts of at most N layers.",
)
@click.option(
    "--mount-from",
    metavar="REPOSITORY",
    multiple=True,
    help="A repository of the registry that may have blobs of the model. May be repeated.",
)
@click.option("--no-mount", is_flag=True, help="Mount no blobs of other repositories.")
@click.option(
    "--part-size",
    metavar="SIZE",
    callback=options.parse_size,
    help="Send at most SIZE of a blob in one request; by default 64MiB.",
)
@click.option(
    "--sign-key",
    metavar="FILE",
    type=arguments.FILE,
    help="Private key in PEM, to sign what the registry gets.",
)
@click.option("--cold", is_flag=True, help="Add the compressed form, deltas included.")
@options.level_option("How --cold compresses blobs that are not frozen.")
@options.base_option(
    "Base model of the deltas of --cold; by default one is searched for. With --as, what receivers have."
)
@click.option(
    "--as",
    "receiver",
    type=click.Choice(["slime", "sglang", "modelexpress"]),
    help="Write the next version of a trainer's folder, which these receivers read: REMOTE is the folder.",
)
@click.option("--verify", is_flag=True, help="Read everything back and compare digests.")
@click.option("--dry-run", is_flag=True, help="Send nothing; report what would be sent.")
@options.shared("streams", "limit-rate", "plain-http", "store", "wait", "json")
def command(
    words: tuple[str, ...],
    is_all: bool,
    store: LocalStore,
    layout: RemoteLayout,
    max_layers: int,
    mount_from: tuple[str, ...],
    no_mount: bool,
    part_size: int | None,
    sign_key: str | None,
    cold: bool,
    level: Level,
    base: str | None,
    receiver: Receiver | None,
    verify: bool,
    dry_run: bool,
    streams: int,
    limit_rate: int | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Push the models NAME to a registry or to object storage, at REMOTE.

    REMOTE is [oci://]host[:port]/repository[:tag], or a store in object storage such as
    s3://bucket/prefix, or a name in one, s3://bucket/prefix/name:tag. Without it, NAME must begin with the host of a registry. Blobs that are there
    are not sent again. The name appears last, when all of the model is there. A damaged blob is never
    published. If push is interrupted, the same command continues where it stopped. The options from
    --layout to --sign-key, and --plain-http, are for registries.

    NAMEs may be globs such as 'team/*'; --all stands for '*'. Several models go to a store, or to repositories that begin
    with REMOTE and end with their names. One that fails does not keep others from being pushed; the
    failures are listed last.

    With --as, one NAME becomes the next version in the folder REMOTE: what changes against the version
    before, or the whole model if there is none and no --base that the receivers have already. Of the
    other options, only --store and --json apply then.
    """
    from blobstore.objects.address import has_tag
    from blobstore.operations.transfer.push import push_model
    from blobstore.operations.transfer.registry_target import RegistryOptions
    from blobstore.store.name_patterns import is_pattern

    *names, last = words
    if is_all and names:
        raise click.UsageError("--all takes no NAME, only REMOTE")
    remote = last if names or is_all else None
    names = ["*"] if is_all else names or [last]
    chosen = arguments.models(store, names, needs_name=remote is None)
    registry = RegistryOptions(
        layout=layout,
        max_layers=max_layers,
        mount_from=mount_from,
        mount=not no_mount,
        part_size=part_size,
        sign_key=sign_key,
        plain_http=plain_http,
        passphrase=read_passphrase,
    )
    choices: dict[str, Any] = {
        "registry": registry,
        "cold": cold,
        "level": level,
        "base": base,
        "verify": verify,
        "dry_run": dry_run,
        "streams": streams,
        "limit_rate": limit_rate,
    }
    if receiver is not None:
        given = click.get_current_context().get_parameter_source
        unused = [name for name in _NOT_WITH_AS if given(name) not in _DEFAULTS]
        if len(chosen) != 1 or remote is None or unused:
            raise UsageError("--as takes one NAME and one folder, and --base, --store and --json")
        _push_version(chosen[0], remote, receiver, base, store, out)
        return
    arguments.note_states(store, chosen)
    is_place = remote is not None and not has_tag(remote)
    if len(chosen) > 1 or (is_place and any(map(is_pattern, names))):
        _push_many(chosen, remote, store, choices, out)
        return
    with resumable_progress() as progress:
        pushed = push_model(chosen[0], remote, store=store, progress=progress, **choices)
    fields = (
        "name=reference remote digest remote_shape=layout unchanged=is_unchanged replaced "
        "dry_run=is_dry_run blobs manifests bytes_sent bytes_resumed bytes_mounted bytes_present "
        "bytes_verified signatures cold_blobs bytes_cold fallbacks seconds"
    )
    replaced = f"the name had another model, whose manifest is blob {pushed.replaced}"
    out.result(
        output.record(pushed, fields),
        [_as_text(pushed), *([render.without_base(pushed.fallbacks)] if pushed.fallbacks else [])],
        notes=[*pushed.notices, *([] if pushed.replaced is None else [replaced])],
    )


def _push_version(
    name: Reference,
    folder: str,
    receiver: Receiver,
    base: str | None,
    store: LocalStore,
    out: Output,
) -> None:
    from blobstore.core.arguments import local_path
    from blobstore.operations.follow.push_version import push_version

    with progress_bar() as progress:
        pushed = push_version(
            name,
            local_path(folder),
            receiver=receiver,
            base=base,
            store=store,
            progress=progress,
        )
    fields = (
        "name=reference folder version full=is_full digest unchanged=is_unchanged tensors "
        "bytes_written seconds"
    )
    where, seconds = render.cell(pushed.folder), render.human_seconds(pushed.seconds)
    what = (
        "the whole model"
        if pushed.is_full
        else f"{render.count_of(pushed.tensors, 'tensor')} changed"
    )
    text = (
        f"nothing to do: {where} is {render.cell(pushed.reference)} already; {seconds}"
        if pushed.is_unchanged
        else f"pushed {render.cell(pushed.reference)} to {where}: {what}, "
        f"{render.human_bytes(pushed.bytes_written)}; {seconds}"
    )
    out.result(output.record(pushed, fields), text)


def _push_many(
    names: Sequence[Reference],
    remote: str | None,
    store: LocalStore,
    choices: dict[str, Any],
    out: Output,
) -> None:
    from blobstore.operations.transfer.many import push_models

    with resumable_progress() as progress:
        models = push_models(names, remote, store=store, progress=progress, **choices)
    done = [model.result for model in models if model.result is not None]
    for pushed in done:
        output.show_note(*pushed.notices)
    fields = "remote digest unchanged=is_unchanged bytes_sent bytes_mounted bytes_present"
    sent = sum(pushed.bytes_sent for pushed in done)
    there = sum(pushed.bytes_present + pushed.bytes_mounted for pushed in done)
    dry_run = choices["dry_run"]
    show_many(
        models,
        fields,
        map(_as_text, done),
        f"{'would push' if dry_run else 'pushed'} {render.count_of(len(done), 'model')}: "
        f"{render.human_bytes(sent)} {'to send' if dry_run else 'sent'}, "
        f"{render.human_bytes(there)} already there",
        out,
    )


def _as_text(pushed: Pushed) -> str:
    remote, seconds = render.cell(pushed.remote), render.human_seconds(pushed.seconds)
    verified = (
        f", {render.human_bytes(pushed.bytes_verified)} read back" if pushed.bytes_verified else ""
    )
    verified += _cold_text(pushed)
    if pushed.is_unchanged:
        return f"nothing to do: {remote} is {render.cell(pushed.reference)} already{verified}; {seconds}"
    verb, sent = ("would push", "to send") if pushed.is_dry_run else ("pushed", "sent")
    parts = [f"{render.human_bytes(pushed.bytes_sent)} {sent}"]
    if pushed.bytes_resumed:
        parts.append(f"{render.human_bytes(pushed.bytes_resumed)} sent before")
    if pushed.bytes_mounted:
        parts.append(f"{render.human_bytes(pushed.bytes_mounted)} mounted")
    if pushed.bytes_present:
        parts.append(f"{render.human_bytes(pushed.bytes_present)} already there")
    return (
        f"{verb} {render.cell(pushed.reference)} to {remote}: "
        f"{render.count_of(pushed.blobs, 'blob')}, {', '.join(parts)}{verified}; {seconds}"
    )


def _cold_text(pushed: Pushed) -> str:
    if not pushed.cold_blobs:
        return ""
    return (
        f", with compressed forms of {render.count_of(pushed.cold_blobs, 'blob')} "
        f"({render.human_bytes(pushed.bytes_cold)})"
    )
