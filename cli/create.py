"""``blobstore create``: import a model."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Literal

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.create.plan import ModelPlan, PlannedTensor
    from blobstore.store.local import LocalStore

ExpertForm = Literal["packed", "stacked"]
PolicyName = Literal["recommended", "uniform"]

_DECISION_FIELDS = "tensor=name shape dtype type group_size bytes_before bytes_after reason"


@click.command("create", short_help="Import a model: a folder, a file or a Hub repository.")
@click.argument("source")
@click.argument("name", callback=options.parse_name)
@options.store_option
@click.option(
    "--experts",
    type=click.Choice(["packed", "stacked"]),
    default="packed",
    show_default=True,
    help="Keep the experts of a layer as they are in one blob, or join them to one tensor per projection.",
)
@click.option(
    "--quantize",
    "quant_type",
    metavar="TYPE",
    help="Quantize the weights to int4, int8, nvfp4, mxfp8 or mxfp4.",
)
@click.option(
    "--group-size",
    type=int,
    metavar="N",
    help="Elements per scale: 32, 64 or 128 for int4 and int8.",
)
@click.option(
    "--policy",
    type=click.Choice(["recommended", "uniform"]),
    default="recommended",
    show_default=True,
    help="Keep the most sensitive tensors or promote them to 8 bits, or quantize all matrices.",
)
@click.option(
    "--quantize-override",
    "overrides",
    metavar="GLOB=TYPE",
    multiple=True,
    help="Type of the tensors that match, or none to keep them. The last match decides.",
)
@click.option("--decode", is_flag=True, help="Decode FP8 weights to BF16.")
@click.option(
    "--weights", metavar="PATTERN", help="File names of the weights, if a folder has several sets."
)
@click.option(
    "--ignore-unindexed", is_flag=True, help="Skip tensors that the weight index does not name."
)
@click.option(
    "--subtree",
    metavar="PATH",
    help="Part of a PyTorch checkpoint to import; '.' is the whole checkpoint.",
)
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="Print the parts of a PyTorch checkpoint for --subtree; write nothing.",
)
@click.option(
    "--keep-names", is_flag=True, help="Keep the tensor names and the row order of Meta's Llama."
)
@click.option(
    "--skip-unreadable",
    is_flag=True,
    help="Skip tensors of a PyTorch checkpoint whose type safetensors does not have.",
)
@click.option(
    "--keep",
    metavar="GLOB",
    multiple=True,
    help="Store other files as they are too, for example '*.onnx'.",
)
@click.option("--paranoid", is_flag=True, help="Hash blobs that the store already has.")
@options.jobs_option
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing to the store.")
@options.json_option
def command(
    source: str,
    name: Reference,
    store: LocalStore,
    experts: ExpertForm,
    quant_type: str | None,
    group_size: int | None,
    policy: PolicyName,
    overrides: tuple[str, ...],
    decode: bool,
    weights: str | None,
    ignore_unindexed: bool,
    subtree: str | None,
    is_list: bool,
    keep_names: bool,
    skip_unreadable: bool,
    keep: tuple[str, ...],
    paranoid: bool,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import SOURCE into the store under NAME.

    SOURCE is a Hugging Face model folder, a .safetensors file, a PyTorch checkpoint, a folder of
    Meta's Llama, or the id of a Hub repository (org/name, or hf://org/name@revision). NAME is
    [host/][namespace/]model[:tag]. Blobs that the store already has are not rewritten. The name
    appears last, when everything else is safely on disk.
    """
    if is_list:
        from blobstore.cli.inspect import show_parts

        show_parts(source, as_json=as_json)
        return
    if dry_run:
        from blobstore.operations.create.plan import QuantizeOptions, plan_source
        from blobstore.sources.base import SourceOptions
        from blobstore.sources.open import open_source

        quantize = QuantizeOptions(
            quant_type=quant_type, group_size=group_size, policy=policy, overrides=overrides
        )
        source_options = SourceOptions(
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            keep=keep,
        )
        store.check_name(name)
        with render.progress_bar() as progress:
            opened = open_source(source, source_options, progress=progress)
        with closing(opened):
            planned = plan_source(opened, experts=experts, quantize=quantize, decode=decode)
            _show_plan(name, planned, [file.name for file in opened.files], as_json)
        return
    from blobstore.operations.create.create import create

    with render.progress_bar() as progress:
        created = create(
            source,
            name,
            store=store,
            experts=experts,
            quantize=quant_type,
            group_size=group_size,
            policy=policy,
            overrides=overrides,
            decode=decode,
            weights=weights,
            ignore_unindexed=ignore_unindexed,
            subtree=subtree,
            keep_names=keep_names,
            skip_unreadable=skip_unreadable,
            keep=keep,
            paranoid=paranoid,
            jobs=jobs,
            progress=progress,
        )
    for notice in created.notices:
        render.show_note(notice)
    if as_json:
        fields = "name=reference tensors blobs bytes_written bytes_present seconds notices"
        render.show_json(render.record(created, fields))
        return
    render.show(
        f"created {created.reference}: {render.count_of(created.tensors, 'tensor')} in "
        f"{render.count_of(created.blobs, 'blob')}, "
        f"{render.human_bytes(created.bytes_written)} written, "
        f"{render.human_bytes(created.bytes_present)} already there, "
        f"{render.human_seconds(created.seconds)}"
    )


def _show_plan(name: Reference, planned: ModelPlan, files: list[str], as_json: bool) -> None:
    for notice in planned.notices:
        render.show_note(notice)
    tensors = sum(len(blob.tensors) for blob in planned.blobs)
    size = sum(blob.size for blob in planned.blobs)
    if as_json:
        result: dict[str, Any] = {
            "name": name,
            "tensors": tensors,
            "bytes": size,
            "blobs": render.records(planned.blobs, "name tensors bytes=size"),
            "decisions": render.records(planned.decisions(), _DECISION_FIELDS),
            "files": files,
            "notices": planned.notices,
        }
        for blob in result["blobs"]:
            blob["tensors"] = [recipe.spec.name for recipe in blob["tensors"]]
        render.show_json(result)
        return
    if planned.policy is None:
        rows = [
            (render.cell(blob.name), f"{len(blob.tensors):,}", render.human_bytes(blob.size))
            for blob in planned.blobs
        ]
        render.show(render.table(("BLOB", "TENSORS", "SIZE"), rows, right=(1, 2)))
    else:
        _show_decisions(list(planned.decisions()))
    render.show(
        f"{render.count_of(tensors, 'tensor')} in {render.count_of(len(planned.blobs), 'blob')}, "
        f"{render.human_bytes(size)}; {render.count_of(len(files), 'file')}; nothing was written"
    )


def _show_decisions(decisions: Sequence[PlannedTensor]) -> None:
    rows = [
        (
            render.cell(row.name),
            row.dtype,
            f"{row.type} g{row.group_size}" if row.group_size else row.type,
            render.human_bytes(row.bytes_before),
            render.human_bytes(row.bytes_after),
            render.cell(row.reason),
        )
        for row in decisions
    ]
    headings = ("TENSOR", "FROM", "TO", "BEFORE", "AFTER", "REASON")
    render.show(render.table(headings, rows, right=(3, 4)))
    before = sum(row.bytes_before for row in decisions)
    after = sum(row.bytes_after for row in decisions)
    bits = after * 8 / max(sum(row.elements for row in decisions), 1)
    render.show(
        f"{render.human_bytes(before)} become {render.human_bytes(after)}, {bits:.3g} bits per weight"
    )
