"""``blobstore bench``: measures how fast the bytes of a model arrive."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.bench.measurements import Measurement
    from blobstore.store.local import LocalStore

_BAR = 24
"""Characters of the longest bar."""


@click.command("bench", short_help="Measure how fast the bytes of a model arrive.")
@click.argument("name", metavar="[NAME|PATH|REMOTE]", required=False, type=arguments.MODEL_OR_PATH)
@click.option(
    "--device",
    type=arguments.DEVICE,
    metavar="DEVICE",
    default="auto",
    show_default=True,
    help="Also load the model onto this device: cpu, cuda or cuda:N; none for no device.",
)
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of concurrent bare reads; 8 by default, and 16 for a REMOTE.",
)
@options.shared("plain-http", "store", "json")
def command(
    name: str | None,
    device: str,
    jobs: int | None,
    plain_http: bool | None,
    store: LocalStore,
    out: Output,
) -> None:
    """Measure how fast the bytes of a model arrive by bare reads and copies, and how fast by "open".

    NAME is a model of the store, by default the largest; PATH is a file or folder, of which "open"
    is measured only if it is a GGUF file; REMOTE is the address of a model in a registry or in
    object storage. A model in the store wins over a path of the same spelling.

    Bytes come from the disk, after the system was asked to drop its pages of these files, and then
    from the page cache; or from the network. Bare reads of 8 MiB have one thread, and then as many
    as --jobs states, 8 by default and 16 for a REMOTE; they read at most 4.3 GB. "open" touches each
    page of all tensors with each option that may help. So a model of the store is read ten times; one
    of less than 1 GiB three times as often, of which the fastest counts.

    With a device, bytes are then copied from host memory to tensors there, and "open" loads all
    tensors onto it, which reads the model six times more. A part of the model is loaded if the device
    has too little free memory. By default, that is done with cuda:0 if torch can use it.
    """
    from blobstore.operations.bench.bench import measure_reading

    with progress_bar() as progress:
        found = measure_reading(
            _subject(name, store),
            store=store,
            device=device,
            jobs=jobs,
            plain_http=plain_http,
            progress=progress,
        )
    fields = "place device reader how bytes=size seconds"
    measured = [
        output.record(one, fields)
        | {"bytes_per_second": round(one.rate)}
        | {"read": one.reading and output.record(one.reading, "how reason")}
        for one in found.measurements
    ]
    out.result(
        {
            "name": found.subject,
            "measurements": measured,
            "advice": found.advice,
            "notices": found.notices,
        },
        [_table(found.measurements), "", *found.advice],
        notes=found.notices,
    )


def _subject(name: str | None, store: LocalStore) -> str | Path | Reference:
    """Return what a user named: an address, a path, or a model of the store."""
    from blobstore.operations.describe.list import list_models
    from blobstore.remotes.addresses import is_address

    if name is None:
        notes = arguments.store_notes(store)
        found = [model for model in list_models(store=store) if model.error is None]
        if not found:
            raise NotFound("the store has no models", advice=" ".join(notes))
        return max(found, key=lambda model: model.size).reference
    if is_address(name):
        return name
    if arguments.is_path(name, store):
        return Path(name)
    return arguments.model(store, name)


def _table(measurements: Sequence[Measurement]) -> str:
    best: dict[str, float] = {}
    for one in measurements:
        group = one.device or one.place
        best[group] = max(best.get(group, 0), one.rate)
    rows = [
        (
            one.place,
            _reader(one),
            f"{render.human_bytes(round(one.rate))}/s",
            "#" * max(1, round(_BAR * one.rate / best[one.device or one.place])),
        )
        for one in measurements
    ]
    return render.table(("FROM", "READ BY", "RATE", "OF THE BEST"), rows, right=(2,))


def _reader(one: Measurement) -> str:
    if one.reader == "open":
        return one.how
    return f"copies to {one.device}, {one.how}" if one.device else f"bare reads, {one.how}"
