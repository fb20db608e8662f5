"""Finds the tensors of the model in a checkpoint, and their names."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import join_some, quote
from blobstore.errors import CheckpointUnsupported, UsageError
from blobstore.unpickler.values import Global, Items, Key, Record, Reduced, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import Final

    from blobstore.unpickler.machine import Result

    Part = str | int | Key
    Path = tuple[Part, ...]

EVERYTHING: Final = "."
"""The subtree that is the whole checkpoint."""
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
"""The keys that training programs use for the model, the most likely first."""
_INNER_KEYS = _MODEL_KEYS[:3]
"""Keys that name nothing else, and so are followed on deeper levels too."""
_TRAINING = re.compile(
    r"(chained_\d+\.)?optim|(lr_?)?schedul|(grad_?)?scaler|amp$|rng|random|callbacks|loops|criterion$|loss",
    re.IGNORECASE,
)
"""Prefixes of the keys that training programs use for other state. Megatron-Core numbers several optimizers."""
_SCALARS = (((),), ((1,),))
"""The sizes of tensors that can be next to a model, such as a score."""
_MAX_DEPTH = 64
MAX_TENSORS: Final = 1 << 18
"""Tensors of a checkpoint, including the optimizer. The largest models have a third of that."""
_MAX_LETTERS = 64 * 2**20
"""Characters of the names of all tensors, including the keys above them."""
_MAX_CONTAINERS = 1 << 21
_SPARE_STEPS = 10_000
_SHOWN = 8
_MODULE_PARTS = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (dict, list, tuple, Items, Record)


class Tree(NamedTuple):
    """The contents of a checkpoint."""

    tensors: Sequence[tuple[Path, Any]]
    """The tensors, with the keys that lead to them."""
    is_module: bool
    """Whether it is a complete module: all of it is the model."""
    unknown: Sequence[tuple[Path, Global]] = ()
    """The objects of unknown globals, with the keys that lead to them; empty if they were checked
    before."""
    is_scalar: Callable[[Any], bool] = lambda value: value.arguments[2:3] in _SCALARS
    """Whether a tensor can be next to a model without being a part of it."""


class HasUnknownObjects(CheckpointUnsupported):
    """A checkpoint, or the chosen part of it, has objects that only their own code can read."""

    def __init__(
        self,
        message: str = "",
        *,
        advice: str | Callable[[], str] = "",
        subtrees: Sequence[Subtree] = (),
    ) -> None:
        super().__init__(message, advice=advice)
        self.subtrees = subtrees
        """The parts without such objects."""


class Choice(NamedTuple):
    """The chosen tensors."""

    tensors: Mapping[str, Any]
    """The tensors by name: their keys below the model, joined by dots."""
    notices: list[str]
    """Remarks about the tensors that are left out."""


class Subtree(NamedTuple):
    """A part of a checkpoint that users can choose."""

    path: str
    tensors: int
    nbytes: int | None = None
    """Bytes of its tensors, if they are known."""


def find_tensors(result: Result, size: int, *, is_part: bool = False) -> Tree:
    """Find all tensors of a pickle of ``size`` bytes.

    With ``is_part``, only a part of the tensors is wanted, and unknown objects are no error here.

    Raises:
        CheckpointUnsupported: it is nested too deeply, shares its parts so often that reading them would
            take too long, or has an object of a class that is not a plain module.
    """
    if not is_part:
        check_records(result.records)
    walk = _Walk(size)
    # Paths are made late, because a container can be shared as often as the limits allow.
    walk.todo.append(((), None, result.value))
    while walk.todo:
        parent, last, value = walk.todo.pop()
        walk.visit(parent if last is None else (*parent, last), value)
    return Tree(walk.tensors, type(result.value) is Record, walk.unknown if is_part else ())


class _Walk:
    """A walk over the values of a checkpoint, with its remaining limits."""

    def __init__(self, size: int) -> None:
        self.tensors: list[tuple[Path, Reduced]] = []
        self.unknown: list[tuple[Path, Global]] = []
        self.todo: list[tuple[Path, Part | None, Any]] = []
        # Every value needs a byte of the pickle, unless it is shared.
        self._steps = size + min(size * 3, _MAX_CONTAINERS) + _SPARE_STEPS
        self._containers = _MAX_CONTAINERS
        self._letters = _MAX_LETTERS

    def visit(self, path: Path, value: Any) -> None:
        children = _children(value)
        if children is None:
            if is_tensor(value):
                self.tensors.append((path, value))
            else:
                self._note_unknown(path, value)
            return
        if len(path) >= _MAX_DEPTH:
            raise CheckpointUnsupported(
                f"{quote(_shown(path))} is nested more than {_MAX_DEPTH} levels deep"
            )
        width, items = children
        self._steps -= width
        if self._steps < 0:
            raise CheckpointUnsupported(
                "the pickle shares its parts too often to list them one by one"
            )
        inner = self._add_children(path, items)
        if self._containers < 0:
            raise CheckpointUnsupported(
                f"the pickle has more than {_MAX_CONTAINERS} lists, tuples and dicts"
            )
        if self._letters < 0:
            raise CheckpointUnsupported(
                f"the names of its tensors are more than {_MAX_LETTERS} characters"
            )
        if len(self.tensors) > MAX_TENSORS:
            raise CheckpointUnsupported(f"the checkpoint has more than {MAX_TENSORS} tensors")
        inner.reverse()
        self.todo.extend(inner)

    def _add_children(
        self, path: Path, children: Iterable[tuple[Part, Any]]
    ) -> list[tuple[Path, Part | None, Any]]:
        """Add a container's tensors; return its containers."""
        inner: list[tuple[Path, Part | None, Any]] = []
        letters = sum(len(key) for key in path if type(key) is str)
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
            elif type(child) in (Reduced, Global):
                self._note_unknown((*path, key), child)
        self._containers -= len(inner)
        return inner

    def _note_unknown(self, path: Path, value: Reduced | Record | Global) -> None:
        made_by = _global_of(value)
        if made_by is not None and made_by.use is None:
            self._containers -= 1
            self.unknown.append((path, made_by))


def _global_of(value: Any) -> Global | None:
    """Return the global that a record or a call is of, or the global itself; None for other values."""
    if type(value) is Reduced:
        return value.function
    if type(value) is Record:
        return value.cls
    return value if type(value) is Global else None


def check_records(records: Iterable[Record]) -> None:
    """Check that objects of unknown classes are modules, whose tensors can be read without the class.

    Raises:
        CheckpointUnsupported: one is not.
    """
    odd = [record for record in records if not _is_module(record)]
    if odd:
        names = sorted({quote(record.cls) for record in odd})
        raise HasUnknownObjects(
            f"pickle byte {odd[0].offset}: it has objects of {join_some(names, _SHOWN)}, which only "
            "their own code can read",
            advice="save the model's state_dict() instead",
        )


def find_state_dict(tree: Tree, subtree: str | None) -> Choice:
    """Choose the tensors of the model, or those below the keys of ``subtree``.

    Raises:
        UsageError: there is no such ``subtree``, or more than one.
        CheckpointUnsupported: a key is neither a string nor an integer, two tensors have one name, or the part
            that ``subtree`` names has objects that are not known.
    """
    if subtree is None:
        prefix = () if tree.is_module else _likeliest(tree)
    else:
        prefix = () if subtree == EVERYTHING else _named(tree, subtree)
    _check_known(tree, prefix)
    # An optimizer can be next to the model's own keys.
    skips_training = subtree is None and not prefix and not tree.is_module
    depth = len(prefix)
    chosen: dict[str, Any] = {}
    left: Counter[str] = Counter()
    for path, value in tree.tensors:
        if path[:depth] != prefix:
            same = 0
            while path[same : same + 1] == prefix[same : same + 1]:
                same += 1
            left[_shown(path[: same + 1])] += 1  # up to the first key that differs
        elif skips_training and len(path) > 1 and is_training(path[0]):
            left[_shown(path[:1])] += 1
        else:
            name = path[depth] if len(path) == depth + 1 else None
            if type(name) is not str:
                name = _joined(path, depth)
            if name in chosen:
                raise CheckpointUnsupported(f"two tensors would be called {quote(name)}")
            chosen[name] = value
    return Choice(chosen, [*_notices(left), *_unknown_notices(tree)])


def _check_known(tree: Tree, prefix: Path) -> None:
    """Check that a part has nothing that might be a tensor of an unknown class."""
    for path, made_by in tree.unknown:
        if path[: len(prefix)] == prefix:
            raise HasUnknownObjects(
                f"pickle byte {made_by.offset}: the chosen part uses {quote(made_by)} at "
                f"{quote(_shown(path))}, which checkpoints of tensors do not need; no code was executed",
                advice="save the model's state_dict() instead",
            )


def subtrees_of(paths: Iterable[Path], sizes: Iterable[int] | None = None) -> list[Subtree]:
    """Return the parts that contain the tensors at ``paths``, the whole checkpoint first.

    ``sizes`` has the bytes of each tensor.
    """
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for path, size in zip(paths, itertools.repeat(0) if sizes is None else sizes, strict=False):
        for end in range(len(path)):
            part = _shown(path[:end]) or EVERYTHING
            counts[part] += 1
            totals[part] += size
    return [
        Subtree(path, count, None if sizes is None else totals[path])
        for path, count in counts.items()
    ]


def known_subtrees(result: Result, size: int) -> list[Subtree]:
    """Return the largest parts without objects that are not known, those with most tensors first.

    ``size`` is that of the pickle. Raises as :func:`find_tensors` for a part.
    """
    tree = find_tensors(result, size, is_part=True)
    unknown = {EVERYTHING}
    for path, _ in tree.unknown:
        unknown.update(_shown(path[:end]) for end in range(1, len(path) + 1))
    known = [it for it in subtrees_of(path for path, _ in tree.tensors) if it.path not in unknown]
    names = {it.path for it in known}
    outer = [it for it in known if it.path.rpartition(".")[0] not in names]
    return sorted(outer, key=lambda it: -it.tensors)


def _children(value: Any) -> tuple[int, Iterable[tuple[Part, Any]]] | None:
    """Return the number of values in a container, and its keys and values; None for other values."""
    if type(value) is dict:
        return len(value), value.items()
    if type(value) in (list, tuple):
        return len(value), enumerate(value)
    if type(value) is Items:
        return len(value.items), enumerate(value.items)
    if type(value) is not Record or not _is_module(value):
        return None
    # The items that the module's state_dict() would have.
    state = value.state
    buffers = state.get("_non_persistent_buffers_set")
    hidden = buffers.items if type(buffers) is Items else ()
    names = {name for name in hidden if type(name) is str}
    items = (
        (key, child)
        for part in _MODULE_PARTS
        for key, child in state[part].items()
        if child is not None and not (part == "_buffers" and key in names)
    )
    return sum(len(state[part]) for part in _MODULE_PARTS) + len(hidden), items


def _is_module(record: Record) -> bool:
    """Return whether a record has the state of a ``torch.nn.Module``, and no entries or arguments."""
    state = record.state
    return (
        type(state) is dict
        and not record.entries
        and not record.arguments
        and all(type(state.get(part)) is dict for part in _MODULE_PARTS)
    )


def _likeliest(tree: Tree) -> Path:
    prefix: Path = ()
    keys: Sequence[str] = _MODEL_KEYS
    while True:
        depth = len(prefix)
        heads = {}
        for path, value in tree.tensors:
            if path[: len(prefix)] == prefix:
                if len(path) > len(prefix) + 1:
                    heads[path[len(prefix)]] = True
                elif not tree.is_scalar(value) and not any(map(is_training, path[-1:])):
                    return prefix  # this level is the model
        # An unknown object may be the model, and must not make a less likely key the model.
        unknown = {path[depth] for path, _ in tree.unknown if path[:depth] == prefix != path}
        found = next((key for key in keys if key in heads or key in unknown), None)
        if found is None and len(heads) == 1 and keys is _MODEL_KEYS:
            # One object has the model and its optimizer, as in torch's tutorials.
            (only,) = heads
            inner = {
                path[depth + 1]: True
                for path, _ in tree.tensors
                if path[: depth + 1] == (*prefix, only)
            }
            if any(map(is_training, inner)) and any(key in inner for key in _MODEL_KEYS):
                prefix = (*prefix, only)
                continue
        if found is None:
            return prefix
        prefix = (*prefix, found)
        keys = _INNER_KEYS


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
    listed = [quote(item.path) for item in subtrees_of(path for path, _ in tree.tensors)]
    raise UsageError(
        f"there is no subtree {quote(subtree)} with tensors; there are {join_some(listed, _SHOWN)}"
    )


def is_training(key: Part) -> bool:
    """Return whether training programs use a key for other state than the model."""
    return type(key) is str and _TRAINING.match(key) is not None


def _notices(left: Mapping[str, int]) -> Iterator[str]:
    if left:
        parts = [
            f"{quote(key)} ({count} tensor{'s' * (count != 1)})" for key, count in left.items()
        ]
        yield f"left out: {join_some(parts, _SHOWN)}; choose another part with --subtree"


def _unknown_notices(tree: Tree) -> Iterator[str]:
    """Yield a remark about the unknown objects, none of which is in the chosen part."""
    if tree.unknown:
        count = len(tree.unknown)
        parts = [f"{quote(_shown(path))} ({quote(made_by)})" for path, made_by in tree.unknown]
        shown = join_some(parts, _SHOWN)
        yield f"left out: {count} object{'s' * (count != 1)} of unknown classes: {shown}"


def _joined(path: Path, depth: int) -> str:
    keys = path[depth:]
    if not keys:
        return "tensor"  # the checkpoint is a single tensor
    for key in keys:
        if type(key) is Key:
            raise CheckpointUnsupported(
                f"there is a tensor at {quote(_shown(path))}, with a key that is not a string"
            )
    return ".".join(map(str, keys))


def _shown(path: Path) -> str:
    return ".".join("?" if type(key) is Key else str(key) for key in path)
