"""Parses the files that DeepSpeed saves for each process: its part of the weights, with names and shapes.

Their pickles use classes of DeepSpeed. Objects of these classes become inert records, which are not inspected.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from blobstore.core.escape import quote
from blobstore.errors import CheckpointDamaged, CheckpointUnsupported
from blobstore.sources.distributed.pieces import Box, Piece
from blobstore.sources.pytorch.checkpoint import errors_of
from blobstore.sources.pytorch.container import open_container
from blobstore.sources.pytorch.tensors import TensorReader
from blobstore.sources.pytorch.zip_entries import read_entry
from blobstore.unpickler.values import Number, Reduced, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from blobstore.core.tensor import DType
    from blobstore.sources.distributed.files import DataFile
    from blobstore.sources.pytorch.zip_entries import ZipEntry

    Shape = tuple[int, ...]

_T = TypeVar("_T")
_MAX_RANK = 64
_LARGEST = 2**63 - 1
_CHECK_SIZE = 1 << 20
_STAGES = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups"}
_STAGES[3] = "fp32_flat_groups"
"""The key of the flat tensors of each stage."""
_OF_MODEL = {"module", "buffer_names", "param_shapes", "shared_params", "model", "optimizer"}
_OF_MODEL |= {"frozen_param_shapes", "frozen_param_fragments"}
"""The keys of a ``*_model_states.pt`` file that are of the model or its optimizer."""


class StorageCheck:
    """The checksum of a storage of which tensors are parts. It is verified before the first of them."""

    def __init__(self, entry: ZipEntry) -> None:
        """Verify nothing yet."""
        self._entry = entry
        self._lock = threading.Lock()
        self._is_done = False

    def __call__(self, descriptor: int) -> None:
        """Read the storage, once, and verify its checksum.

        Raises:
            DamagedSource: it is truncated or was changed.
        """
        # One thread reads the storage, and the others wait for the result.
        with self._lock:
            if not self._is_done:
                for _ in read_entry(descriptor, self._entry, memoryview(bytearray(_CHECK_SIZE))):
                    pass
                self._is_done = True


class Run(NamedTuple):
    """Elements that follow each other in a file."""

    file: DataFile
    begin: int
    """Offset of the first one in the file."""
    shape: Shape
    elements: int
    dtype: DType
    check: StorageCheck | None

    def piece(self, offset: int, first: int, count: int) -> Piece:
        """Return ``count`` elements from ``first`` on, as the part of a flat tensor at ``offset``."""
        size = self.dtype.bits // 8
        begin = self.begin + first * size
        return Piece(Box((offset,), (count,)), self.file, begin, count * size, check=self.check)


class ModelStates(NamedTuple):
    """What a ``*_model_states.pt`` file says."""

    module: Mapping[str, Run]
    """The tensors of the module, in the type of training. Those of stage 3 are empty."""
    buffers: Sequence[str]
    groups: Sequence[Mapping[str, Shape]]
    """The shapes of the trained parameters, by group and in the order of the flat tensors."""
    frozen: Mapping[str, Shape]
    fragments: Mapping[str, Run]
    """The values of frozen parameters; of stage 3, the part of this process."""
    tied: Mapping[str, str]
    """Other names of parameters."""


class OptimizerStates(NamedTuple):
    """What a ``*_optim_states.pt`` file says."""

    stage: int
    processes: int
    groups: Sequence[Run]
    """The part that this process has of the parameters: a flat tensor for each group."""
    paddings: Sequence[Sequence[int]] | None
    """The numbers of padding elements after each parameter of each group."""


class Moments(NamedTuple):
    """What the optimizer of a process has besides the weights."""

    groups: Sequence[Mapping[str, Run | float]]
    """The tensors and numbers for each flat tensor, such as ``exp_avg`` and ``step``."""
    param_groups: Sequence[Mapping[str, Any]]
    """Options as the unpickler has them, and the numbers of the flat tensors as ``params``."""


def read_moments(file: DataFile) -> Moments:
    """Read the rest of a ``*_optim_states.pt`` file, except its data. Raises as :func:`read_optimizer_states`."""
    return _read(file, _moments)


def read_values(file: DataFile) -> dict[str, Any]:
    """Read what a ``*_model_states.pt`` file has besides the model. Raises as :func:`read_model_states`."""
    return _read(file, lambda _, value: {k: it for k, it in value.items() if k not in _OF_MODEL})


def read_model_states(file: DataFile) -> ModelStates:
    """Read a ``*_model_states.pt`` file, except its data.

    Raises:
        CheckpointDamaged: it is damaged, or not such a file.
        CheckpointUnsupported: it has a tensor of a kind that is not read.
    """
    return _read(file, _model_states)


def read_optimizer_states(file: DataFile) -> OptimizerStates:
    """Read a ``*_optim_states.pt`` file, except its data.

    Raises:
        CheckpointDamaged: it is damaged, or not such a file.
        CheckpointUnsupported: it has a tensor of a kind that is not read.
    """
    return _read(file, _optimizer_states)


def _read(file: DataFile, parse: Callable[[_Runs, Any], _T]) -> _T:
    with errors_of(file.path), file.opened() as descriptor:
        container = open_container(descriptor, file.version.size)
        if container.is_swapped:
            raise CheckpointUnsupported("its values are big-endian")
        reader = TensorReader(container.result.persistents, container.locate)
        return parse(_Runs(file, reader), container.result.value)


class _Runs:
    """The tensors of a file as runs."""

    def __init__(self, file: DataFile, reader: TensorReader) -> None:
        self._file = file
        self._reader = reader
        self._checks: dict[int, StorageCheck] = {}

    def of(self, name: str, value: Any) -> Run:
        """Return the run of a tensor."""
        if not is_tensor(value):
            raise CheckpointDamaged(f"{quote(name)} is not a tensor")
        found = self._reader.read(name, value)
        if not found.is_mapped or found.spec.dtype.is_packed:
            raise CheckpointUnsupported(f"tensor {quote(name)} is not contiguous in the file")
        place = found.place
        check = None
        if place.crc and found.nbytes:
            check = self._checks.setdefault(place.offset, StorageCheck(place))
        shape = found.spec.shape
        return Run(self._file, found.offset, shape, found.extent.elements, found.spec.dtype, check)

    def of_all(self, values: Mapping[str, Any]) -> dict[str, Run]:
        """Return the runs of tensors, by their names."""
        return {name: self.of(name, value) for name, value in values.items()}


def _model_states(runs: _Runs, value: Any) -> ModelStates:
    states = _named(value, "the checkpoint")
    module = _named(states.get("module"), "its module")
    for name, item in module.items():
        if type(item) is Reduced and not is_tensor(item):
            raise CheckpointUnsupported(
                f"the module has an object of {quote(item.function)} at {quote(name)}, not a tensor"
            )
    groups = _list(states.get("param_shapes"), "param_shapes")
    return ModelStates(
        runs.of_all({name: item for name, item in module.items() if is_tensor(item)}),
        [_text(name) for name in _list(states.get("buffer_names"), "buffer_names")],
        [_shapes(group) for group in groups],
        _shapes(states.get("frozen_param_shapes") or {}),
        runs.of_all(_named(states.get("frozen_param_fragments") or {}, "frozen_param_fragments")),
        {
            name: _text(other)
            for name, other in _named(states.get("shared_params") or {}, "shared_params").items()
        },
    )


def _optimizer_states(runs: _Runs, value: Any) -> OptimizerStates:
    states = _named(_named(value, "the checkpoint").get("optimizer_state_dict"), "its optimizer")
    stage = states.get("zero_stage")
    if type(stage) is Reduced and stage.function.name == "ZeroStageEnum":
        (stage,) = stage.arguments if len(stage.arguments) == 1 else (None,)
    if type(stage) is not int or stage not in _STAGES:
        shown = stage if type(stage) is int else "missing"
        raise CheckpointUnsupported(f"its ZeRO stage is {shown}, not 1, 2 or 3")
    counts = states.get("partition_count")
    counts = counts if type(counts) is list and counts else [counts]
    if type(counts[0]) is not int or not 0 < counts[0] <= _LARGEST:
        raise CheckpointDamaged("its partition_count is not a positive integer")
    if any(type(count) is not int or count != counts[0] for count in counts):
        raise CheckpointUnsupported(
            "its groups have different numbers of processes, as experts of DeepSpeed have"
        )
    key = _STAGES[stage]
    groups = [
        runs.of(f"{key}.{index}", item) for index, item in enumerate(_list(states.get(key), key))
    ]
    if any(len(run.shape) != 1 for run in groups):
        raise CheckpointDamaged(f"a tensor of {key} is not flat")
    paddings = states.get("param_alignment_paddings")
    what = "param_alignment_paddings"
    return OptimizerStates(
        stage,
        counts[0],
        groups,
        None
        if paddings is None
        else [_numbers(_list(group, what), what) for group in _list(paddings, what)],
    )


def _moments(runs: _Runs, value: Any) -> Moments:
    states = value["optimizer_state_dict"]
    what = "the state of its optimizer"
    base = states.get("base_optimizer_state", states.get("optimizer_state_dict"))
    if type(base) is not dict or type(base.get("state")) is not dict:
        raise CheckpointUnsupported(f"{what} is in parts, as elastic checkpoints have it")
    groups = []
    for index in range(len(base["state"])):
        found: dict[str, Run | float] = {}
        for key, item in _named(base["state"].get(Number(index)), what).items():
            if not is_tensor(item) and type(item) not in (int, float):
                raise CheckpointUnsupported(
                    f"{what} has {quote(key)}, which is neither a tensor nor a number"
                )
            found[key] = runs.of(f"{index}.{key}", item) if is_tensor(item) else item
        groups.append(found)
    return Moments(
        groups, [_named(one, what) for one in _list(base.get("param_groups"), "param_groups")]
    )


def _shapes(value: Any) -> dict[str, Shape]:
    shapes = _named(value, "a group of shapes")
    return {name: _numbers(shape, f"the shape of {quote(name)}") for name, shape in shapes.items()}


def _named(value: Any, what: str) -> dict[str, Any]:
    if type(value) is not dict or not all(type(name) is str for name in value):
        raise CheckpointDamaged(f"{what} is not a dict with names, as DeepSpeed saves it")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if type(value) is not list:
        raise CheckpointDamaged(f"{what} is not a list, as DeepSpeed saves it")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise CheckpointDamaged("a name of a parameter is not a string")
    return value


def _numbers(value: Iterable[Any], what: str) -> Shape:
    if type(value) is list or (type(value) is tuple and len(value) <= _MAX_RANK):
        numbers = tuple(value)
        if all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
            return numbers
    raise CheckpointDamaged(f"{what}: these are not integers from 0 to 2^63 - 1")
