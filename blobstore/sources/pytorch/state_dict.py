"""Which of a checkpoint's tensors are the model, and what they are called."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.errors import CheckpointRefused, UsageError
from blobstore.sources.unpickler.globals import Use
from blobstore.sources.unpickler.values import Items, Key, Record, Reduced

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.sources.unpickler.machine import Result

    Part = str | int | Key
    Path = tuple[Part, ...]

EVERYTHING: Final = "."
"""The subtree that is all of a checkpoint."""
_MODEL_KEYS = (
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "ema_state_dict",
    "model_ema",
    "ema_model",
    "params_ema",
    "ema",
)
"""What training programs call the model, the likeliest first."""
_INNER_KEYS = _MODEL_KEYS[:3]
"""Those that name nothing else, so that they are followed further down too."""
_TRAINING = re.compile(
    r"optim|(lr_?)?schedul|(grad_?)?scaler|amp$|rng|random|callbacks|loops|criterion$|loss",
    re.IGNORECASE,
)
"""Beginnings of the keys of what training needs beside the model."""
_MAX_DEPTH = 64
MAX_TENSORS: Final = 1 << 18
"""Tensors of a checkpoint, its optimizer's included; the largest models have a third of that."""
_MAX_LETTERS = 64 * 2**20
"""Characters of the names of all tensors: the keys above many can be long."""
_MAX_CONTAINERS = 1 << 21
_SPARE_STEPS = 10_000
_SHOWN = 8
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, tuple, Items, Record)


class Tree(NamedTuple):
    """What a checkpoint holds."""

    tensors: Sequence[tuple[Path, Reduced]]
    """With the keys that lead to each."""
    others: Counter[str]
    """Values that are no tensors: how many below each of the outermost keys."""
    is_module: bool
    """Whether it is a whole module, all of which is the model."""


class Choice(NamedTuple):
    """The tensors that are read."""

    tensors: Mapping[str, Reduced]
    """By their names: the keys below the model's, joined with dots."""
    notices: list[str]
    """What is left out."""


class Subtree(NamedTuple):
    """A part of a checkpoint, as a person can choose it."""

    path: str
    tensors: int


def walk(result: Result, size: int) -> Tree:
    """Find all tensors of a pickle of ``size`` bytes.

    Raises:
        CheckpointRefused: it is nested too deeply, or shares its parts so often that they would be
            many times what was read; or it holds an object of a class that is no plain module.
    """
    check_records(result.records)
    walk = _Walk(size)
    # Paths are made late: a container can be shared as often as the limits allow.
    walk.todo.append(((), None, result.value))
    while walk.todo:
        parent, last, value = walk.todo.pop()
        walk.look_at(parent if last is None else (*parent, last), value)
    return Tree(walk.tensors, walk.others, type(result.value) is Record)


class _Walk:
    """A walk through a checkpoint's values, and what is left of its limits."""

    def __init__(self, size: int) -> None:
        self.tensors: list[tuple[Path, Reduced]] = []
        self.others: Counter[str] = Counter()
        self.todo: list[tuple[Path, Part | None, Any]] = []
        # Every value takes a byte of the pickle, unless it is used more than once.
        self._steps = size + min(size * 3, _MAX_CONTAINERS) + _SPARE_STEPS
        self._containers = _MAX_CONTAINERS
        self._letters = _MAX_LETTERS

    def look_at(self, path: Path, value: Any) -> None:
        children = _children(value)
        if children is None:
            if is_tensor(value):
                self.tensors.append((path, value))
            else:
                self.others[_shown(path[:1])] += 1
            return
        if len(path) >= _MAX_DEPTH:
            raise CheckpointRefused(
                f"{quote(_shown(path))} is nested more than {_MAX_DEPTH} levels deep"
            )
        self._take_steps(_width(value))
        inner = self._sort_out(path, children)
        self._check()
        inner.reverse()
        self.todo.extend(inner)

    def _sort_out(
        self, path: Path, children: Iterable[tuple[Part, Any]]
    ) -> list[tuple[Path, Part | None, Any]]:
        """Note a container's tensors and plain values; return its containers."""
        inner: list[tuple[Path, Part | None, Any]] = []
        letters = sum(len(key) for key in path if type(key) is str)
        plain = 0
        for key, child in children:
            if type(child) is Reduced and is_tensor(child):
                self._letters -= letters + (len(key) if type(key) is str else 0)
                self.tensors.append(((*path, key), child))
                if len(self.tensors) > MAX_TENSORS:
                    break
            elif type(child) in _CONTAINERS:
                inner.append((path, key, child))
                if len(inner) > self._containers:
                    break
            elif path:
                plain += 1
            else:
                self.others[_shown((key,))] += 1
        if plain:
            self.others[_shown(path[:1])] += plain
        self._containers -= len(inner)
        return inner

    def _take_steps(self, count: int) -> None:
        self._steps -= count
        if self._steps < 0:
            raise CheckpointRefused(
                "the pickle uses its parts so often that they cannot be told one by one"
            )

    def _check(self) -> None:
        if self._containers < 0:
            message = f"the pickle has more than {_MAX_CONTAINERS} lists, tuples and dicts"
        elif self._letters < 0:
            message = f"the names of its tensors are more than {_MAX_LETTERS} characters"
        elif len(self.tensors) > MAX_TENSORS:
            message = f"the checkpoint has more than {MAX_TENSORS} tensors"
        else:
            return
        raise CheckpointRefused(message)


def is_tensor(value: Any) -> bool:
    """Tell whether a value is a tensor, of whatever kind."""
    return type(value) is Reduced and value.function.use in (Use.TENSOR, Use.UNREADABLE)


def check_records(records: Iterable[Record]) -> None:
    """Check that objects of unknown classes are modules, whose tensors can be told without them.

    Raises:
        CheckpointRefused: one is not.
    """
    odd = [record for record in records if not _is_module(record)]
    if odd:
        names = sorted({str(record.cls) for record in odd})
        raise CheckpointRefused(
            f"pickle byte {odd[0].offset}: it holds objects of "
            f"{', '.join(map(quote, names[:_SHOWN]))}, which only their own code could read; save "
            "the model's state_dict() instead"
        )


def find_state_dict(tree: Tree, subtree: str | None) -> Choice:
    """Choose the tensors of the model, or those below the keys of ``subtree``.

    Raises:
        UsageError: there is no such ``subtree``, or two.
        CheckpointRefused: a key is no text and no number, or two tensors get one name.
    """
    if subtree is None:
        prefix = () if tree.is_module else _likeliest(tree)
    else:
        prefix = () if subtree == EVERYTHING else _named(tree, subtree)
    # Beside a model's own keys there can be an optimizer's.
    skips_training = subtree is None and not prefix and not tree.is_module
    depth = len(prefix)
    chosen: dict[str, Reduced] = {}
    left: Counter[str] = Counter()
    for path, value in tree.tensors:
        if path[:depth] != prefix:
            left[_shown(_branch(path, prefix))] += 1
        elif skips_training and len(path) > 1 and _is_training(path[0]):
            left[_shown(path[:1])] += 1
        else:
            name = path[depth] if len(path) == depth + 1 else None
            if type(name) is not str:
                name = _joined(path, depth)
            if name in chosen:
                raise CheckpointRefused(f"two tensors would be called {quote(name)}")
            chosen[name] = value
    return Choice(chosen, list(_notices(left, tree.others if subtree != EVERYTHING else {})))


def subtrees(paths: Iterable[Path]) -> list[Subtree]:
    """Return the parts that hold the tensors at ``paths``, everything first."""
    counts: Counter[str] = Counter()
    for path in paths:
        for end in range(len(path)):
            counts[_shown(path[:end]) or EVERYTHING] += 1
    return [Subtree(path, count) for path, count in counts.items()]


def _children(value: Any) -> Iterable[tuple[Part, Any]] | None:
    """Return keys and values of a container, None for anything else."""
    if type(value) is dict:
        return value.items()
    if type(value) in (list, tuple):
        return enumerate(value)
    if type(value) is Items:
        return enumerate(value.items)
    if type(value) is Record and _is_module(value):
        return _parts_of_module(value)
    return None


def _width(value: Any) -> int:
    """Return how many values have to be looked at for the children of a container."""
    if type(value) is Items:
        return len(value.items)
    if type(value) is not Record:
        return len(value)
    parts = sum(len(value.state[part]) for part in _MODULE_PARTS)
    return parts + len(_hidden(value))


def _is_module(record: Record) -> bool:
    """Tell whether a record has what every ``torch.nn.Module`` has, and nothing more to it."""
    state = record.state
    return (
        type(state) is dict
        and not record.entries
        and not record.arguments
        and all(type(state.get(part)) is dict for part in _MODULE_PARTS)
    )


def _parts_of_module(record: Record) -> Iterator[tuple[Part, Any]]:
    """Yield what the module's ``state_dict()`` would hold."""
    names = set(filter(_is_text, _hidden(record)))
    for part in _MODULE_PARTS:
        for key, value in record.state[part].items():
            if value is not None and not (part == "_buffers" and key in names):
                yield key, value


def _hidden(record: Record) -> Sequence[Any]:
    """Return the names of a module's buffers that its ``state_dict()`` would not hold."""
    names = record.state.get("_non_persistent_buffers_set")
    return names.items if type(names) is Items else ()


def _is_text(value: Any) -> bool:
    return type(value) is str


def _likeliest(tree: Tree) -> Path:
    prefix: Path = ()
    keys: Sequence[str] = _MODEL_KEYS
    while True:
        heads = {}
        for path, value in tree.tensors:
            if path[: len(prefix)] == prefix:
                if len(path) > len(prefix) + 1:
                    heads[path[len(prefix)]] = True
                elif not _is_aside(path, value):  # this level is the model's
                    return prefix
        found = next((key for key in keys if key in heads), None)
        if found is None:
            return prefix
        prefix = (*prefix, found)
        keys = _INNER_KEYS


def _is_aside(path: Path, value: Reduced) -> bool:
    """Tell whether a tensor can be beside a model: a score, say, or the state of a generator."""
    return value.arguments[2:3] in (((),), ((1,),)) or any(map(_is_training, path[-1:]))


def _named(tree: Tree, subtree: str) -> Path:
    found = {
        path[:end]
        for path, _ in tree.tensors
        for end in range(1, len(path))
        if _shown(path[:end]) == subtree
    }
    if len(found) == 1:
        return found.pop()
    if found:
        raise UsageError(f"subtree {quote(subtree)} can mean {len(found)} parts of the checkpoint")
    listed = [item.path for item in subtrees(path for path, _ in tree.tensors)]
    raise UsageError(
        f"there is no subtree {quote(subtree)} with tensors; there are "
        f"{', '.join(map(quote, listed[:_SHOWN]))}{', …' if len(listed) > _SHOWN else ''}"
    )


def _is_training(key: Part) -> bool:
    return type(key) is str and _TRAINING.match(key) is not None


def _notices(left: Mapping[str, int], others: Mapping[str, int]) -> Iterator[str]:
    if left:
        parts = [f"{quote(key)} ({count} tensors)" for key, count in left.items()]
        yield f"left out: {_some(parts)}; choose another part with --subtree"
    if others:
        parts = [quote(key) for key in others]
        yield f"left out: {sum(others.values())} values that are no tensors, in {_some(parts)}"


def _branch(path: Path, prefix: Path) -> Path:
    """Return the keys to where a path turns off the way to ``prefix``."""
    for end, (key, other) in enumerate(zip(path, prefix, strict=False), 1):
        if key != other:
            return path[:end]
    return path


def _some(parts: Sequence[str]) -> str:
    shown = ", ".join(parts[:_SHOWN])
    return f"{shown} and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else shown


def _joined(path: Path, depth: int) -> str:
    keys = path[depth:]
    if not keys:
        return "tensor"  # the checkpoint is a single tensor
    for key in keys:
        if type(key) is Key:
            raise CheckpointRefused(
                f"there is a tensor at {quote(_shown(path))}, with a key that is not text"
            )
    return ".".join(map(str, keys))


def _shown(path: Path) -> str:
    return ".".join("?" if type(key) is Key else str(key) for key in path)
