"""Parses the tensors of torch's pickles: a storage, an offset, sizes and strides each.

The functions and their arguments are defined in ``torch/_utils.py`` and ``torch/_tensor.py``, the
identifier of a storage by ``persistent_id`` in ``torch/serialization.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.tensor import DTYPES as BY_NAME
from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME, DType, TensorSpec
from blobstore.errors import CheckpointDamaged, CheckpointRefused, CheckpointUnsupported
from blobstore.unpickler.globals import STORAGES
from blobstore.unpickler.values import Global, Persistent, Record, Reduced, Use, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Final

    from blobstore.sources.pytorch.zip_entries import ZipEntry

_new = tuple.__new__
"""In C, unlike the constructors of named tuples. A checkpoint makes tens of thousands."""
MAX_RANK: Final = 64
"""The most dimensions that numpy supports."""
_MAX_WRAPPERS = 8
_DTENSOR = ("torch.distributed.tensor", "DTensor")
_LARGEST = 2**63 - 1
_STORAGE_TYPES = {name: BY_NAME[dtype] for name, dtype in STORAGES.items()}
_OTHER_SIZES = {
    "ComplexDoubleStorage": 16,
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QInt32Storage": 4,
}
"""Bytes per element of unsupported storages, which have to be skipped."""


_NEGATED = {
    BY_NAME[name] for name in ("C64", "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8")
}
"""The types that torch can negate."""


class UnreadableTensor(CheckpointUnsupported):
    """The safetensors format has no type for a tensor."""


class Storage(NamedTuple):
    """An array of elements, shared by one or more tensors."""

    key: str
    kind: str
    """The name of its class in torch."""
    dtype: DType | None
    """Element type, U8 if the storage is untyped; None if safetensors has no such type."""
    itemsize: int
    """Bytes per element; 0 if elements are not complete bytes."""
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; 0 if elements are not complete bytes."""
        return self.elements * self.itemsize


class Extent(NamedTuple):
    """The extent of a tensor in its storage, by its sizes and strides."""

    elements: int
    span: int
    """Elements of the storage from the first to the last one, inclusive."""
    is_ordered: bool
    """Whether the elements are contiguous in C order."""


class StridedTensor(NamedTuple):
    """A tensor and the place of its elements, checked to be inside the storage."""

    spec: TensorSpec
    storage: Storage
    place: ZipEntry
    """The place of the storage in the file."""
    begin: int
    """Offset of the first element in the storage, in bytes."""
    offset: int
    """Offset of the first element in the file, if the storage is not compressed."""
    nbytes: int
    """Bytes of all elements."""
    stride: tuple[int, ...]
    """Strides of the dimensions, in elements."""
    extent: Extent
    is_direct: bool
    """Whether its bytes are contiguous in the storage, and have the right values as they are."""
    is_mapped: bool
    """Whether its bytes are contiguous in the file too: the storage is not compressed."""
    is_conjugated: bool = False
    is_negated: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes per element; for F4, per pair."""
        return self.spec.dtype.bits // 8 or 1


class TensorReader:
    """Parses the tensors of one checkpoint.

    Args:
        references: the pickle's references to outside data, which must all be storages.
        locate: returns the places of storages in the file.
        is_swapped: whether values are big-endian.

    Raises:
        CheckpointRefused: a reference is not to a storage, two references contradict each other, or
            a storage is missing in the file or has another size.
    """

    def __init__(
        self,
        references: Iterable[Persistent],
        locate: Callable[[Mapping[str, Storage]], Mapping[str, ZipEntry]],
        *,
        is_swapped: bool = False,
    ) -> None:
        # Keyed by identity, valid as long as the pickle's values live: hashing values of a file could
        # take forever. Tensors of the same shape usually share their sizes.
        self._classes: dict[int, tuple[str, DType | None, int]] = {}
        self._extents: dict[tuple[int, int], Extent] = {}
        self.storages: dict[str, Storage] = {}
        """All storages that the pickle refers to, even if no tensor uses them."""
        reference = None
        try:
            for reference in references:
                reference.meaning = self._storage_part(reference.identifier)
        except CheckpointRefused as error:
            raise error.at(f"pickle byte {reference.offset if reference else 0}") from None
        self._places = locate(self.storages)
        self._is_swapped = is_swapped

    def read(self, name: str, value: Reduced) -> StridedTensor:
        """Return the tensor that a call would rebuild.

        Raises:
            UnreadableTensor: the kind of tensor is not supported.
            CheckpointRefused: it is not a valid tensor inside its storage. The message has the
                offset in the pickle.
        """
        try:
            function, arguments = value.function, value.arguments
            is_usual = function.use is Use.TENSOR and function.name == "_rebuild_tensor_v2"
            if is_usual and len(arguments) == 6:
                # The usual case. The last two arguments, for gradients, do not matter.
                reference, offset, shape, stride, _, _ = arguments
                return self._tensor(name, reference, offset, shape, stride)
            if (size := _distributed_size(value)) is not None:
                found = self.read(name, _local_tensor(value))
                if found.spec.shape != size:
                    raise UnreadableTensor(
                        f"it is a shard of a DTensor: {list(found.spec.shape)} of {list(size)}; save "
                        "full tensors, or a checkpoint of torch.distributed.checkpoint"
                    )
                return found
            return self._tensor(name, *_arguments(*_unwrapped(value)))
        except CheckpointRefused as error:
            raise error.at(f"pickle byte {value.offset}") from None

    def _tensor(
        self,
        name: str,
        reference: Any,
        offset: Any,
        shape: Any,
        stride: Any,
        dtype: DType | None = None,
        flags: Any = None,
    ) -> StridedTensor:
        if type(reference) is not Persistent:
            raise CheckpointDamaged("a tensor's first argument is not a storage")
        storage, begin, available = reference.meaning
        dtype = dtype or storage.dtype
        if dtype is None:
            raise UnreadableTensor(
                f"tensors of torch.{storage.kind} have no type in the safetensors format"
            )
        extent = self._extents.get((id(shape), id(stride)))
        if extent is None:
            extent = self._extents[id(shape), id(stride)] = extent_of(shape, stride)
        elements, span, is_ordered = extent
        itemsize = dtype.bits // 8 or 1
        if type(offset) is not int or not 0 <= offset <= _LARGEST:
            _natural(offset, "a tensor's offset")
        if (offset + span) * itemsize > available and elements:
            raise CheckpointDamaged(
                f"a tensor needs {offset + span} elements of storage {quote(storage.key)}, which "
                f"has {available // itemsize}"
            )
        begin = begin + offset * itemsize if elements else 0
        if dtype is DType.F4:  # torch counts pairs
            if not shape:
                raise CheckpointDamaged("an F4 tensor has no dimensions")
            shape = (*shape[:-1], shape[-1] * 2)
        place = self._places[storage.key]
        is_conjugated, is_negated = _flags(flags, dtype) if flags else (False, False)
        is_swapped = self._is_swapped and storage.itemsize > 1
        is_direct = is_ordered and not (is_swapped or is_conjugated or is_negated)
        parts = (
            _new(TensorSpec, (name, dtype, shape)),
            storage,
            place,
            begin,
            place.offset + begin,
            elements * itemsize,
            stride,
            extent,
            is_direct,
            is_direct and not place.is_deflated,
            is_conjugated,
            is_negated,
        )
        return _new(StridedTensor, parts)

    def _storage_part(self, identifier: Any) -> tuple[Storage, int, int]:
        """Return a storage, and offset and size of the part that tensors may use, in bytes."""
        view = None
        if type(identifier) is tuple and len(identifier) == 5:
            kind, cls, key, _, count = identifier
        elif type(identifier) is tuple and len(identifier) == 6:
            kind, cls, key, _, count, view = identifier
        else:
            raise CheckpointDamaged(
                "a reference to outside data is not of the form that torch writes"
            )
        if type(kind) is not str or kind != "storage":
            shown = quote(kind) if type(kind) is str else "unknown"
            raise CheckpointDamaged(f"a reference to outside data of kind {shown} is not a storage")
        found = self._classes.get(id(cls))
        if found is None:
            if type(cls) is not Global or cls.use not in (Use.STORAGE, Use.UNREADABLE):
                refused = CheckpointUnsupported if type(cls) is Global else CheckpointDamaged
                raise refused("the type of a storage is unknown")
            dtype = _STORAGE_TYPES.get(cls.name)
            itemsize = _OTHER_SIZES.get(cls.name, 0) if dtype is None else dtype.bits // 8
            found = self._classes[id(cls)] = (cls.name, dtype, itemsize)
        name, dtype, itemsize = found
        if type(key) is not str or not key:
            raise CheckpointDamaged("a storage's key is not a string")
        if type(count) is not int or not 0 <= count <= _LARGEST:
            _natural(count, "a storage's count")
        storage = _new(Storage, (key, name, dtype, itemsize, count))
        known = self.storages.setdefault(key, storage)
        if known is not storage and known != storage:
            raise CheckpointDamaged(f"storage {quote(key)} has two types or counts")
        if view is not None:
            return (known, *_view(view, known))
        return known, 0, count * itemsize


_COUNTS: Final = {
    "_rebuild_tensor": (4, 4),
    "_rebuild_tensor_v2": (6, 7),
    "_rebuild_tensor_v3": (7, 8),
}
"""The smallest and largest number of arguments of the functions."""


def _arguments(function: Global, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return reference, offset, sizes, strides, element type and flags of a call."""
    if function.use is not Use.TENSOR:
        raise UnreadableTensor(f"tensors made by {quote(function)} are not supported")
    least, most = _COUNTS[function.name]
    if not least <= len(arguments) <= most:
        raise CheckpointDamaged(
            f"{function} has {len(arguments)} arguments, which torch does not write"
        )
    dtype = None
    if function.name == "_rebuild_tensor_v3":
        cls = arguments[6]
        if type(cls) is not Global or cls.use is not Use.DTYPE:
            what = quote(cls) if type(cls) is Global else "something that is not a type"
            raise UnreadableTensor(f"tensors of {what} have no type in the safetensors format")
        dtype = DTYPES_BY_LIBRARY_NAME[cls.name]
    flags = arguments[-1] if len(arguments) == most > least else None
    return (*arguments[:4], dtype, flags)


def _unwrapped(value: Reduced) -> tuple[Global, tuple[Any, ...]]:
    """Return the innermost call: parameters and tensors with attributes wrap another tensor."""
    function, arguments = value.function, value.arguments
    for _ in range(_MAX_WRAPPERS):
        if function.use is not Use.TENSOR or function.name in _COUNTS:
            return function, arguments
        if function.name.startswith("_rebuild_from_type") and len(arguments) == 4:
            # It would call its first argument, which must be a function that rebuilds tensors.
            function, cls, arguments, _ = arguments
            if cls is not None and (type(cls) is not Global or cls.use is None):
                shown = quote(cls) if type(cls) is Global else "that a call returns"
                raise UnreadableTensor(f"tensors of the class {shown} are not supported")
        elif arguments and type(arguments[0]) is Reduced:
            value = arguments[0]
            function, arguments = value.function, value.arguments
        else:
            break
        if type(function) is not Global or type(arguments) is not tuple:
            break
    raise CheckpointDamaged("a tensor is wrapped as torch does not write it")


def _distributed_size(value: Reduced) -> tuple[Any, ...] | None:
    """Return the size of all parts of a ``DTensor`` together; None for other tensors."""
    arguments = value.arguments
    if not value.function.name.startswith("_rebuild_from_type") or len(arguments) != 4:
        return None
    function, cls, inner, _ = arguments
    if (
        type(cls) is not Global
        or (cls.module, cls.name) != _DTENSOR
        or type(function) is not Global
        or function.name != "_rebuild_wrapper_subclass"
    ):
        return None
    size = inner[2] if type(inner) is tuple and len(inner) > 2 else None
    if type(size) is not tuple:
        raise CheckpointUnsupported("a DTensor is not made as torch does it")
    return size


def _attributes(state: Any) -> Mapping[Any, Any]:
    """Return the attributes in the state of an object, with ``__slots__`` or without."""
    states = state if type(state) is tuple and len(state) == 2 else (state,)
    attributes: dict[Any, Any] = {}
    for part in states:
        if type(part) is dict:
            attributes |= part
    return attributes


def _local_tensor(value: Reduced) -> Reduced:
    """Return the part of a ``DTensor`` that this checkpoint has."""
    parts = _attributes(value.arguments[3])
    local, layout = parts.get("_local_tensor"), parts.get("_spec")
    placements = _attributes(layout.state if type(layout) is Record else None).get("placements")
    if type(local) is not Reduced or not is_tensor(local) or type(placements) is not tuple:
        raise CheckpointUnsupported("a DTensor is not made as torch does it")
    if _distributed_size(local) is not None:
        raise CheckpointUnsupported("the local part of a DTensor is a DTensor")
    for placement in placements:
        kind = placement.cls.name if type(placement) is Record else ""
        if kind not in ("Replicate", "Shard"):
            raise UnreadableTensor(f"a DTensor with the placement {quote(kind)} is not read")
    return local


def _natural(number: Any, what: str) -> None:
    if type(number) is int and 0 <= number <= _LARGEST:
        return
    if type(number) is not int:
        shown = "not an integer"
    else:
        shown = str(number) if abs(number) <= 2 * _LARGEST else "out of range"
    raise CheckpointDamaged(f"{what} is {shown}")


def _view(view: Any, storage: Storage) -> tuple[int, int]:
    """Return offset and size of a part of a storage, in bytes."""
    if type(view) is not tuple or len(view) != 3:
        raise CheckpointDamaged("a view of a storage does not have three parts")
    _, offset, count = view
    _natural(offset, "a view's offset")
    _natural(count, "a view's count")
    if offset + count > storage.elements:
        raise CheckpointDamaged(
            f"a view ends at element {offset + count} of {storage.elements} of its storage"
        )
    return offset * storage.itemsize, count * storage.itemsize


def _flags(flags: Any, dtype: DType) -> tuple[bool, bool]:
    if type(flags) is not dict or not set(flags) <= {"conj", "neg"}:
        raise CheckpointUnsupported("a tensor has flags other than conj and neg")
    conj, neg = flags.get("conj", False), flags.get("neg", False)
    if (
        type(conj) is not bool
        or type(neg) is not bool
        or (conj and dtype is not DType.C64)
        or (neg and dtype not in _NEGATED)
    ):
        raise CheckpointDamaged("a tensor's conj or neg flag is invalid")
    return conj, neg


def extent_of(shape: Any, stride: Any) -> Extent:
    """Check sizes and strides, and return their extent.

    Raises:
        CheckpointRefused: they are not two tuples of equal length of valid numbers.
    """
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise CheckpointDamaged("a tensor's sizes and strides are not two tuples of equal length")
    if len(shape) > MAX_RANK:
        raise CheckpointUnsupported(f"a tensor has {len(shape)} dimensions, over {MAX_RANK}")
    span = expected = 1
    is_ordered = True
    is_empty = False
    for size, step in zip(shape[::-1], stride[::-1], strict=True):
        if type(size) is not int or not 0 <= size <= _LARGEST:
            _natural(size, "a tensor's size")
        if type(step) is not int or not 0 <= step <= _LARGEST:
            _natural(step, "a tensor's stride")
        if size == 0:
            is_empty = True
        elif size != 1:
            is_ordered &= step == expected
            expected *= size
            span += (size - 1) * step
    return Extent(0, 0, True) if is_empty else Extent(expected, span, is_ordered)
