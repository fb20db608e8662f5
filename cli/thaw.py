"""``blobstore thaw``: decompress frozen models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar

if TYPE_CHECKING:
    from blobstore.cli.output import Output
    from blobstore.core.progress import Progress
    from blobstore.manifests.reference import Reference
    from blobstore.operations.freeze.thaw import Thawed
    from blobstore.store.local import LocalStore


@click.command("thaw", short_help="Decompress frozen models.")
@click.argument("names", metavar="NAME...", nargs=-1, required=True, type=arguments.MODEL)
@click.option("--keep-cold", is_flag=True, help="Keep the compressed form too.")
@options.shared("store", "jobs", "wait", "json")
def command(
    names: tuple[str, ...],
    store: LocalStore,
    keep_cold: bool,
    jobs: int | None,
    out: Output,
) -> None:
    """Decompress the models NAME into files, as Ollama and "blobstore link" need them.

    Each file is verified and synced before its compressed form is removed.
    """
    from blobstore.operations.freeze.thaw import thaw_models

    chosen = arguments.models(store, names)
    with progress_bar() as progress:
        thawed = thaw_models(chosen, store=store, keep_cold=keep_cold, jobs=jobs, progress=progress)
    sizes = f"{render.human_bytes(thawed.stored)} decompressed to {render.human_bytes(thawed.size)}"
    out.result(
        output.record(
            thawed, "names=references blobs bytes=size stored_bytes=stored faults seconds"
        ),
        f"thawed {render.count_of(thawed.blobs, 'blob')} of "
        f"{render.count_of(len(thawed.references), 'model')}: "
        f"{sizes if thawed.blobs else 'nothing to do'}; {render.human_seconds(thawed.seconds)}",
    )
    output.exit_with(thawed.faults)


def thaw_whole(name: Reference, store: LocalStore, progress: Progress | None) -> Thawed:
    """Thaw a model for a command that needs its files, and return what was done.

    Raises:
        BlobMissing, BlobDamaged: a blob of the model is missing or damaged.
    """
    from blobstore.operations.freeze.thaw import thaw_models

    thawed = thaw_models([name], store=store, progress=progress)
    for fault in thawed.faults:
        raise fault
    return thawed
