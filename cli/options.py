"""The options that commands share, and the meaning of their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from blobstore.cli.arguments import MODEL, STORE, STORE_KEY
from blobstore.cli.output import VOLUME_KEYS, Output, show_note
from blobstore.core.escape import quote
from blobstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from blobstore.store.local import LocalStore

    _Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

_JSON_KEY = "blobstore.json"
_WAIT_KEY = "blobstore.wait"


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Return the bytes that ``5GB``, ``500MiB`` or a plain number spell; None if it was not given."""
    if value is None:
        return None
    from blobstore.core.arguments import parse_bytes

    try:
        return parse_bytes(value)
    except UsageError as error:
        raise click.BadParameter(error.message, ctx, param) from None


def parse_duration(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """Return the seconds that ``30m``, ``1h``, ``1.5d`` or ``0s`` spell; None if it was not given.

    A number without a unit is an error.
    """
    if value is None:
        return None
    from blobstore.core.arguments import parse_seconds

    try:
        return parse_seconds(value)
    except UsageError as error:
        raise click.BadParameter(error.message, ctx, param) from None


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


def _choose_output(ctx: click.Context, param: click.Parameter, value: bool) -> Output:
    del param
    ctx.meta[_JSON_KEY] = value
    return Output(is_json=value)


def _open_store(ctx: click.Context, param: click.Parameter, value: str | None) -> LocalStore:
    from blobstore.store.local import LocalStore
    from blobstore.store.permissions import folder_warnings

    if ctx.get_parameter_source("store") is not ParameterSource.COMMANDLINE:
        value = ctx.meta.get(STORE_KEY, value)
    if value == "":  # an unset variable of a script must not mean the current folder
        raise click.BadParameter("--store must not be empty", ctx, param)
    store = LocalStore(value)
    store.lock_timeout = ctx.meta.get(_WAIT_KEY, store.lock_timeout)
    if not ctx.resilient_parsing:  # else the shell completes a word
        show_note(*folder_warnings(store))
    return store


def _note_store(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    del param
    if value is not None:
        ctx.meta[STORE_KEY] = value


def _note_volume(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        ctx.meta[VOLUME_KEYS[param.name]] = True


def _wait_for_others(ctx: click.Context, param: click.Parameter, value: float | None) -> None:
    del param
    if value is not None:
        ctx.meta[_WAIT_KEY] = value
        if "store" in ctx.params:  # else it is opened after this
            ctx.params["store"].lock_timeout = value


global_store_option = click.option(
    "--store",
    metavar="DIR",
    type=STORE,
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
_SHARED = {
    "store": click.option(
        "--store",
        metavar="DIR",
        type=STORE,
        envvar="BLOBSTORE_HOME",
        show_envvar=True,
        callback=_open_store,
        help="Folder of the store; ~/.blobstore by default.",
    ),
    "wait": click.option(
        "--wait",
        type=click.FloatRange(min=0),
        metavar="SECONDS",
        expose_value=False,
        callback=_wait_for_others,
        help="Seconds to wait for other processes that use the store; 60 by default.",
    ),
    "json": click.option(
        "--json",
        "out",
        is_flag=True,
        is_eager=True,  # parsed before other arguments, which may be wrong
        callback=_choose_output,
        help="Print JSON with exact numbers.",
    ),
    "jobs": click.option(
        "--jobs",
        "-j",
        type=click.IntRange(min=1),
        metavar="N",
        help="Number of threads; one per processor by default.",
    ),
    "streams": click.option(
        "--streams",
        type=click.IntRange(min=1),
        metavar="N",
        default=8,
        show_default=True,
        help="Number of blobs, or parts of large blobs, to transfer at once.",
    ),
    "limit-rate": click.option(
        "--limit-rate",
        metavar="RATE",
        callback=parse_rate,
        help="Transfer at most so many bytes per second, such as 50MB/s.",
    ),
    "plain-http": click.option(
        "--plain-http/--no-plain-http",
        default=None,
        help="Use HTTP without TLS, or never; for registries on this machine, without TLS is the default.",
    ),
    "as": click.option(
        "--as",
        "prefix",
        metavar="PREFIX",
        help="Give the models this namespace, or [host/]namespace, instead of their own.",
    ),
    "weights": click.option(
        "--weights",
        metavar="PATTERN",
        help="File names of the weights, if a folder has several sets.",
    ),
    "ignore-unindexed": click.option(
        "--ignore-unindexed", is_flag=True, help="Skip tensors that the weight index does not name."
    ),
    "strip-prefix": click.option(
        "--strip-prefix",
        metavar="TEXT",
        help="Remove TEXT, such as 'module.', from the names of a PyTorch checkpoint's tensors.",
    ),
    "subtree": click.option(
        "--subtree",
        metavar="PATH",
        help="Part of a PyTorch checkpoint; '.' is the whole checkpoint.",
    ),
    "keep-names": click.option(
        "--keep-names",
        is_flag=True,
        help="Keep the tensor names and the row order of Meta's Llama.",
    ),
    "skip-unreadable": click.option(
        "--skip-unreadable",
        is_flag=True,
        help="Skip tensors of a PyTorch checkpoint whose type safetensors does not have.",
    ),
    "keep": click.option(
        "--keep",
        metavar="GLOB",
        multiple=True,
        help="Store other files as they are too, for example '*.onnx'.",
    ),
    "exclude": click.option(
        "--exclude",
        metavar="GLOB",
        multiple=True,
        help="Ignore files and folders of SOURCE, for example '*.txt'.",
    ),
}
"""Options of several commands, by their names."""


def shared(*names: str) -> _Decorator:
    """Add options that several commands have, in this order: ``shared("store", "json")``."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for name in reversed(names):
            command = _SHARED[name](command)
        return command

    return decorate


def level_option(text: str) -> _Decorator:
    """Add the option --level, with its help text."""
    return click.option(
        "--level",
        type=click.Choice(["fast", "small"]),
        default="fast",
        show_default=True,
        help=text,
    )


def base_option(text: str) -> _Decorator:
    """Add the option --base, with its help text."""
    return click.option("--base", metavar="NAME", type=MODEL, help=text)


def older_than_option(text: str) -> _Decorator:
    """Add the option --older-than, with its help text."""
    return click.option("--older-than", metavar="TIME", callback=parse_duration, help=text)


class _ChoiceOrOther(click.Choice[str]):
    """A choice that also takes other texts."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert(value, param, ctx) if value in self.choices else value


def sort_option(
    keys: Iterable[str], text: str, *, default: str | None = None, others: bool = False
) -> _Decorator:
    """Add the option --sort, the argument ``order``, with its help text.

    With ``others``, it takes any other text, too.
    """
    return click.option(
        "--sort",
        "order",
        type=(_ChoiceOrOther if others else click.Choice)(list(keys)),
        default=default,
        show_default=default is not None,
        help=text,
    )
