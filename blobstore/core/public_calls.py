"""What callers from other libraries guess wrong: names of functions, and names, places and types of arguments.

Such a call is an error in one line with the right spelling. A call that is right costs nothing more.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import TYPE_CHECKING, Any, Final

from blobstore import errors
from blobstore.core.argument_types import wrong_type
from blobstore.core.escape import most_like, question, quote
from blobstore.core.synonyms import ALIASES, COMMANDS
from blobstore.errors import InvalidCall, InvalidReference

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

SHORT: Final = {**ALIASES, "cat": "read_file", "cp": "copy", "mv": "rename", "rm": "remove"}
"""The functions that the short names of commands stand for in Python, too."""
FUNCTIONS: Final = {**SHORT, "serve": "start_server", "tag": "copy"}
"""The functions of the commands that have another name."""
_NAMES: Final = {
    **dict.fromkeys(("load", "from_pretrained", "get", "resolve"), "open"),
    **dict.fromkeys(("snapshot_download", "hf_hub_download"), "create"),
    **dict.fromkeys(("save", "save_pretrained", "dump"), "save"),
    "safe_open": "safetensors.safe_open",
    **{name: f"safetensors.torch.{name}" for name in ("load_file", "save_file")},
    **dict.fromkeys(("Store", "Blobstore"), "LocalStore"),
    **dict.fromkeys(("exists", "has"), "LocalStore().has_model"),
}
"""What other libraries call our functions, where the command line has other names or none."""
_ARGUMENTS: Final = {
    **dict.fromkeys(
        ("name", "names", "model", "repo_id", "tag"), ("reference", "references", "target")
    ),
    **dict.fromkeys(
        ("path", "out", "output", "dest", "dst", "dir", "output_dir", "local_dir"),
        ("folder", "path", "target"),
    ),
    **dict.fromkeys(("root", "home", "cache_dir", "store_path"), ("store",)),
    **dict.fromkeys(("state_dict", "model_state"), ("tensors",)),
    **dict.fromkeys(("threads", "workers", "max_workers", "n_jobs"), ("jobs",)),
    **dict.fromkeys(("exist_ok", "replace", "overwrite"), ("force",)),
    **dict.fromkeys(("src", "url", "address"), ("source", "remote")),
    **dict.fromkeys(("as_", "namespace"), ("prefix",)),
    "callback": ("progress",),
}
"""What other libraries call our arguments; the first that a function has is meant."""
_REPLACING: Final = {"create", "create_all", "save"}
"""Functions that need no permission to replace."""
_ATTRIBUTES: Final = {
    **dict.fromkeys(("size", "bytes"), "nbytes"),
    **dict.fromkeys(("id", "hash", "sha256"), "digest"),
    **dict.fromkeys(("shapes", "dtypes", "shape", "dtype", "info"), "specs"),
}
"""What other libraries call the attributes of a model."""


def no_attribute(owner: object, name: str, functions: Collection[str] = ()) -> AttributeError:
    """Return the error of an attribute that an object does not have, with the one that may be meant.

    Those of a store may also be ``functions``, which take a store.
    """
    public = [one for one in dir(owner) if not one.startswith("_")]
    if name.startswith("_"):
        meant: Sequence[str] = ()
    elif found := _function(name, functions):
        meant = [f"blobstore.{found}(…, store=…)"]
    else:
        attribute = _ATTRIBUTES.get(name)
        meant = [attribute] if attribute in public else most_like(name, public, 0.7)
    advice = f"; {question(meant)}" if meant else ""
    text = f"{type(owner).__name__!r} object has no attribute {name!r}{advice}"
    return AttributeError(text, name=name, obj=owner)


def checked_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a public function under its public name, whose wrong calls raise InvalidCall."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except InvalidCall:
            raise
        except (TypeError, AttributeError) as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                if (wrong_argument := wrong_type(function, args, kwargs)) is None:
                    raise  # from inside of the function
                raise wrong_argument from None
            wrong = error
        except InvalidReference as error:
            if len(args) < 2 or not error.message.endswith("is a path"):
                raise
            first, second, *_ = inspect.signature(function).parameters
            raise InvalidReference(
                error.message, advice=f"{name}() takes {first}, then {second}; {error.advice}"
            ) from None
        raise _wrong_call(name, function, args, kwargs, wrong)

    # For help(), and for pickle, which finds the function again by them.
    call.__module__, call.__name__, call.__qualname__ = "blobstore", name, name
    return call


def check_options(function: Callable[..., Any], options: Mapping[str, object], kind: type) -> None:
    """Check that ``**options`` has only keys of a TypedDict. Raises InvalidCall."""
    *own, _ = inspect.signature(function).parameters
    for word in options:
        if word not in kind.__annotations__:
            raise _no_argument(function.__name__, word, (*own, *kind.__annotations__))


def advice_on_name(name: str, public: Collection[str]) -> str:
    """Return which public names may be meant by one that does not exist, as the end of an error."""
    for error in (name, name.removesuffix("Error")):
        if error in vars(errors):
            return f"; {question([f'errors.{error}'])}"
    if found := _function(name, (*public, "safetensors")):
        return f"; {question([found])}"
    near = most_like(name, public, 0.7)
    return f"; {question(near)}" if near else ""


def _function(name: str, public: Collection[str]) -> str:
    """Return the public function that other libraries, or the command line, call ``name``; empty if none."""
    for guess in (name, name.removesuffix("s").removesuffix("_model")):
        found = _NAMES.get(guess) or COMMANDS.get(guess, guess)
        found = FUNCTIONS.get(found, found)
        if found.partition(".")[0].removesuffix("()") in public:
            return found
    return ""


def _no_argument(name: str, word: str, parameters: Collection[str]) -> InvalidCall:
    if name in _REPLACING and "force" in (word, *_ARGUMENTS.get(word, ())):
        advice = "a name that another model has is replaced, and restore() gives it back"
        return InvalidCall(f"{name}() has no argument {quote(word)}", advice=advice)
    meant = [one for one in _ARGUMENTS.get(word, ()) if one in parameters][:1]
    advice = question(meant or most_like(word, parameters, 0.7))
    return InvalidCall(
        f"{name}() has no argument {quote(word)}",
        advice=advice or f"its arguments are {', '.join(parameters)}",
    )


def _wrong_call(
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    error: TypeError | AttributeError,
) -> InvalidCall:
    parameters = inspect.signature(function).parameters
    places = [one.name for one in parameters.values() if one.kind is one.POSITIONAL_OR_KEYWORD]
    for word in kwargs:
        if word not in parameters:
            return _no_argument(name, word, parameters)
    if len(args) > len(places):
        extra = args[len(places)]
        if places == ["references"] and all(
            isinstance(one, str) and one[:1] not in "./~" for one in args
        ):
            return InvalidCall(
                f"{name}() takes several names as one list", advice=f"write {name}({[*args]})"
            )
        is_store = isinstance(extra, os.PathLike) or "Store" in type(extra).__name__
        is_store |= isinstance(extra, str) and "/" in extra
        return InvalidCall(
            f"{name}() takes {len(places) or 'no'} argument{'s' * (len(places) != 1)} without a name, "
            f"got {len(args)}",
            advice=f"write {name}({'…, ' if places else ''}store={extra!r})"
            if is_store and "store" in parameters
            else f"name the others: {', '.join(one for one in parameters if one not in places)}",
        )
    return InvalidCall(f"{name}() {str(error).partition('() ')[2]}")
