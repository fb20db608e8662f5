"""Reads folders of DeepSpeed ZeRO, stage 1 to 3: every process has a part of the float32 weights.

In stages 1 and 2, the parameters of a group follow each other in one flat vector, which is cut into a part
for each process. In stage 3, each parameter by itself is cut into equal parts.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import join_some, quote
from blobstore.core.tensor import TensorSpec
from blobstore.errors import DamagedSource, UnsupportedSource, UsageError
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.distributed.file_names import ZERO_MODEL, ZERO_OPTIMIZER, ZERO_TOOLS
from blobstore.sources.distributed.files import DataFile
from blobstore.sources.distributed.folder import Assembled, AssembledFolder
from blobstore.sources.distributed.zero_files import (
    Run,
    read_model_states,
    read_moments,
    read_optimizer_states,
    read_values,
)
from blobstore.sources.file_tree import FileTree, joined
from blobstore.sources.selection import read_json
from blobstore.sources.small_files import files_next_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.sources.base import SourceOptions
    from blobstore.sources.distributed.pieces import Piece
    from blobstore.sources.distributed.zero_files import (
        ModelStates,
        Moments,
        OptimizerStates,
        Shape,
    )

_MAX_GROWTH = 16
"""Limit of the tensors' size, in sizes of the files: tied parameters are stored once."""
_SHOWN = 8
NO_STATE = "; left out: the states of the optimizer"
_WAY_OUT = "consolidate it with the zero_to_fp32.py that DeepSpeed saves, and import its result"


class ZeroFolder(AssembledFolder):
    """A :class:`TensorSource` over the weights in a folder of DeepSpeed."""

    _format = "pytorch"

    def __init__(
        self, folder: Path, inner: str = "", options: SourceOptions = DEFAULT_OPTIONS
    ) -> None:
        """Read the headers of all files, and check that they have every parameter.

        Args:
            folder: the folder of the model.
            inner: the folder of the step, relative to it.
            options: the part to read.

        Raises:
            DamagedSource: a file is missing or damaged, or files contradict each other.
            UnsupportedSource: the checkpoint was saved in a way that is not read.
            SourceError: a file cannot be read.
            UsageError: an option does not fit.
        """
        super().__init__(FileTree(folder, exclude=options.exclude), options)
        self.reopen = functools.partial(ZeroFolder, folder.absolute(), inner, options)
        self._inner = inner
        label = self._tree.label(inner)
        if options.subtree is not None:
            raise UsageError(
                f"{label} is a checkpoint of DeepSpeed, which has no parts for --subtree"
            )
        self._models, self._optimizers = self._open_files()
        optimizer = [read_optimizer_states(file) for file in self._optimizers]
        model = [read_model_states(file) for file in self._models]
        self._parts = model, optimizer
        weights = _Weights(model, optimizer)
        try:
            tensors = weights.tensors()
            # Before anything is read: tied names can list one tensor any number of times.
            self._check_growth(tensors.values())
        except DamagedSource as error:
            raise error.at(label) from None
        stage = optimizer[0].stage
        self.config = read_json(self._tree, "config.json", dict)
        used = {joined(inner, ""), "latest", *self._data_files}
        files = files_next_to(self._tree, used, options.keep, self.notices)
        self.files = [file for file in files if file.name not in ZERO_TOOLS]
        self._add(tensors)
        self.notices.append(
            f"joined the parts of {len(optimizer)} processes of DeepSpeed ZeRO stage {stage}{NO_STATE}"
        )
        if weights.rest:
            self.notices.append(
                "not trained, so in the type that the module has: "
                f"{join_some([*map(quote, weights.rest)], _SHOWN)}"
            )

    def optimizer(self) -> tuple[dict[str, dict[str, Assembled | float]], list[dict[str, Any]]]:
        """Return the state of each parameter, and the groups of parameters: what ``get_state_dict`` of torch does.

        Raises:
            CheckpointDamaged, DamagedSource: it is damaged, or contradicts itself.
            CheckpointUnsupported: it has values that are not read.
        """
        moments = [read_moments(file) for file in self._optimizers]
        try:
            state, groups = _optimizer(*self._parts, moments)
        except DamagedSource as error:
            raise error.at(self._tree.label(self._inner)) from None
        found = (one for its in state.values() for one in its.values())
        self._check_growth(one for one in found if isinstance(one, Assembled))
        return state, groups

    def values(self) -> dict[str, Any]:
        """Return what there is besides the model and its optimizer, as the unpickler has it."""
        return read_values(self._models[0])

    def _open_files(self) -> tuple[list[DataFile], list[DataFile]]:
        """Return the files of the model and of the optimizer, by process."""
        models: dict[int, str] = {}
        optimizers: dict[int, str] = {}
        others = []
        label = self._tree.label(self._inner)
        for name in self._tree.entries(self._inner):
            found = ZERO_MODEL.fullmatch(name) or ZERO_OPTIMIZER.fullmatch(name)
            if found is None:
                others += [name] * name.endswith("_states.pt")
                continue
            files = models if found.re is ZERO_MODEL else optimizers
            rank = int(found["rank"] or 0)
            if rank in files:
                raise DamagedSource(
                    f"{label} has two files of process {rank}: {quote(files[rank])}, {quote(name)}"
                )
            files[rank] = name
        if others:
            raise UnsupportedSource(
                f"{label} has files of model, pipeline or expert parallelism, which are not read, "
                f"such as {quote(others[0])}; load it with DeepSpeed and save complete weights"
            )
        if not optimizers:
            raise UnsupportedSource(
                f"{label} was saved without ZeRO; import the file with the model: "
                f"{join_some([*map(quote, models.values())], _SHOWN)}"
            )
        if not models:
            raise DamagedSource(f"{label} has no *_model_states.pt file")
        for files in (models, optimizers):
            missing = next(rank for rank in itertools.count() if rank not in files)
            if missing < len(files):
                raise DamagedSource(
                    f"{label} has files of {len(files)} processes, but not "
                    f"{quote(_name_of(missing, files))}; copy the files of all processes"
                )
        return self._opened(models), self._opened(optimizers)

    def _opened(self, names: Mapping[int, str]) -> list[DataFile]:
        files = []
        for _, name in sorted(names.items()):
            path = joined(self._inner, name)
            self._data_files[path] = DataFile(self._tree.path(path), self.versions.open)
            files.append(self._data_files[path])
        return files

    def _check_growth(self, tensors: Iterable[Assembled]) -> None:
        total = sum(tensor.spec.nbytes for tensor in tensors)
        size = sum(file.version.size for file in self._data_files.values())
        if total > size * _MAX_GROWTH:
            raise UnsupportedSource(
                f"its tensors are {total} bytes, more than {_MAX_GROWTH} times the {size} of its files"
            )


def _name_of(rank: int, files: Mapping[int, str]) -> str:
    first = next(iter(files))
    return files[first].replace(f"rank_{first}_", f"rank_{rank}_", 1)


def _optimizer(
    model: Sequence[ModelStates], optimizer: Sequence[OptimizerStates], moments: Sequence[Moments]
) -> tuple[dict[str, dict[str, Assembled | float]], list[dict[str, Any]]]:
    """Return the state of each parameter, and the groups; the arguments are what the files of all processes have."""
    groups, first = model[0].groups, moments[0]
    numbers = [its if type(its := one.get("params")) is list else [] for one in first.param_groups]
    flat = range(len(optimizer[0].groups))
    if [*itertools.chain(*numbers)] != [*flat] or len(numbers) != len(groups):
        raise DamagedSource("the groups of the optimizer are not those of the parameters")
    if any(len(one.groups) != len(flat) for one in moments):
        raise DamagedSource("the optimizer has no state of some parameters")
    bare = [one._replace(module={}, frozen={}, fragments={}, tied={}) for one in model]
    state: dict[str, dict[str, Assembled | float]] = {name: {} for its in groups for name in its}
    for key in dict.fromkeys(itertools.chain(*first.groups)):
        found = [[its.get(key) for its in one.groups] for one in moments]
        runs = [[it for it in its if isinstance(it, Run) and len(it.shape) == 1] for its in found]
        if runs == found:
            parts = [one._replace(groups=its) for one, its in zip(optimizer, runs, strict=True)]
            for name, tensor in _Weights(bare, parts).tensors().items():
                state[name][key] = tensor
            continue
        for shapes, its in zip(groups, numbers, strict=True):
            value: Run | Assembled | float | None = found[0][its[0]] if its else None
            if isinstance(value, Run) and value.elements == 1:  # the step
                spec = TensorSpec(key, value.dtype, value.shape)
                value = Assembled(spec, (1,), [value.piece(0, 0, 1)])
            for name in shapes:
                if value is None or isinstance(value, Run):
                    raise DamagedSource(f"the optimizer has no {quote(key)} of {quote(name)}")
                state[name][key] = value
    options = zip(first.param_groups, groups, strict=True)
    return state, [{**one, "params": [*shapes]} for one, shapes in options]


class _Vector(NamedTuple):
    """Runs that follow each other."""

    runs: Sequence[Run]
    ends: Sequence[int]

    @property
    def size(self) -> int:
        """The number of all elements."""
        return self.ends[-1] if self.ends else 0

    def pieces(self, first: int, count: int, offset: int = 0) -> Iterator[Piece]:
        """Yield ``count`` elements from ``first`` on, as the part of a flat tensor at ``offset``."""
        index = bisect.bisect_right(self.ends, first)
        while count:
            run = self.runs[index]
            inner = first - (self.ends[index] - run.elements)
            part = min(count, run.elements - inner)
            if part:
                yield run.piece(offset, inner, part)
            first, offset, count, index = first + part, offset + part, count - part, index + 1


def _vector(runs: Sequence[Run]) -> _Vector:
    return _Vector(runs, [*itertools.accumulate(run.elements for run in runs)])


class _Weights:
    """The complete weights of a checkpoint."""

    def __init__(self, model: Sequence[ModelStates], optimizer: Sequence[OptimizerStates]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._is_cut = optimizer[0].stage == 3
        """Whether each parameter by itself is cut."""
        self._found: dict[str, Assembled] = {}
        self.rest: list[str] = []
        """Parameters that only the module has."""

    def tensors(self) -> dict[str, Assembled]:
        """Return all tensors of the model.

        Raises:
            DamagedSource: files contradict each other, or a parameter has no values.
        """
        self._check_equal()
        first = self._model[0]
        for rank, states in enumerate(self._model):
            if (states.groups, states.frozen) != (first.groups, first.frozen):
                raise DamagedSource(f"process {rank} has other parameters than process 0")
        if self._is_cut:
            self._add_cut()
        else:
            self._add_flat()
        # Before the module, which has these tensors too, but in stage 3 without elements.
        for name, shape in first.frozen.items():
            self._add_frozen(name, shape)
        for name, run in first.module.items():
            if name not in self._found and name not in first.tied:
                self._add_of_module(name, run)
        # Last, because a tied name gets what was found for the other one.
        for name, other in first.tied.items():
            if other in self._found and name not in self._found:
                self._put(name, self._found[other])
        if missing := sorted(set(first.module) - set(self._found)):
            raise _missing(missing[0])
        return self._found

    def _check_equal(self) -> None:
        """Check that the files of all processes agree, and that none is missing."""
        optimizer, first = self._optimizer, self._optimizer[0]
        for rank, states in enumerate(optimizer):
            if (states.stage, states.processes) != (first.stage, first.processes):
                raise DamagedSource(
                    f"process 0 has ZeRO stage {first.stage} of {first.processes} processes, but "
                    f"process {rank} stage {states.stage} of {states.processes}"
                )
            if [run.dtype for run in states.groups] != [run.dtype for run in first.groups]:
                raise DamagedSource(f"process {rank} has other groups or types than process 0")
        if first.processes != len(optimizer):
            raise DamagedSource(
                f"it was saved by {first.processes} processes, but has the *_optim_states.pt files of "
                f"{len(optimizer)}; copy the files of all processes"
            )
        if len(self._model) != (len(optimizer) if self._is_cut else 1):
            raise DamagedSource(
                f"{len(self._model)} *_model_states.pt files do not belong to ZeRO stage {first.stage} "
                f"of {len(optimizer)} processes"
            )

    def _add_flat(self) -> None:
        """Add the parameters of stages 1 and 2."""
        groups = self._model[0].groups
        paddings = self._optimizer[0].paddings or [[0] * len(shapes) for shapes in groups]
        if len(groups) != len(self._optimizer[0].groups) or [*map(len, paddings)] != [
            *map(len, groups)
        ]:
            raise DamagedSource("the files of the model and the optimizer have different groups")
        for index, shapes in enumerate(groups):
            vector = _vector([states.groups[index] for states in self._optimizer])
            dtype = vector.runs[0].dtype
            first = 0
            for (name, shape), padding in zip(shapes.items(), paddings[index], strict=True):
                count = math.prod(shape)
                # The cuts are not in the files. The module at least confirms each of them.
                if (known := self._model[0].module.get(name)) and known.shape != shape:
                    raise DamagedSource(
                        f"parameter {quote(name)} is {_shown(shape)}, but in the module "
                        f"{_shown(known.shape)}"
                    )
                if first + count > vector.size:
                    raise _too_short(name, vector.size)
                pieces = [*vector.pieces(first, count)]
                self._put(name, Assembled(TensorSpec(name, dtype, shape), (count,), pieces))
                first += count + padding
            # DeepSpeed pads a group to a multiple of this, and some versions remove it again.
            unit = 2 * len(self._optimizer)
            if -(-first // unit) != -(-vector.size // unit):
                raise DamagedSource(
                    f"group {index} has {vector.size} elements, but its parameters {first}"
                )

    def _add_cut(self) -> None:
        """Add the parameters of stage 3."""
        vectors = [_vector(states.groups) for states in self._optimizer]
        dtypes = {run.dtype for vector in vectors for run in vector.runs}
        if len({vector.size for vector in vectors}) != 1 or len(dtypes) != 1:
            raise DamagedSource("the processes have different numbers or types of elements")
        (dtype,) = dtypes
        first = 0
        for name, shape in itertools.chain(*(group.items() for group in self._model[0].groups)):
            count = math.prod(shape)
            part = -(-count // len(vectors))
            if first + part > vectors[0].size:
                raise _too_short(name, vectors[0].size)
            pieces = [
                piece
                for rank, vector in enumerate(vectors)
                # The last parts end with padding, so they have fewer elements of the parameter, or none.
                for piece in vector.pieces(
                    first, max(0, min(part, count - rank * part)), rank * part
                )
            ]
            self._put(name, Assembled(TensorSpec(name, dtype, shape), (count,), pieces))
            first += part
        if first != vectors[0].size:
            raise DamagedSource(
                f"every process has {vectors[0].size} elements, but its parameters {first}"
            )

    def _add_frozen(self, name: str, shape: Shape) -> None:
        runs = [states.fragments[name] for states in self._model if name in states.fragments]
        if len(runs) != len(self._model):
            raise _missing(name)
        count = math.prod(shape)
        part = -(-count // len(runs))
        pieces: list[Piece] = []
        for rank, run in enumerate(runs):
            if run.dtype is not runs[0].dtype or run.elements != part:
                raise DamagedSource(
                    f"process {rank} has {run.elements} elements of {quote(name)}, not {part}"
                )
            used = max(0, min(part, count - rank * part))
            pieces += [run.piece(rank * part, 0, used)] * bool(used)
        self._put(name, Assembled(TensorSpec(name, runs[0].dtype, shape), (count,), pieces))

    def _add_of_module(self, name: str, run: Run) -> None:
        """Add a buffer, or a parameter that the optimizer does not have."""
        if name not in self._model[0].buffers:
            if not run.elements:
                raise _missing(name)
            self.rest.append(name)
        pieces = [run.piece(0, 0, run.elements)] * bool(run.elements)
        spec = TensorSpec(name, run.dtype, run.shape)
        self._put(name, Assembled(spec, (run.elements,), pieces))

    def _put(self, name: str, tensor: Assembled) -> None:
        if name in self._found:
            raise DamagedSource(f"parameter {quote(name)} is in two groups")
        self._found[name] = tensor._replace(spec=tensor.spec._replace(name=name))


def _shown(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _missing(name: str) -> DamagedSource:
    return DamagedSource(f"no file has the values of {quote(name)}", advice=_WAY_OUT)


def _too_short(name: str, size: int) -> DamagedSource:
    return DamagedSource(f"parameter {quote(name)} ends after the {size} elements that there are")
