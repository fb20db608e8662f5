"""The options and argument types that commands share, and suggestions for misspelled names."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from blobstore.cli.render import VOLUME_KEYS
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

_JSON_KEY = "blobstore.json"
_WAIT_KEY = "blobstore.wait"
_STORE_KEY = "blobstore.store"
_SIZE = re.compile(
    r"(?P<number>\d{1,18}(?:\.\d{1,18})?)\s*(?P<unit>[kmgt]?i?)b?", re.ASCII | re.IGNORECASE
)
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{f"{unit}i": 1024**power for power, unit in enumerate("kmgt", start=1)},
}


def parse_name(ctx: click.Context, param: click.Parameter, value: str | None) -> Reference | None:
    """Return the reference that a value spells; None if it was not given. A callback of click.

    Raises:
        InvalidReference: it breaks the grammar.
    """
    del ctx, param
    from blobstore.manifests.reference import Reference

    return None if value is None else Reference.parse(value)


def parse_names(
    ctx: click.Context, param: click.Parameter, values: Sequence[str]
) -> tuple[Reference, ...]:
    """Return the references of several arguments. Raises as :func:`parse_name`."""
    del ctx, param
    from blobstore.manifests.reference import Reference

    return tuple(map(Reference.parse, values))


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes that ``5GB``, ``500MiB`` or a plain number spell; None if it was not given."""
    if value is None:
        return None
    match = _SIZE.fullmatch(value.strip())
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if match is None or unit is None:
        raise click.BadParameter(f"{quote(value)} is not a size such as 5GB or 500MiB", ctx, param)
    return int(float(match["number"]) * unit)


def parse_duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds that ``30m``, ``1h``, ``1.5d`` or ``0s`` spell; None if it was not given.

    A number without a unit is an error.
    """
    if value is None:
        return None
    match = _DURATION.fullmatch(value.strip())
    if match is None:
        raise click.BadParameter(f"{quote(value)} is not a time such as 30m, 1h or 2d", ctx, param)
    return float(match["number"]) * _SECONDS[match["unit"]]


def parse_rate(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes per second that ``50MB/s`` or ``50MB`` spell; None if it was not given.

    A number without a unit is an error.
    """
    if value is None:
        return None
    text = value.strip().removesuffix("/s")
    if text[-1:].isdigit():
        raise click.BadParameter(f"{quote(value)} is not a rate such as 50MB/s", ctx, param)
    rate = parse_size(ctx, param, text)
    if not rate or rate < 1:
        raise click.BadParameter(f"rate must be above 0, got {quote(value)}", ctx, param)
    return rate


def expect_json(ctx: click.Context, args: Sequence[str]) -> None:
    """Remember whether the arguments, which are not parsed yet, ask for JSON."""
    ctx.meta[_JSON_KEY] = "--json" in args


def wants_json(ctx: click.Context) -> bool:
    """Return whether the output must be JSON, even if the command failed."""
    return bool(ctx.meta.get(_JSON_KEY))


def _note_json(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    del param
    ctx.meta[_JSON_KEY] = value
    return value


def _open_store(ctx: click.Context, param: click.Parameter, value: str | None) -> LocalStore:
    from blobstore.cli.render import show_note
    from blobstore.store.local import LocalStore
    from blobstore.store.permissions import folder_warnings

    if ctx.get_parameter_source("store") is not ParameterSource.COMMANDLINE:
        value = ctx.meta.get(_STORE_KEY, value)
    if value == "":  # an unset variable of a script must not mean the current folder
        raise click.BadParameter("--store must not be empty", ctx, param)
    store = LocalStore(value)
    store.lock_timeout = ctx.meta.get(_WAIT_KEY, store.lock_timeout)
    for concern in folder_warnings(store):
        show_note(concern)
    return store


def _note_store(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    del param
    if value is not None:
        ctx.meta[_STORE_KEY] = value


def _note_volume(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        ctx.meta[VOLUME_KEYS[param.name]] = True


def _wait_for_others(ctx: click.Context, param: click.Parameter, value: float | None) -> None:
    del param
    if value is not None:
        ctx.meta[_WAIT_KEY] = value
        if "store" in ctx.params:  # else it is opened after this
            ctx.params["store"].lock_timeout = value


store_option = click.option(
    "--store",
    metavar="DIR",
    envvar="BLOBSTORE_HOME",
    show_envvar=True,
    callback=_open_store,
    help="Folder of the store; ~/.blobstore by default.",
)
global_store_option = click.option(
    "--store",
    metavar="DIR",
    expose_value=False,
    callback=_note_store,
    help="Folder of the store, for all commands.",
)
COMMON = (
    click.Option(
        ["--quiet", "-q"],
        is_flag=True,
        expose_value=False,
        callback=_note_volume,
        help="Print no notes and no progress.",
    ),
    click.Option(
        ["--verbose", "-v"],
        is_flag=True,
        expose_value=False,
        callback=_note_volume,
        help="Print more details, and where in the code an error occurred.",
    ),
)
"""Options of the program and of every command; they may stand before or after the command."""
wait_option = click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    expose_value=False,
    callback=_wait_for_others,
    help="Seconds to wait for other processes that use the store; 60 by default.",
)
json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    is_eager=True,  # parsed before other arguments, which may be wrong
    callback=_note_json,
    help="Print JSON with exact numbers.",
)
jobs_option = click.option(
    "--jobs",
    "-j",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of threads; one per processor by default.",
)


@contextlib.contextmanager
def suggesting_names(store: LocalStore, references: Sequence[Reference]) -> Iterator[None]:
    """Add similar names of the store to the error if a model does not exist.

    Names that belong to other users are noted first.
    """
    from blobstore.cli.render import show_note
    from blobstore.store.permissions import name_concerns

    for concern in name_concerns(store, references):
        show_note(concern)
    try:
        yield
    except ModelNotFound as error:
        from difflib import get_close_matches

        names: list[str] = []
        with contextlib.suppress(BlobstoreError):
            names.extend(map(_short, store.references()))
        asked = [name for name in map(_short, references) if name not in names]
        near = dict.fromkeys(match for name in asked for match in get_close_matches(name, names))
        if not near:
            raise
        raise ModelNotFound(f"{error}; did you mean {', '.join(map(quote, near))}?") from None


def _short(reference: Reference) -> str:
    # The default tag would make all names alike.
    return str(reference).removesuffix(":latest")
