"""``blobstore create``: import a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from blobstore.cli import options, render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.operations.create.create_all import CreatedModel
    from blobstore.operations.create.plan import ModelPlan, PlannedTensor
    from blobstore.store.local import LocalStore

ExpertForm = Literal["packed", "stacked"]
PolicyName = Literal["recommended", "uniform"]

_CREATED_FIELDS = (
    "tensors blobs bytes_written bytes_present blobs_repaired repository commit replaced seconds "
    "notices"
)
_DECISION_FIELDS = "tensor=name shape dtype type group_size bytes_before bytes_after reason"


@click.command("create", short_help="Import a model: a folder, a file or a Hub repository.")
@click.argument("source", type=options.FILE)
@click.argument("name", required=False, type=options.NEW_NAME)
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
    type=options.QUANT_TYPE,
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
@click.option(
    "--exclude",
    metavar="GLOB",
    multiple=True,
    help="Ignore files and folders of SOURCE, for example '*.txt'.",
)
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Import every model of SOURCE, a Hub cache or a folder of model folders.",
)
@click.option("--paranoid", is_flag=True, help="Hash all blobs that the store already has.")
@options.jobs_option
@options.wait_option
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan; write nothing to the store. Files of the Hub are downloaded to its cache.",
)
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    source: str,
    name: Reference | None,
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
    exclude: tuple[str, ...],
    is_all: bool,
    paranoid: bool,
    jobs: int | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Import SOURCE into the store under NAME.

    SOURCE is a Hugging Face model folder, a .safetensors file, a PyTorch checkpoint, a folder of
    Meta's Llama, a models--org--name folder of the Hub cache, or the id or URL of a Hub repository
    (org/name, hf://org/name@revision). NAME is [host/][namespace/]model[:tag]; with --all, models
    are named after their repositories or folders. Blobs that the store already has are not
    rewritten. The name appears last, when everything else is safely on disk.
    """
    if is_list:
        from blobstore.cli.inspect import show_parts

        show_parts(source, as_json=as_json)
        return
    choices: dict[str, Any] = {
        "experts": experts,
        "quantize": quant_type,
        "group_size": group_size,
        "policy": policy,
        "overrides": overrides,
        "decode": decode,
        "weights": weights,
        "ignore_unindexed": ignore_unindexed,
        "subtree": subtree,
        "keep_names": keep_names,
        "skip_unreadable": skip_unreadable,
        "keep": keep,
        "exclude": exclude,
        "paranoid": paranoid,
        "jobs": jobs,
    }
    if is_all:
        if name is not None:
            raise click.UsageError("--all takes no NAME: models are named after their sources", ctx)
        _create_all(ctx, source, store, choices, dry_run=dry_run, as_json=as_json)
        return
    if name is None:
        raise click.UsageError("Missing argument 'NAME'.", ctx)
    from blobstore.operations.create.create import create

    if dry_run:
        with render.progress_bar() as progress:
            planned = create(source, name, store=store, dry_run=True, progress=progress, **choices)
        _show_plan(name, planned, as_json=as_json)
        return
    with render.progress_bar() as progress:
        created = create(source, name, store=store, progress=progress, **choices)
    for notice in created.notices:
        render.show_note(notice)
    if as_json:
        render.show_json(render.record(created, f"name=reference {_CREATED_FIELDS}"))
        return
    replaced = ", which was the name of another model" if created.replaced else ""
    render.show(
        f"created {created.reference}{replaced}: {render.count_of(created.tensors, 'tensor')} in "
        f"{render.count_of(created.blobs, 'blob')}, "
        f"{render.human_bytes(created.bytes_written)} written, "
        f"{render.human_bytes(created.bytes_present)} already there, "
        f"{render.human_seconds(created.seconds)}"
    )


def _create_all(
    ctx: click.Context,
    folder: str,
    store: LocalStore,
    choices: dict[str, Any],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    from blobstore.operations.create.create_all import create_all

    with render.progress_bar() as progress:
        models = create_all(folder, store=store, dry_run=dry_run, progress=progress, **choices)
    made = [model.created for model in models if model.created is not None]
    failed = [model for model in models if model.error is not None]
    for model in models:
        for notice in model.created.notices if model.created is not None else ():
            render.show_note(f"{model.name}: {notice}")
    for model in failed:
        render.show_error(f"{model.name}: {model.error}")
    if as_json:
        entries = render.records(models, "name source error")
        for entry, model in zip(entries, models, strict=True):
            if model.created is not None:
                entry.update(render.record(model.created, _CREATED_FIELDS))
            if model.error is not None:
                kind, code = type(model.error).__name__, model.error.exit_code
                entry["error"] = {"kind": kind, "message": str(model.error), "exit_code": code}
        render.show_json({"dry_run": dry_run, "models": entries})
    else:
        render.show(_table_of_all(models))
        counts = f"{render.count_of(len(models), 'model')}, {len(failed)} failed"
        written = render.human_bytes(sum(item.bytes_written for item in made))
        present = render.human_bytes(sum(item.bytes_present for item in made))
        totals = "nothing was written" if dry_run else f"{written} written, {present} already there"
        render.show(f"{counts}; {totals}")
    if failed:
        ctx.exit(max(model.error.exit_code for model in failed if model.error is not None))


def _table_of_all(models: Sequence[CreatedModel]) -> str:
    rows = []
    for model in models:
        cells = ["failed" if model.error else "found", "", "", ""]
        if (created := model.created) is not None:
            sizes = map(render.human_bytes, (created.bytes_written, created.bytes_present))
            cells = ["created", f"{created.tensors:,}", *sizes]
        rows.append((render.cell(model.name), *cells, render.cell(model.source.name)))
    alarming = [index for index, model in enumerate(models) if model.error]
    headings = ("NAME", "STATUS", "TENSORS", "WRITTEN", "PRESENT", "SOURCE")
    return render.table(headings, rows, right=(2, 3, 4), alarming=alarming)


def _show_plan(name: Reference, planned: ModelPlan, *, as_json: bool) -> None:
    for notice in planned.notices:
        render.show_note(notice)
    if as_json:
        result: dict[str, Any] = {
            "name": name,
            "tensors": planned.tensors,
            "bytes": planned.size,
            "blobs": render.records(planned.blobs, "name tensors bytes=size"),
            "decisions": render.records(planned.decisions(), _DECISION_FIELDS),
            "files": planned.files,
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
        f"{render.count_of(planned.tensors, 'tensor')} in "
        f"{render.count_of(len(planned.blobs), 'blob')}, {render.human_bytes(planned.size)}; "
        f"{render.count_of(len(planned.files), 'file')}; nothing was written"
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
