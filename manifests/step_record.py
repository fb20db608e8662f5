"""The file of a training step that says what its tensors are called in the program, and has its other values.

It is JSON, described in docs/reference/format.md. Values are those of :mod:`blobstore.manifests.plain_values`. Keys
and paths are those of ``torch.distributed.checkpoint``, which knows lists, and dicts with texts as keys. The record says
of other containers what they are.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged, UsageError
from blobstore.manifests import media_types
from blobstore.manifests.plain_values import decode, depth_checked, encode, is_unicode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.manifests.plain_values import Kind
    from blobstore.manifests.reference import Reference

    Kinds = Mapping[type, tuple[str, Kind]]

RECORD_FILE: Final = "training_state.json"
METRICS_FILE: Final = "metrics.json"
STATE: Final = ".state"
"""The end of the tag of the name that has all of a step."""
_VERSION: Final = 1
_MAX_KEYS: Final = 100
"""Keys that lead to a value: more would be a state that no program can load."""
_DICTS: Final = (dict, OrderedDict, Counter)

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The state of a training program: its tensors by key, and its other values."""

    model: str
    """The part of the state whose tensors are stored under their own names; may be empty."""
    tensors: Mapping[str, Path]
    """The keys of tensors, and the keys of the nested dicts and lists which lead there."""
    values: Mapping[str, tuple[Path, Any]]
    """The same of values, and these as JSON."""
    containers: Mapping[Path, Any] = field(default_factory=dict)
    """Containers that are not lists or dicts with texts as keys, or are empty: by their paths, with None for each value."""

    def __post_init__(self) -> None:
        """Check what the record has. Raises UsageError."""
        if type(self.model) is not str:
            raise UsageError(f"model is the key of a part of the state, got {quote(self.model)}")
        for path in (
            *self.tensors.values(),
            *(path for path, _ in self.values.values()),
            *self.containers,
        ):
            key = ".".join(map(str, path))
            if len(path) > _MAX_KEYS or not is_unicode(key):
                raise UsageError(
                    f"the key {quote(key)} has over {_MAX_KEYS} parts, or is not Unicode"
                )

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        value = {
            "version": _VERSION,
            "model": self.model,
            "tensors": {key: list(path) for key, path in sorted(self.tensors.items())},
            "values": {
                key: {"path": list(path), "value": value}
                for key, (path, value) in sorted(self.values.items())
            },
        }
        if self.containers:
            value["containers"] = [
                {"path": list(path), "value": value}
                for path, value in sorted(self.containers.items(), key=str)
            ]
        return strict_json.dumps(value).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> StepRecord:
        """Return the record in the content of a file, which is not trusted.

        Raises:
            BlobDamaged: it is malformed.
        """
        try:
            value = strict_json.loads(data)
        except ValueError as error:
            raise BlobDamaged(f"{RECORD_FILE}: {error}") from None
        match value:
            case {
                "version": 1,
                "model": str(model),
                "tensors": dict(tensors),
                "values": dict(values),
            }:
                try:
                    return cls(
                        model=model,
                        tensors={key: _path(path) for key, path in tensors.items()},
                        values={
                            key: (_path(item["path"]), item["value"])
                            for key, item in values.items()
                        },
                        containers={
                            _path(item["path"], at_root=True): item["value"]
                            for item in value.get("containers", ())
                        },
                    )
                except (KeyError, TypeError, ValueError):
                    pass
            case {"version": int(version)} if version > _VERSION:
                raise BlobDamaged(
                    f"{RECORD_FILE} has version {version}, which is newer than this program"
                )
        raise BlobDamaged(f"{RECORD_FILE} is not the record of a step: {quote(str(value)[:80])}")


class FlatState:
    """The tensors of a state by key, and the record of everything else."""

    def __init__(
        self, state: Mapping[Any, Any], is_tensor: Callable[[Any], bool], kinds: Kinds, model: str
    ) -> None:
        """Take a state apart, whose part ``model`` is the model.

        Raises:
            UnsupportedSource: a value is not plain.
            UsageError: two values would have one key, or the state is nested too deeply.
        """
        self._is_tensor, self._kinds = is_tensor, kinds
        self._paths: dict[str, Path] = {}
        self._values: dict[str, tuple[Path, Any]] = {}
        self._containers: dict[Path, Any] = {}
        self._seen: set[Path] = set()
        self.tensors: dict[str, Any] = {}
        with depth_checked():
            self._visit(state if type(state) in _DICTS else dict(state), ())
        self.record = StepRecord(
            model=model, tensors=self._paths, values=self._values, containers=self._containers
        )

    def _visit(self, value: Any, path: Path) -> None:
        key = ".".join(map(str, path))
        is_leaf = path and (self._is_tensor(value) or self._is_whole(value))
        is_known = is_leaf and (key in self._paths or key in self._values)
        if is_known or path in self._seen:  # 1 and "1" are one part of a path
            raise UsageError(
                f"two values of the state would have the key {quote(key)}",
                advice="rename one of them",
            )
        self._seen.add(path)
        if is_leaf:
            if self._is_tensor(value):
                self.tensors[key], self._paths[key] = value, path
            else:
                self._values[key] = path, encode(value, key, self._kinds)
            return
        if type(value) in (list, tuple):
            shell: Any = type(value)([None] * len(value))
            is_plain = type(value) is list
            parts: list[tuple[str | int, Any]] = list(enumerate(value))
        else:
            shell = type(value)(dict.fromkeys(value))
            is_plain = type(value) is dict and all(type(name) is str for name in value)
            parts = [(str(name), one) for name, one in value.items()]
            if not all(map(_is_ordered, value)):
                raise UsageError(
                    f"a key in {quote(key)} is a set, which is printed in any order",
                    advice="make a tuple of it",
                )
        if not is_plain or not parts:
            self._containers[path] = encode(shell, key, self._kinds)
        for name, one in parts:
            self._visit(one, (*path, name))

    def _is_whole(self, value: Any) -> bool:
        """Return whether a value is not taken apart: those that torch keeps whole, and have no tensors."""
        if type(value) is list:
            return all(not self._is_tensor(one) and self._is_whole(one) for one in value)
        return type(value) not in _DICTS and not (type(value) is tuple and self._has_tensor(value))

    def _has_tensor(self, value: Any) -> bool:
        if type(value) in (*_DICTS, list, tuple):
            parts = value if type(value) in (list, tuple) else value.values()
            return any(map(self._has_tensor, parts))
        return self._is_tensor(value)


def _is_ordered(key: Any) -> bool:
    """Return whether a key is printed in the same way in each process."""
    return type(key) is not frozenset and (type(key) is not tuple or all(map(_is_ordered, key)))


class _Branch(dict["str | int", Any]):
    """What a container has, by the last items of paths."""

    shell: Any = None
    """The container with None for each value, if it is not one that torch knows."""


def join(record: StepRecord, tensors: Mapping[str, Any], kinds: Kinds) -> Any:
    """Return the state that was taken apart; the record is not trusted.

    Raises:
        BlobDamaged: the record does not fit the tensors, or itself.
    """
    root = _Branch()
    try:
        for path, shell in record.containers.items():
            _branch(root, path).shell = decode(shell, kinds)
        for key, path in record.tensors.items():
            _put(root, path, tensors[key])
        for path, value in record.values.values():
            _put(root, path, decode(value, kinds))
        state = _joined(root)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BlobDamaged(f"{RECORD_FILE} does not describe a state: {quote(error)}") from None
    if type(state) not in _DICTS:
        raise BlobDamaged(f"{RECORD_FILE} describes a {type(state).__name__}, and no state")
    return state


def _branch(root: _Branch, path: Path) -> _Branch:
    for name in path:
        root = root.setdefault(name, _Branch())
        if type(root) is not _Branch:
            raise ValueError(f"{path} is in a value")
    return root


def _put(root: _Branch, path: Path, value: Any) -> None:
    if _branch(root, path[:-1]).setdefault(path[-1], value) is not value:
        raise ValueError(f"{path} occurs twice")


def _joined(value: Any) -> Any:
    if type(value) is not _Branch:
        return value
    parts = {name: _joined(one) for name, one in value.items()}
    shell = value.shell
    if shell is None and any(type(name) is int for name in parts):
        shell = [None] * len(parts)
    if shell is None:
        return parts
    if len(shell) != len(parts):
        raise ValueError(f"{len(parts)} values where there are {len(shell)}")
    if type(shell) in (list, tuple):
        return type(shell)(parts[index] for index in range(len(shell)))
    if type(shell) not in _DICTS:
        raise ValueError(f"a {type(shell).__name__} has values")
    return type(shell)({name: parts[str(name)] for name in shell})


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


def is_of_model(key: str, model: str) -> bool:
    """Return whether a tensor belongs to the model."""
    return bool(model) and key.startswith(f"{model}.")


def _path(value: Any, *, at_root: bool = False) -> Path:
    is_path = isinstance(value, list) and all(type(key) in (str, int) for key in value)
    if not (is_path and (value or at_root)):
        raise ValueError("not a path")
    return tuple(value)
