"""The output of pushes and pulls of several models: totals, and the failures last."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from blobstore.cli import output, render
from blobstore.cli.arguments import MATCHED_KEY
from blobstore.errors import ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from blobstore.cli.output import Output
    from blobstore.core.outcomes import Outcome


def show_many(
    models: Sequence[Outcome[Any]],
    fields: str,
    lines: Iterable[str],
    total: str,
    out: Output,
    *,
    is_resumed: bool = True,
) -> None:
    """Print what became of several models, and exit if any failed.

    Args:
        models: the models.
        fields: those of a result that JSON has.
        lines: one for each model that succeeded, printed with --verbose.
        total: what was done in all.
        out: where to print.
        is_resumed: whether the same command goes on where it stopped.
    """
    matched = click.get_current_context().meta.get(MATCHED_KEY, ())
    gone = [
        model
        for model in models
        if isinstance(model.error, ModelNotFound) and model.name in matched
    ]
    models = [model for model in models if model not in gone]
    failed = [model for model in models if model.error is not None]
    if gone:
        total += f"; {render.count_of(len(gone), 'model')} removed in the meantime"
    if failed:
        total += f"; {len(failed)} of {render.count_of(len(models), 'model')} failed"
    text = [
        *(lines if output.is_verbose() else ()),
        f"{total}; {render.human_seconds(out.seconds)}",
    ]
    empty = dict.fromkeys(part.partition("=")[0] for part in fields.split())
    data = [
        {"name": model.name, "error": model.error}
        | (empty if model.result is None else output.record(model.result, fields))
        for model in models
    ]
    out.result({"models": data, "seconds": out.seconds}, text)
    if failed and is_resumed:
        output.show_note("the same command goes on where it stopped")
    output.exit_with(
        (f"{model.name}: {model.error}" for model in failed),
        max((model.error.exit_code for model in failed if model.error is not None), default=0),
    )
