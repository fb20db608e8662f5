"""``blobstore verify``: prints the faults that the operation ``verify`` finds in models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import escape
from blobstore.errors import Damaged, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.operations.maintenance.verify import Fault, Verified
    from blobstore.operations.sign.report import SignedModel
    from blobstore.operations.transfer.verify_remote import RemoteFault, VerifiedRemote
    from blobstore.store.local import LocalStore

FAULT_FIELDS = "reference layer tensor message blob"
_ADVICE = "'blobstore repair NAME --from SOURCE' rewrites damaged and missing blobs"
_LOST = "'blobstore repair' restores lost manifests; 'blobstore rm NAME' forgets a name that is not wanted"


@click.command("verify", short_help="Hash all blobs of models and check them.")
@click.argument("names", metavar="[NAME]...", nargs=-1, type=arguments.MODEL_OR_REMOTE)
@click.option("--quick", is_flag=True, help="Check sizes and headers only; hash nothing.")
@click.option(
    "--sample",
    metavar="SHARE",
    help="Hash a part of the blobs: 5% at random, or the second of seven parts, 2/7.",
)
@click.option(
    "--remote",
    metavar="REMOTE",
    type=arguments.REMOTE,
    help="Read a model in a registry or object storage back instead.",
)
@click.option(
    "--max-rate",
    "--watch-rate",
    "rate",
    metavar="RATE",
    callback=options.parse_rate,
    help="Read at most RATE bytes per second, such as 50MB/s.",
)
@click.option("--signatures", is_flag=True, help="Report who signed the models, too.")
@click.option(
    "--key",
    "keys",
    metavar="FILE",
    type=arguments.FILE,
    multiple=True,
    help="A public key in PEM to check signatures with, besides those of the policy; may be repeated. "
    "Implies --signatures.",
)
@options.shared("plain-http", "store", "jobs", "json")
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[str, ...],
    store: LocalStore,
    quick: bool,
    sample: str | None,
    remote: str | None,
    rate: int | None,
    signatures: bool,
    keys: tuple[str, ...],
    jobs: int | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    """Hash and parse every blob of the models NAME, or of all models.

    Each fault is one line with model, layer and tensor; the exit code is then 4. A model that is
    removed during the run is not a fault. With --sample, the other blobs are checked as with --quick.
    Without NAME, it is a fault if manifests seem to be lost,
    judged by the blobs that are there. With --signatures, an invalid signature is a fault, and so
    is a model that the policy refuses; with --key, so is one that no known key has signed. A folder of manifests that cannot be read is reported, and the
    exit code is 1 unless there are faults.

    If the only NAME is an address, or with --remote, every byte of the model there is fetched and
    hashed, and nothing is written: a registry may send other bytes than those that were pushed. The
    address of a store in object storage, of a registry or of repositories stands for all models there.
    There, --sample fetches no other blobs.
    """
    signatures = signatures or bool(keys)
    names, remote = _remote_of(names, remote)
    if remote is not None:
        if names or quick or jobs or signatures:
            raise click.UsageError(
                "--remote cannot be combined with NAME, --quick, --jobs, --signatures or --key"
            )
        _verify_remote(ctx, remote, sample, rate, plain_http, out)
        return
    from blobstore.manifests.layers_digest import ADVICE
    from blobstore.operations.maintenance.verify import verify_models

    unreadable: list[StoreError] = []
    chosen = arguments.models(store, names, needs_store=True)
    with progress_bar() as progress:
        verified = verify_models(
            chosen,
            store=store,
            quick=quick,
            sample=sample,
            rate=rate,
            jobs=jobs,
            progress=progress,
            on_error=unreadable.append,
        )
    signed: Sequence[SignedModel] = ()
    if signatures:
        from blobstore.operations.sign.report import check_signatures

        signed = check_signatures(
            chosen, keys=keys, store=store, on_error=lambda _: None
        )  # verify_models has collected these errors
    data = output.record(verified, "models blobs hashed bytes_read seconds") | {
        "faults": output.records(verified.faults, FAULT_FIELDS),
        "unreadable": list(map(str, unreadable)),
    }
    if signatures:
        data["signatures"] = list(map(_signed_record, signed))
    untrusted = sum(model.is_faulty for model in signed)
    text = _as_text(verified, quick=quick, untrusted=untrusted)
    out.result(data, [*map(_signed_text, signed), text])
    if verified.damaged:
        output.show_note(_ADVICE)
    lost = set(map(str, verified.lost))
    if lost:
        lost.add("")  # the store itself, which may have lost its whole folder of manifests
        output.show_note(_LOST)
    if any(not fault.blob and fault.reference not in lost for fault in verified.faults):
        output.show_note(f"for manifests: {ADVICE}")
    for error in unreadable:
        output.show_error(str(error))
    ok = StoreError.exit_code if unreadable else 0
    ctx.exit(Damaged.exit_code if verified.faults or untrusted else ok)


def _remote_of(names: tuple[str, ...], remote: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the names, and the address of a remote: that of the option, or the only name."""
    from blobstore.remotes.addresses import is_address

    if not any(map(is_address, names)):
        return names, remote
    if remote is not None or len(names) > 1:
        raise click.UsageError("an address cannot be combined with other models")
    return (), names[0]


def _verify_remote(
    ctx: click.Context,
    remote: str,
    sample: str | None,
    rate: int | None,
    plain_http: bool | None,
    out: Output,
) -> None:
    from blobstore.operations.transfer.verify_remote import verify_remote

    with progress_bar() as progress:
        verified = verify_remote(
            remote, sample=sample, limit_rate=rate, plain_http=plain_http, progress=progress
        )
    work = output.record(
        verified, "remote digest models blobs hashed cold_blobs bytes_read seconds"
    )
    out.result(
        work | {"faults": output.records(verified.faults, FAULT_FIELDS)},
        _as_text(verified, quick=False, cold_blobs=verified.cold_blobs),
    )
    if verified.faults:
        output.show_note(
            "push the model to another repository, or ask the operator to restore the blobs"
        )
        ctx.exit(Damaged.exit_code)


def _as_text(
    verified: Verified | VerifiedRemote, *, quick: bool, cold_blobs: int = 0, untrusted: int = 0
) -> str:
    rate = int(verified.bytes_read / max(verified.seconds, 1e-3))
    time = render.human_seconds(verified.seconds)
    share = f"{verified.hashed:,} of them hashed, " if verified.hashed < verified.blobs else ""
    work = (
        f"sizes and headers only, {time}"
        if quick
        else f"{share}{render.human_bytes(verified.bytes_read)} read in {time}, "
        f"{render.human_bytes(rate)}/s"
    )
    forms = f" and {render.count_of(cold_blobs, 'compressed form')}" if cold_blobs else ""
    faults = len(verified.faults) + untrusted
    summary = (
        f"{render.count_of(faults, 'fault') if faults else 'ok'}: "
        f"{render.count_of(verified.models, 'model')}, "
        f"{render.count_of(verified.blobs, 'blob')}{forms}, {work}"
    )
    return "\n".join([*map(fault_line, verified.faults), summary])


def _signed_record(model: SignedModel) -> dict[str, Any]:
    value = output.record(model, "name=reference digest action trusted=is_trusted reason")
    return value | {"signatures": output.records(model.signatures, output.SIGNATURE_FIELDS)}


def _signed_text(model: SignedModel) -> str:
    lines = [f"{render.cell(model.reference)} ({model.digest.short}): {_trust(model)}"]
    for one in model.signatures:
        by = {
            "valid": f"signed by {render.cell(one.signer)}",
            "invalid": f"invalid: {escape(one.message)}",
            "unknown key": "not verified: signed by another key",
            "not checked": "not checked: no key was given",
        }[one.state]
        key = f" (key {render.cell(one.short_key)})" if one.key else ""
        moment = f" at {output.timestamp(one.created)}" if one.created is not None else ""
        lines.append(f"  {one.kind}: {by}{key}{moment}")
    return "\n".join(lines)


def _trust(model: SignedModel) -> str:
    count = render.count_of(len(model.signatures), "signature")
    if model.is_unsigned:
        count += ", none by a key that was given" if model.signatures else ", but a key was given"
    if model.action in {None, "off"}:
        return count
    if model.is_trusted:
        return f"{count}, trusted by the policy"
    refused = "refused by the policy" if model.action == "enforce" else "the policy warns"
    return f"{count}, {refused}: {escape(model.reason)}"


def fault_line(fault: Fault | RemoteFault) -> str:
    """Return a fault as one line of text."""
    if not fault.reference:  # of the store itself
        return escape(fault.message)
    where = [f"model {render.cell(fault.reference)}"]
    if fault.layer and fault.layer != fault.tensor:
        where.append(f"layer {render.cell(fault.layer)}")
    if fault.tensor:
        where.append(f"tensor {render.cell(fault.tensor)}")
    return f"{', '.join(where)}: {escape(fault.message)}"
