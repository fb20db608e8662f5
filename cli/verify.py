"""``blobstore verify``: read everything again and check it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from blobstore.cli import render
from blobstore.cli.options import (
    jobs_option,
    json_option,
    parse_names,
    store_option,
    suggesting_names,
)
from blobstore.errors import Damaged, NotFound
from blobstore.text import printable, quoted

if TYPE_CHECKING:
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore
    from blobstore.verify import Fault, Verified


@click.command("verify", short_help="Hash and check again what models are made of.")
@click.argument("names", metavar="[NAME]...", nargs=-1, callback=parse_names)
@store_option
@jobs_option
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    names: tuple[Reference, ...],
    store: LocalStore,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Hash and parse again all that the models NAME are made of; without a NAME, all models.

    Every fault is one line: model, layer, tensor and what is wrong. The exit code is then 4.
    """
    from blobstore.verify import verify_models

    store.check_root()
    if not store.layout.root.exists():
        message = f"there is no store at {quoted(store.layout.root)}"
        raise NotFound(message)
    with suggesting_names(store, names), render.progress_bar() as progress:
        verified = verify_models(names, store=store, jobs=jobs, progress=progress)
    if as_json:
        render.show_json(_as_json(verified))
    else:
        render.show(_as_text(verified))
    if verified.faults:
        ctx.exit(Damaged.exit_code)


def _as_json(verified: Verified) -> dict[str, object]:
    return {
        "models": verified.models,
        "blobs": verified.blobs,
        "bytes_read": verified.bytes_read,
        "seconds": round(verified.seconds, 3),
        "faults": [dataclasses.asdict(fault) for fault in verified.faults],
    }


def _as_text(verified: Verified) -> str:
    rate = verified.bytes_read / max(verified.seconds, 1e-3)
    faults = len(verified.faults)
    summary = (
        f"{render.count_of(faults, 'fault') if faults else 'ok'}: "
        f"{render.count_of(verified.models, 'model')}, {render.count_of(verified.blobs, 'blob')}, "
        f"{render.human_bytes(verified.bytes_read)} read in "
        f"{render.human_seconds(verified.seconds)}, {render.human_bytes(int(rate))}/s"
    )
    return "\n".join([*map(_fault_line, verified.faults), summary])


def _fault_line(fault: Fault) -> str:
    where = [f"model {render.cell(fault.reference)}"]
    if fault.layer:
        where.append(f"layer {render.cell(fault.layer)}")
    if fault.tensor:
        where.append(f"tensor {render.cell(fault.tensor)}")
    return f"{', '.join(where)}: {printable(fault.message)}"
