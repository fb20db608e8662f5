"""``blobstore create``: import a model."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import arguments, options, output, render
from blobstore.cli.progress import progress_bar
from blobstore.core.escape import join_some, quote
from blobstore.errors import SourceNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.cli.output import Output
    from blobstore.manifests.reference import Reference
    from blobstore.operations.create.create import CreateOptions
    from blobstore.operations.create.create_all import CreatedModel
    from blobstore.planning.grouping import ExpertForm
    from blobstore.planning.plan import ModelPlan, PlannedTensor
    from blobstore.quantization.choose_format import PolicyName
    from blobstore.store.local import LocalStore

_CREATED_FIELDS = (
    "tensors blobs bytes_written bytes_present blobs_repaired repository commit replaced seconds "
    "notices"
)
_MAX_LOOSE = 5
_DECISION_FIELDS = "tensor=name shape dtype type group_size bytes_before bytes_after reason"


@click.command("create", short_help="Import a model: a folder, a file or a Hub repository.")
@click.argument("source", type=arguments.SOURCE)
@click.argument("name", required=False, type=arguments.NEW_NAME)
@options.shared("store")
@click.option(
    "--experts",
    type=click.Choice(["packed", "stacked"]),
    default="packed",
    show_default=True,
    help="Keep the experts of a layer as they are in one blob, or join them to one tensor per projection.",
)
@click.option(
    "--quantize",
    metavar="TYPE",
    type=arguments.QUANT_TYPE,
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
    "--as-is",
    is_flag=True,
    help="Keep all tensors as published, whether their quantization is understood or not.",
)
@options.shared("weights", "ignore-unindexed", "subtree", "strip-prefix")
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="Print the parts of a PyTorch checkpoint for --subtree; write nothing.",
)
@options.shared("keep-names", "skip-unreadable", "keep", "exclude")
@click.option(
    "--all",
    "is_all",
    is_flag=True,
    help="Import every model of SOURCE: a cache, a folder, a repository of GGUF files, or ollama://.",
)
@options.shared("as")
@click.option(
    "--sha256",
    metavar="HEX",
    help="SHA-256 that the file of a URL must have.",
)
@click.option(
    "--keep-hub-cache",
    is_flag=True,
    help="Leave downloaded files of the Hub in its cache. By default, only the store has them.",
)
@click.option("--paranoid", is_flag=True, help="Hash all blobs that the store already has.")
@click.option(
    "--state",
    is_flag=True,
    help="Import the optimizer and all other state of a training, too, as NAME.state.",
)
@options.shared("jobs", "wait")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Print the plan; import nothing. Files that lie elsewhere are downloaded, and removed.",
)
@options.shared("json")
def command(
    source: str,
    name: Reference | None,
    store: LocalStore,
    is_list: bool,
    is_all: bool,
    prefix: str | None,
    dry_run: bool,
    out: Output,
    quantize: str | None,
    group_size: int | None,
    policy: PolicyName,
    overrides: tuple[str, ...],
    experts: ExpertForm,
    decode: bool,
    as_is: bool,
    sha256: str | None,
    keep_hub_cache: bool,
    paranoid: bool,
    state: bool,
    jobs: int | None,
    **source_options: Any,
) -> None:
    """Import SOURCE into the store under NAME.

    SOURCE is a Hugging Face model folder, a .safetensors file, a PyTorch checkpoint, a folder of
    torch.distributed.checkpoint, DeepSpeed or Meta's Llama, a GGUF file, a model of Ollama's
    (ollama://NAME), a models--org--name folder of the Hub cache, the id or URL of a Hub repository
    (org/name, hf://org/name@revision, hf://org/name:Q4_K_M), a folder in object storage
    (s3://bucket/folder, gs://, az://), or the URL of a weight file. NAME is
    [host/][namespace/]model[:tag]; by default that of the repository, the folder or the file. With --all,
    each quantization of a model in GGUF files is a model: name:Q4_K_M, name:Q8_0; each step of a run, too:
    name:checkpoint-500.
    Blobs that the store already has are not rewritten. The name appears last, when everything else is
    safely on disk.
    """
    if is_list:
        from blobstore.cli.inspect import show_parts

        show_parts(source, out)
        return
    from blobstore.planning.plan import QuantizeOptions
    from blobstore.sources.base import SourceOptions

    choices: CreateOptions = {
        "source_options": SourceOptions(**source_options),
        "sha256": sha256,
        "keep_hub_cache": keep_hub_cache,
        "quantize": QuantizeOptions(
            quantize, group_size=group_size, policy=policy, overrides=overrides
        ),
        "experts": experts,
        "decode": decode,
        "as_is": as_is,
        "paranoid": paranoid,
        "state": state,
        "jobs": jobs,
    }
    if is_all:
        _create_all(source, name, store, choices, prefix, out, dry_run=dry_run)
        return
    if prefix is not None:
        raise click.UsageError("--as is for --all; give one model a NAME")
    from blobstore.operations.create.create import create
    from blobstore.operations.create.source_names import source_name

    if dry_run and name is None:
        name = source_name(source, choices["source_options"])
    if dry_run:
        with _advising(source, store), progress_bar() as progress:
            planned = create(source, name, store=store, dry_run=True, progress=progress, **choices)
        output.show_note(*planned.notices)
        out.result(lambda: {"name": name} | _plan_as_json(planned), _plan_as_text(planned))
        return
    with _advising(source, store), progress_bar() as progress:
        created = create(source, name, store=store, progress=progress, **choices)
    output.show_note(*created.notices)
    replaced = ", which was the name of another model" if created.replaced else ""
    out.result(
        output.record(created, f"name=reference {_CREATED_FIELDS}"),
        f"created {created.reference}{replaced}: {render.count_of(created.tensors, 'tensor')} in "
        f"{render.count_of(created.blobs, 'blob')}, "
        f"{render.human_bytes(created.bytes_written)} written, "
        f"{render.human_bytes(created.bytes_present)} already there, "
        f"{render.human_seconds(created.seconds)}",
    )


@contextlib.contextmanager
def _advising(source: str, store: LocalStore) -> Iterator[None]:
    """Say which commands take a model of the store, if the source names one and is no path."""
    try:
        yield
    except SourceNotFound as error:
        if not arguments.is_name(source, store):
            raise
        advice = "the store has a model of this name; 'blobstore cp' gives it another one, and "
        advice += "'blobstore export' writes its files"
        raise SourceNotFound(error.message, advice=advice) from None


def _create_all(
    folder: str,
    name: Reference | None,
    store: LocalStore,
    choices: CreateOptions,
    prefix: str | None,
    out: Output,
    *,
    dry_run: bool,
) -> None:
    from blobstore.operations.create.create_all import create_all
    from blobstore.operations.create.find_models import loose_files

    loose = loose_files(folder)
    if loose:
        listed = join_some([quote(name) for name in loose], _MAX_LOOSE)
        output.show_note(
            f"left out, next to the folders of models: {listed}; create each with a name"
        )
    with progress_bar() as progress:
        models = create_all(
            folder, name, store=store, prefix=prefix, dry_run=dry_run, progress=progress, **choices
        )
    made = [model.created for model in models if model.created is not None]
    failed = [model for model in models if model.error is not None]
    for model in models:
        for notice in model.created.notices if model.created is not None else ():
            output.show_note(f"{model.name}: {notice}")
    counts = f"{render.count_of(len(models), 'model')}, {len(failed)} failed"
    written = render.human_bytes(sum(item.bytes_written for item in made))
    present = render.human_bytes(sum(item.bytes_present for item in made))
    totals = "nothing was written" if dry_run else f"{written} written, {present} already there"
    out.result(
        {"dry_run": dry_run, "models": list(map(_created_as_json, models))},
        (_table_of_all(models), f"{counts}; {totals}"),
    )
    output.exit_with(
        (f"{model.name}: {model.error}" for model in failed),
        max((model.error.exit_code for model in failed if model.error is not None), default=0),
    )


def _created_as_json(model: CreatedModel) -> dict[str, Any]:
    entry = output.record(model, "name source error")
    if model.created is not None:
        entry |= output.record(model.created, _CREATED_FIELDS)
    if model.error is not None:
        kind, code = type(model.error).__name__, model.error.exit_code
        entry["error"] = {"kind": kind, "message": model.error, "exit_code": code}
    return entry


def _table_of_all(models: Sequence[CreatedModel]) -> str:
    rows = []
    for model in models:
        cells = ["failed" if model.error else "found", "", "", ""]
        if (created := model.created) is not None:
            sizes = map(render.human_bytes, (created.bytes_written, created.bytes_present))
            cells = ["created", f"{created.tensors:,}", *sizes]
        rows.append(
            (
                render.cell(model.name),
                *cells,
                render.cell(getattr(model.source, "name", model.source)),
            )
        )
    alarming = [index for index, model in enumerate(models) if model.error]
    headings = ("NAME", "STATUS", "TENSORS", "WRITTEN", "PRESENT", "SOURCE")
    return render.table(headings, rows, right=(2, 3, 4), alarming=alarming)


def _plan_as_json(planned: ModelPlan) -> dict[str, Any]:
    blobs = output.records(planned.blobs, "name tensors bytes=size")
    for blob in blobs:
        blob["tensors"] = [recipe.spec.name for recipe in blob["tensors"]]
    return {
        "tensors": planned.tensors,
        "bytes": planned.size,
        "blobs": blobs,
        "decisions": output.records(planned.decisions(), _DECISION_FIELDS),
        "files": planned.files,
        "notices": planned.notices,
    }


def _plan_as_text(planned: ModelPlan) -> Iterator[str]:
    if planned.policy is None and output.is_verbose():
        rows = [
            (render.cell(blob.name), f"{len(blob.tensors):,}", render.human_bytes(blob.size))
            for blob in planned.blobs
        ]
        yield render.table(("BLOB", "TENSORS", "SIZE"), rows, right=(1, 2))
    elif planned.policy is not None:
        yield from _decisions_as_text(list(planned.decisions()))
    yield (
        f"{render.count_of(planned.tensors, 'tensor')} in "
        f"{render.count_of(len(planned.blobs), 'blob')}, {render.human_bytes(planned.size)}; "
        f"{render.count_of(len(planned.files), 'file')}; nothing was written"
    )


def _decisions_as_text(decisions: Sequence[PlannedTensor]) -> Iterator[str]:
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
    yield render.table(headings, rows, right=(3, 4))
    before = sum(row.bytes_before for row in decisions)
    after = sum(row.bytes_after for row in decisions)
    bits = after * 8 / max(sum(row.elements for row in decisions), 1)
    yield f"{render.human_bytes(before)} become {render.human_bytes(after)}, {bits:.3g} bits per weight"
