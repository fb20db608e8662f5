"""The arguments of commands: models, tensors and paths, their completion in shells, and their meaning."""

from __future__ import annotations

import contextlib
import os
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from blobstore.cli.output import show_note
from blobstore.core.escape import (
    cli_command,
    join_some,
    question,
    quote,
    quote_url,
    without_secrets,
)
from blobstore.core.schemes import HUB, OLLAMA, advice_for, check_path, respelled, scheme_of
from blobstore.errors import BlobstoreError, InvalidReference, ModelNotFound, NotFound, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from click.shell_completion import CompletionItem

    from blobstore.core.schemes import Role
    from blobstore.manifests.reference import Reference
    from blobstore.store.local import LocalStore

    _ParamType = click.ParamType[Any]
else:  # not generic in older versions of click
    _ParamType = click.ParamType

STORE_KEY = "blobstore.store"
"""Where the context keeps the store that the options before the command name."""
MATCHED_KEY = "blobstore.matched"
"""Where the context keeps the names that globs have matched."""
CHANGES = frozenset(("follow", "freeze", "mv", "repair", "restore", "rm", "sign", "thaw"))
"""Commands that change the models they name, and so find those of the store itself alone. Others find shared ones too."""
_MAX_LISTED = 5
_QUANT_TYPES = ("int4", "int8", "nvfp4", "mxfp8", "mxfp4")


class _Path(_ParamType):
    """A path, which shells complete. Operations check it, and report what is wrong with it."""

    name = "path"

    def __init__(self, kind: Literal["file", "dir"], role: Role | None) -> None:
        self._kind = kind
        self._role: Role | None = role
        """What the path is for; None if an address may stand there, which the operation judges."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged, unless it is an address: that would be the path of a new folder."""
        del param, ctx
        if self._role is not None:
            check_path(value, self._role)
        return value

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
        self,
        *,
        or_path: bool = False,
        or_address: bool = False,
        or_remote: bool = False,
        before_folder: bool = False,
    ) -> None:
        self._before_folder = before_folder
        """Whether the argument ``folder`` follows, as which the last word is parsed."""
        self._or_remote = or_remote
        """Whether a whole store or repository may be named."""
        self._or_path = or_path
        self._or_address = or_address

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text unchanged, after checking its grammar."""
        del param, ctx
        from blobstore.manifests.reference import Reference
        from blobstore.remotes.addresses import check_address, is_address
        from blobstore.store.name_patterns import is_pattern

        if is_address(value) and self._or_remote:
            return value  # what is read there decides what it is
        if is_address(value) and self._or_address:
            if not is_pattern(value):
                check_address(value)
        elif is_address(value) and not self._or_path:
            raise UsageError(
                f"{quote_url(value)} is the address of a model elsewhere, and this command takes names of the "
                "store",
                advice=f"{cli_command('pull', without_secrets(value))} fetches it",
            )
        elif not (self._or_path or is_pattern(value)):
            if meant := respelled(value):
                raise UsageError(
                    f"{quote_url(value)} is no name of a model",
                    advice=f"write {quote_url(meant)[1:-1]}",
                )
            if (scheme := scheme_of(value)) is not None:
                raise UsageError(
                    f"{quote_url(value)} is no name of a model, and no address of one begins with "
                    f"{scheme}://",
                    advice=advice_for(value, "source"),
                )
            try:
                Reference.parse(value)
            except InvalidReference as error:
                raise InvalidReference(
                    error.message,
                    advice=path_advice(value) or address_advice(value) or error.advice,
                ) from None
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of the store that begin so; after a name, folders if one follows."""
        del param
        if self._before_folder and ctx.params.get("folder"):
            return _path_items(incomplete, "dir")
        names = _model_names(ctx, incomplete)
        if self._or_address or self._or_remote:
            names += _remotes(ctx, "oci://")
        return _name_items(names, incomplete) or (
            _path_items(incomplete, "file") if self._or_path else []
        )


class _NewName(_ParamType):
    """The name that a model is given; or had, if names are completed."""

    name = "name"

    def __init__(self, *, is_completed: bool = False) -> None:
        self._is_completed = is_completed

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names of the store that begin so, if the name need not be new."""
        del param
        return _name_items(_model_names(ctx, incomplete) if self._is_completed else [], incomplete)

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> Reference:
        """Return the reference that a text spells."""
        del param, ctx
        from blobstore.manifests.reference import Reference

        return Reference.parse(value)


class _Known(_ParamType):
    """A text that the command checks, with words for completion."""

    name = "text"

    def __init__(self, words: Callable[[click.Context, str], Iterable[str]]) -> None:
        self._words = words
        """Returns the words; some may begin with something other than the text."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the words that begin so, each once."""
        del param
        words: list[str] = []
        with contextlib.suppress(BlobstoreError):
            words += dict.fromkeys(self._words(ctx, incomplete))
        return _name_items(words, incomplete)


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
        from blobstore.models.small_files import ModelFiles
        from blobstore.models.tensors import read_tensors

        names: list[str] = []
        with contextlib.suppress(BlobstoreError):
            model = ModelFiles.of(str(ctx.params.get("name")), _completion_store(ctx))
            if self._kind == "files":
                names.extend(model.files)
            else:
                names.extend(read_tensors(model.store, model.manifest, collect_faults=True).tensors)
        return _name_items(names, incomplete)


class _QuantType(_ParamType):
    """A type of quantization. The operation checks it, because it can say more about wrong ones."""

    name = "type"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the types that begin so."""
        del ctx, param
        return _name_items(_QUANT_TYPES, incomplete)


def _completion_store(ctx: click.Context) -> LocalStore:
    """Return the store that the options parsed so far name."""
    from blobstore.store.local import LocalStore

    return LocalStore.of(ctx.params.get("store") or ctx.meta.get(STORE_KEY))


def _model_names(ctx: click.Context, incomplete: str) -> list[str]:
    store = _completion_store(ctx)
    found: list[Reference] = []
    with contextlib.suppress(BlobstoreError):
        found += store.references()
        if store.shared is not None and ctx.info_name not in CHANGES:
            found = sorted({*found, *store.shared.references()})
    names = map(str, found)
    return [name if ":" in incomplete else name.removesuffix(":latest") for name in names]


def _remotes(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the addresses that were used: with oci:// unless the word begins otherwise."""
    from blobstore.store.used_remotes import used_remotes

    used = used_remotes(_completion_store(ctx))
    if incomplete and not "oci://".startswith(incomplete[:6]):
        used = [address.removeprefix("oci://") for address in used]
    return used


def _names_and_remotes(ctx: click.Context, incomplete: str) -> list[str]:
    return [*_model_names(ctx, incomplete), *_remotes(ctx, incomplete)]


def _hosts(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the registries that have a login, and those that were used."""
    del incomplete
    from blobstore.registry.credentials import LoginFiles

    used = (remote for remote in _remotes(ctx, "") if remote.startswith("oci://"))
    return [*LoginFiles().hosts(), *(remote.split("/")[2] for remote in used)]


def _devices(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the devices that a model may be loaded onto, without asking torch, which takes seconds."""
    del ctx, incomplete
    from blobstore.core.system import may_have_gpu

    return ["auto", "none", "cpu", *(["cuda", "cuda:0"] if may_have_gpu() else [])]


def _former_ids(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the IDs of the models that the argument ``name`` had and can get again."""
    del incomplete
    from blobstore.operations.maintenance.history import model_history

    former = model_history(str(ctx.params.get("name")), store=_completion_store(ctx))
    return [one.digest.short for one in former if one.is_restorable]


def _tensor_names(ctx: click.Context, incomplete: str) -> list[str]:
    """Return the names of tensors and files of all models."""
    from blobstore.operations.describe.find import find_content
    from blobstore.store.name_patterns import is_pattern

    if is_pattern(incomplete):
        return []
    found = find_content(f"{incomplete}*", store=_completion_store(ctx)).places
    return [place.name for place in found]


FILE, SOURCE, FILE_TO_WRITE = _Path("file", "source"), _Path("file", None), _Path("file", "target")
FOLDER, STORE = _Path("dir", "target"), _Path("dir", None)
MODEL, MODEL_OR_PATH = _ModelName(), _ModelName(or_path=True, or_address=True)
MODELS_TO_FOLDER = _ModelName(before_folder=True)
NAMES_AND_REMOTE, REMOTE = _Known(_names_and_remotes), _Known(_remotes)
HOST, FORMER_ID, TENSOR_OR_FILE = _Known(_hosts), _Known(_former_ids), _Known(_tensor_names)
DEVICE = _Known(_devices)
MODEL_OR_FILE = _ModelName(or_path=True)
MODEL_OR_ADDRESS, MODEL_OR_REMOTE = _ModelName(or_address=True), _ModelName(or_remote=True)
NEW_NAME, FORMER_NAME, QUANT_TYPE = _NewName(), _NewName(is_completed=True), _QuantType()
TENSORS, MODEL_FILE = _Content("tensors"), _Content("files")


def _path_items(incomplete: str, kind: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type=kind)]


def _name_items(names: Sequence[str], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    return [
        CompletionItem(name) for name in names if name.startswith(incomplete) and name.isprintable()
    ]


def models(
    store: LocalStore, texts: Sequence[str], *, needs_name: bool = False, needs_store: bool = False
) -> tuple[Reference, ...]:
    """Return the models that the user named: by name, by glob, or by the start of the ID.

    Names that belong to other users are noted first.

    Args:
        store: the store of the models.
        texts: what the user wrote.
        needs_name: refuse an ID that has several names.
        needs_store: fail if there is no store, even if the user named no model.
    """
    from blobstore.store.permissions import name_concerns

    if needs_store:
        store.check_there()
    found = chain.from_iterable(_named(store, text, needs_name=needs_name) for text in texts)
    references = tuple(dict.fromkeys(found))
    show_note(*name_concerns(store, references))
    return references


def _named(store: LocalStore, text: str, *, needs_name: bool) -> Sequence[Reference]:
    """Return the models of the store that a text stands for, or the one of the shared store that it names."""
    from blobstore.store.name_patterns import is_pattern, select_references

    shared = store.shared
    try:
        found = select_references(store, [text], needs_name=needs_name)
    except ModelNotFound as error:
        if shared is None:
            raise
        found = select_references(shared, [text], needs_name=needs_name)
        has = f"the shared store {quote(shared.root)} has {quote(found[0])}"
        raise ModelNotFound(
            error.message, advice=f"{has}; a glob stands for models of the store itself"
        ) from None
    if is_pattern(text):
        click.get_current_context().meta.setdefault(MATCHED_KEY, set()).update(map(str, found))
    if shared is None or store.has_model(found[0]):
        return found
    return select_references(shared, [text], needs_name=needs_name)  # perhaps the ID of a model


def note_states(store: LocalStore, names: Iterable[Reference]) -> None:
    """Note the states of training steps of which the user has named the model alone."""
    from blobstore.manifests.step_record import is_state, state_of

    with contextlib.suppress(InvalidReference):  # the name of a state would be too long
        states = [state_of(name) for name in names if not is_state(name)]
        left = [quote(one) for one in states if one not in names and is_name(str(one), store)]
        if left:
            show_note(
                f"not included: {join_some(left, _MAX_LISTED)}, the state of a training, which has a name of its own"
            )


def model(store: LocalStore, text: str, *, needs_name: bool = False) -> Reference:
    """Return the one model that the user named, as :func:`models` does."""
    found = models(store, [text], needs_name=needs_name)
    if len(found) > 1:
        listed = join_some([quote(name) for name in found], _MAX_LISTED)
        raise UsageError(f"{quote(text)} matches {len(found)} models: {listed}; name one")
    return found[0]


def is_many(store: LocalStore, text: str) -> bool:
    """Return whether a text is a glob that several models match."""
    from blobstore.store.name_patterns import is_pattern, select_references

    return is_pattern(text) and len(select_references(store, [text])) > 1


def model_or_address(store: LocalStore, text: str) -> Reference | str:
    """Return the address of a model in a registry unchanged, and otherwise do as :func:`model`."""
    from blobstore.remotes.addresses import is_address

    return text if is_address(text) else model(store, text)


def model_or_gguf(store: LocalStore, text: str) -> Reference | str:
    """Return the path of a GGUF file unchanged, and otherwise do as :func:`model`."""
    from blobstore.store.outside_gguf import is_gguf_path

    if is_gguf_path(text, store.has_model):
        return text
    MODEL.convert(text, None, None)
    return model(store, text)


def path_advice(text: str) -> str:
    """Return how to import a path that was taken for a name; empty for other texts."""
    is_meant = text.startswith(("/", "./", "../", "~")) or os.path.exists(text)  # noqa: PTH110 - as below
    if is_meant and os.path.isdir(text):  # noqa: PTH112 - as below
        return (
            "'blobstore create PATH NAME' imports what a path names, and "
            "'blobstore create --all --dry-run PATH' lists the models of a folder"
        )
    return "'blobstore create PATH NAME' imports what a path names" if is_meant else ""


def is_path(name: str, store: LocalStore) -> bool:
    """Return whether a text is the path of a file or folder, and not the name of a model."""
    if name.startswith(("/", ".", "~")) or name.endswith((".safetensors", ".bsar")):
        return True
    try:
        if not os.path.exists(name):  # noqa: PTH110 - pathlib loads urllib
            return False
        store.holder(name).read_manifest(name)
    except (InvalidReference, ModelNotFound):
        return True
    except (BlobstoreError, OSError, ValueError):  # using the name reports it
        return False
    return False


def glob_advice(text: str, *, has_near: bool) -> str:
    """Return advice with the glob that finds names which contain ``text``, or an empty string."""
    return f"'*{text}*' matches names that contain it" if has_near and text.isprintable() else ""


def is_name(text: str, store: LocalStore) -> bool:
    """Return whether a text is the name of a model of the store."""
    try:
        return store.holder(text).has_model(text)
    except InvalidReference:
        return False


def shown_path_advice(text: str) -> str:
    """Return how to look at a path that was taken for a name; empty for other texts."""
    return "'blobstore show PATH' shows what a path names" if os.path.exists(text) else ""  # noqa: PTH110 - as above


def address_advice(text: str) -> str:
    """Return how to write the address of a registry that was taken for a name; empty for other texts."""
    from blobstore.registry.reference import is_host

    host, slash, _ = text.partition("/")
    return f"if it is in a registry, write 'oci://{text}'" if slash and is_host(host) else ""


def check_remote(text: str, store: LocalStore, *, is_all: bool) -> None:
    """Check that a text names a place of models, and not a model alone; what is wrong with a place is not seen here.

    With ``is_all``, the place may be a whole registry.

    Raises:
        InvalidReference: it is the name of a model, or the address of something other than a registry.
    """
    from blobstore.manifests.reference import Reference
    from blobstore.registry.reference import check_host, is_host
    from blobstore.store.name_patterns import is_pattern
    from blobstore.store.used_remotes import used_remotes

    host, slash, path = text.partition("/")
    if scheme_of(text) in {HUB, OLLAMA} or text.startswith(f"{HUB}:"):
        what, advice = "is not the address of a registry", advice_for(text, "source")
    elif scheme_of(text) or is_pattern(text) or (slash and is_host(host)):
        return
    else:
        with contextlib.suppress(InvalidReference):
            if is_all and is_host(text):
                check_host(text)
                return
        try:
            name = Reference.parse(text)
        except InvalidReference:
            return  # using it reports what an address is
        what = "does not say where the model is"
        spelled = str(name)
        if not spelled.startswith(f"{name.host}/"):
            spelled = f"{name.host}/{spelled}"
        hub = f"{name.namespace if path else 'ORG'}/{name.model}"
        used = [place for place in used_remotes(store) if f"/{text}:" in f"{place}:"]
        advice = question(used[:2]) or (
            f"give an address such as oci://{spelled.lower()}, or import it with "
            f"{cli_command('create', f'hf://{hub}', 'NAME')}"
        )
    raise InvalidReference(f"{quote_url(text)} {what}", advice=advice)


def store_notes(store: LocalStore) -> list[str]:
    """Return a remark about a store that has nothing: it does not exist yet.

    Raises:
        NotFound: the user named the store, and it is not there; or the folder is that of something else.
    """
    root, parts = store.root, ("blobs", "manifests", ".blobstore")
    store.check_root()
    if not root.exists():
        if _is_named():
            raise _no_store(store)
        return [f"there is no store at {root} yet"]
    if any((root / part).exists() for part in parts) or not any(root.iterdir()):
        return []
    raise NotFound(
        f"there is no store at {quote(root)}, but other files",
        advice="'blobstore show PATH' shows models in folders, and 'blobstore create --all PATH' imports them",
    )


def _no_store(store: LocalStore) -> NotFound:
    from blobstore.store.manifests import NO_STORE

    return NotFound(f"there is no store at {quote(store.root)}", advice=NO_STORE)


def _is_named() -> bool:
    """Return whether the command line names the store."""
    ctx = click.get_current_context()
    return STORE_KEY in ctx.meta or ctx.get_parameter_source("store") is ParameterSource.COMMANDLINE
