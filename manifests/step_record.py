"""The file of a training step that has its state: where its tensors are, and all other values.

It is JSON, described in docs/reference/format.md: the state as :mod:`blobstore.manifests.plain_values` writes it, with
the names of tensors in the places of tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.plain_values import Writers, decode, depth_checked, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference

RECORD_FILE: Final = "training_state.json"
METRICS_FILE: Final = "metrics.json"
STATE: Final = ".state"
"""The end of the tag of the name that has all of a step."""
_VERSION: Final = 1
_MAX_KEYS: Final = 100
"""Keys that lead to a value: more would be a state that no program can load."""
_DICTS: Final = (dict, OrderedDict, Counter)

Path = tuple[str | int, ...]


class StoredName(str):
    """The name of a tensor in the store, in the place of the tensor in a state."""

    __slots__ = ()


def encode_state(state: Any, writers: Writers = MappingProxyType({})) -> bytes:
    """Return the content of the file for a state with a :class:`StoredName` for each tensor.

    Raises:
        UnsupportedSource: a value is not plain.
        UsageError: the state is nested too deeply.
    """
    with depth_checked():
        content = encode(state, "", {**writers, StoredName: ("tensor", str)})
        value = {"version": _VERSION, "state": content}
        return strict_json.dumps(value).encode()


def decode_state(data: bytes, tensors: Mapping[str, Any]) -> Any:
    """Return the state that a file has, which is not trusted, with the tensors that have the names in it.

    Raises:
        BlobDamaged: it is malformed, or does not have just these tensors.
    """
    try:
        return _decoded(strict_json.loads(data), tensors)
    except (ValueError, RecursionError) as error:
        raise BlobDamaged(f"{RECORD_FILE} is not the state of a step: {quote(error)}") from None


def _decoded(value: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the state. Raises ValueError."""
    found = set()

    def named(name: str) -> Any:
        found.add(name)
        return tensors[name]

    match value:
        case {"version": 1, "state": content}:
            state = decode(content, {"tensor": named})
        case {"version": int(version)} if version > _VERSION:
            raise ValueError(f"version {version} is newer than this program")
        case _:
            raise ValueError(str(value)[:80])
    if type(state) not in _DICTS:
        raise ValueError(f"it is a {type(state).__name__}")
    if missing := tensors.keys() - found:
        raise ValueError(f"it has no tensor {quote(min(missing))}")
    return state


def take_tensors(
    state: Mapping[Any, Any], is_tensor: Callable[[Any], bool], model: str
) -> tuple[Any, dict[str, Any]]:
    """Return a state with a :class:`StoredName` for each tensor, and the tensors by key.

    Keys are those of ``torch.distributed.checkpoint``; ``model`` is the part of the state that is the model.

    Raises:
        UsageError: two values would have one key, or the state is nested too deeply.
    """
    tensors: dict[str, Any] = {}
    keys: set[str] = set()

    def visit(value: Any, path: tuple[Any, ...]) -> Any:
        key, kind = _key(path), type(value)
        if kind in _DICTS:
            return kind({name: visit(one, (*path, name)) for name, one in value.items()})
        if kind in (list, tuple):  # of which a random state has many numbers
            parts = enumerate(value)
            return kind(
                [one if type(one) is int else visit(one, (*path, index)) for index, one in parts]
            )
        if key in keys:
            raise UsageError(
                f"two values of the state would have the key {quote(key)}",
                advice="rename one of them",
            )
        keys.add(key)
        if not is_tensor(value):
            return value
        tensors[key] = value
        return StoredName(stored_name(key, model))

    with depth_checked():
        return visit(state if type(state) in _DICTS else dict(state), ()), tensors


def nested(values: Sequence[tuple[Path, Any]], before: Path = ()) -> Any:
    """Return the dicts and lists through which paths lead to values.

    The planner of torch forgets empty parts. A list without some of its parts becomes a dict. ``before`` leads to all.

    Raises:
        UsageError: a path leads through a value or to two, or is too long.
    """
    parts: dict[str | int, list[tuple[Path, Any]]] = {}
    for path, value in values:
        if not path and len(values) == 1:
            return value
        if not path:
            raise UsageError(f"the key {quote(_key(before))} of the state leads to two values")
        _key(path)
        parts.setdefault(path[0], []).append((path[1:], value))
    found = {name: nested(its, (*before, name)) for name, its in parts.items()}
    if found and found.keys() == set(range(len(found))):
        return [found[index] for index in range(len(found))]
    return found


def _key(path: tuple[Any, ...]) -> str:
    key = ".".join(map(str, path))
    if len(path) > _MAX_KEYS:
        raise UsageError(f"the key {quote(key)} has over {_MAX_KEYS} parts")
    return key


def state_of(reference: Reference) -> Reference:
    """Return the name that has all of a step."""
    return replace(reference, tag=f"{reference.tag}{STATE}")


def is_state(reference: Reference) -> bool:
    """Return whether a name is that of all of a step."""
    return reference.tag.endswith(STATE)  # no tag begins with a dot


def step_of(reference: Reference) -> Reference:
    """Return the name of the step that a name belongs to."""
    return replace(reference, tag=reference.tag.removesuffix(STATE))


def is_state_of(state: Manifest, model: Manifest) -> bool:
    """Return whether a state has the tensors of a model. If not, one of the two was replaced without the other."""
    own, every = (
        {layer.digest for layer in its.layers_of(media_types.TENSOR)} for its in (model, state)
    )
    return own <= every


def stored_name(key: str, model: str) -> str:
    """Return the name that a tensor has in the store: those of the model are called as in the model."""
    return key.removeprefix(f"{model}.") if model else key
