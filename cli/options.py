"""The options and argument types that commands share, and suggestions for misspelled names."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from blobstore.cli.render import VOLUME_KEYS
from blobstore.core import interrupts
from blobstore.core.escape import join_some, quote
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from click.shell_completion import CompletionItem

    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:  # not generic in older versions of click
    _ParamType = click.ParamType

_JSON_KEY = "blobstore.json"
_WAIT_KEY = "blobstore.wait"
_STORE_KEY = "blobstore.store"
_PASSPHRASE = "BLOBSTORE_KEY_PASSPHRASE"  # noqa: S105 - the name of a variable
_MAX_LISTED = 5
_QUANT_TYPES = ("int4", "int8", "nvfp4", "mxfp8", "mxfp4")
_DURATION = re.compile(r"(?P<number>\d{1,9}(?:\.\d{1,9})?)\s*(?P<unit>[smhdw])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


class _Path(_ParamType):
    """A path, which shells complete. Operations check it, and report what is wrong with it."""

    name = "path"

    def __init__(self, kind: Literal["file", "dir"]) -> None:
        self._kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Let the shell complete the path."""
        del ctx, param
        return _path_items(incomplete, self._kind)


class _ModelName(_ParamType):
    """The name of a model in the store, a glob, or the start of an ID; :func:`models` finds it."""

    name = "name"

    def __init__(
        self, *, or_path: bool = False, or_address: bool = False, elsewhere: str = "pull it first"
    ) -> None:
        self._or_path = or_path
        self._or_address = or_address
        self._elsewhere = elsewhere
        """What to do about a model that is not in the store."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged, after checking its grammar."""
        del param, ctx
        from blobstore.manifests.reference import Reference
        from blobstore.remotes.addresses import check_address, is_address
        from blobstore.store.name_patterns import is_pattern

        if is_address(value) and self._or_address:
            check_address(value)
        elif is_address(value) and not self._or_path:
            raise UsageError(
                f"{quote(value)} is the address of a model elsewhere, and this command takes names of the "
                "store",
                advice=self._elsewhere,
            )
        elif not (self._or_path or is_pattern(value)):
            Reference.parse(value)
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of the store that begin so."""
        del param
        from click.shell_completion import CompletionItem

        names: list[str] = []
        with contextlib.suppress(BlobstoreError):
            for reference in _completion_store(ctx).references():
                name = str(reference)
                names.append(name if ":" in incomplete else name.removesuffix(":latest"))
        found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        return found or (_path_items(incomplete, "file") if self._or_path else [])


class _NewName(_ParamType):
    """The name that a model is given."""

    name = "name"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Reference:
        """Return the reference that a text spells."""
        del param, ctx
        from blobstore.manifests.reference import Reference

        return Reference.parse(value)


class _Content(_ParamType):
    """The name of a tensor or of a file of the model in the argument ``name``, or a pattern."""

    name = "content"

    def __init__(self, kind: Literal["tensors", "files"]) -> None:
        self._kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the tensors or files of the model that begin so."""
        del param
        from click.shell_completion import CompletionItem

        from blobstore.models.files import ModelFiles
        from blobstore.models.tensors import read_tensors

        names: list[str] = []
        with contextlib.suppress(BlobstoreError):
            model = ModelFiles.of(str(ctx.params.get("name")), _completion_store(ctx))
            if self._kind == "files":
                names.extend(model.files)
            else:
                names.extend(read_tensors(model.store, model.manifest, collect_faults=True).tensors)
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]


class _QuantType(_ParamType):
    """A type of quantization. The operation checks it, because it can say more about wrong ones."""

    name = "type"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the types that begin so."""
        del ctx, param
        from click.shell_completion import CompletionItem

        return [CompletionItem(name) for name in _QUANT_TYPES if name.startswith(incomplete)]


FILE, FOLDER = _Path("file"), _Path("dir")
MODEL, MODEL_OR_PATH = _ModelName(), _ModelName(or_path=True, or_address=True)
MODEL_OR_ADDRESS = _ModelName(or_address=True)
MODEL_TO_VERIFY = _ModelName(elsewhere="put --remote before it")
NEW_NAME, QUANT_TYPE = _NewName(), _QuantType()
TENSORS, MODEL_FILE = _Content("tensors"), _Content("files")


def _path_items(incomplete: str, kind: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


def _completion_store(ctx: click.Context) -> LocalStore:
    """Return the store that the options parsed so far name."""
    from blobstore.store.local import LocalStore

    return LocalStore.of(ctx.params.get("store") or ctx.meta.get(_STORE_KEY))


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
    if not ctx.resilient_parsing:  # else the shell completes a word
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
    type=FOLDER,
    envvar="BLOBSTORE_HOME",
    show_envvar=True,
    callback=_open_store,
    help="Folder of the store; ~/.blobstore by default.",
)
global_store_option = click.option(
    "--store",
    metavar="DIR",
    type=FOLDER,
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
streams_option = click.option(
    "--streams",
    type=click.IntRange(min=1),
    metavar="N",
    default=8,
    show_default=True,
    help="Number of blobs, or parts of large blobs, to transfer at once.",
)
limit_rate_option = click.option(
    "--limit-rate",
    metavar="RATE",
    callback=parse_rate,
    help="Transfer at most so many bytes per second, such as 50MB/s.",
)
plain_http_option = click.option(
    "--plain-http",
    is_flag=True,
    default=None,
    help="Use HTTP without TLS; for registries on this machine this is the default.",
)


def read_passphrase() -> str:
    """Return the passphrase of a private key, from the environment or the terminal.

    Raises:
        UsageError: there is no terminal to ask on.
    """
    given = os.environ.get(_PASSPHRASE)
    if given is not None:
        return given
    if not sys.stdin.isatty():
        raise UsageError(f"the key is encrypted; set {_PASSPHRASE} to its passphrase")
    return ask("Passphrase of the key", is_hidden=True)


def ask(what: str, *, is_hidden: bool = False) -> str:
    """Ask on the terminal; return the answer, which may be empty if it is hidden."""
    import termios

    prompt = partial(click.prompt, what, hide_input=is_hidden, err=True)
    if is_hidden:
        prompt = partial(prompt, default="", show_default=False)
    try:
        before = termios.tcgetattr(sys.stdin.fileno())
    except (OSError, termios.error):  # a test, or no terminal
        return str(prompt())
    try:
        return str(interrupts.call(prompt))
    except interrupts.Stopped:  # the question is left behind, with its characters hidden
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, before)
        raise


@contextlib.contextmanager
def models(
    store: LocalStore, texts: Sequence[str], *, needs_name: bool = False
) -> Iterator[tuple[Reference, ...]]:
    """Yield the models that the user named: by name, by glob, or by the start of the ID.

    Names that belong to other users are noted first.

    Args:
        store: the store of the models.
        texts: what the user wrote.
        needs_name: refuse an ID that has several names.
    """
    from blobstore.cli.render import show_note
    from blobstore.store.name_patterns import select_references
    from blobstore.store.permissions import name_concerns

    references = tuple(select_references(store, texts, needs_name=needs_name))
    for concern in name_concerns(store, references):
        show_note(concern)
    yield references


@contextlib.contextmanager
def model(store: LocalStore, text: str, *, needs_name: bool = False) -> Iterator[Reference]:
    """Yield the one model that the user named, as :func:`models` does."""
    with models(store, [text], needs_name=needs_name) as found:
        if len(found) > 1:
            listed = join_some([quote(name) for name in found], _MAX_LISTED)
            raise UsageError(f"{quote(text)} matches {len(found)} models: {listed}; name one")
        yield found[0]


@contextlib.contextmanager
def model_or_address(store: LocalStore, text: str) -> Iterator[Reference | str]:
    """Yield the address of a model in a registry unchanged, and otherwise do as :func:`model`."""
    from blobstore.remotes.addresses import is_address

    if is_address(text):
        yield text
        return
    with model(store, text) as reference:
        yield reference
