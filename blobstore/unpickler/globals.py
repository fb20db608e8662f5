"""The list of globals that a checkpoint may use, and the use of each.

A global matches by module and name together. A global that is not on the list is recorded, and never
looked up anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core.tensor import DTYPES_BY_LIBRARY_NAME
from blobstore.errors import CheckpointDamaged
from blobstore.unpickler.values import Global, Items, Key, Number, Record, Use

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Final


def make_mapping(arguments: tuple[Any, ...]) -> dict[Any, Any]:
    """Make the dict of ``OrderedDict(...)``, ``Counter(...)`` or ``defaultdict(factory, ...)``."""
    if arguments and type(arguments[0]) is Global:  # the factory of a defaultdict
        arguments = arguments[1:]
    if not arguments:
        return {}
    (content,) = arguments
    made: dict[Any, Any] = {}
    if type(content) is dict:
        made.update(content)
    elif type(content) is list:  # pairs, as Python 2 writes them
        for pair in content:
            if type(pair) not in (list, tuple):
                raise TypeError
            put(made, *pair)
    else:
        raise TypeError
    return made


def put(target: dict[Any, Any], key: Any, value: Any) -> None:
    """Put an entry into a dict. Only strings and integers are hashed.

    Raises:
        CheckpointDamaged: the dict has the key already, so that one of two tensors would be lost.
    """
    if type(key) is not str:
        key = Number(key) if type(key) is int else Key(key)
    if key in target:
        raise CheckpointDamaged("a dict has the same key twice")
    target[key] = value


def _items(arguments: tuple[Any, ...]) -> Items:
    if not arguments:
        return Items([])
    (items,) = arguments
    if type(items) not in (list, tuple):
        raise TypeError
    return Items(list(items))


def _encode(arguments: tuple[Any, ...]) -> bytes:
    """Make the bytes of ``_codecs.encode(text, 'latin1')``. Another codec would import a module."""
    text, codec = arguments
    if type(text) is not str or codec not in ("latin1", "latin-1"):
        raise TypeError
    return text.encode("latin-1")


def _bytes(arguments: tuple[Any, ...]) -> bytes:
    """Make bytes from bytes or a latin-1 text. A number would allocate that much memory."""
    if not arguments:
        return b""
    if len(arguments) == 1 and type(arguments[0]) in (bytes, list):
        return bytes(arguments[0])
    return _encode(arguments)


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (sizes,) = arguments
    if type(sizes) is not tuple:
        raise TypeError
    return sizes


def _reconstruct(arguments: tuple[Any, ...]) -> Record:
    """Make the record of an object from class, base and state, as protocols 0 and 1 write it."""
    cls, base, state = arguments
    if type(cls) is not Global or type(base) is not Global or base.name != "object" or state:
        raise TypeError
    cls.is_class = True
    return Record(cls, (), cls.offset)


def _names(use: Use, module: str, names: str) -> Iterable[tuple[tuple[str, str], Use]]:
    return (((module, name), use) for name in names.split())


STORAGES: Final[Mapping[str, str]] = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
}
"""Element types by the names of storage classes. An untyped storage has bytes."""

_UNREADABLE_STORAGES = (
    "ComplexDoubleStorage QInt8Storage QInt32Storage QUInt8Storage QUInt4x2Storage QUInt2x4Storage"
)
_UNREADABLE_DTYPES = (
    "complex32 complex128 qint8 qint32 quint8 quint4x2 quint2x4 bits8 bits16 bits1x8 bits2x4 "
    "bits4x2 uint1 uint2 uint3 uint4 uint5 uint6 uint7 int1 int2 int3 int4 int5 int6 int7"
)
_UNREADABLE_TENSORS = (
    "_rebuild_sparse_tensor _rebuild_sparse_csr_tensor _rebuild_qtensor _rebuild_nested_tensor "
    "_rebuild_meta_tensor_no_storage _rebuild_wrapper_subclass _rebuild_device_tensor_from_numpy "
    "_rebuild_device_tensor_from_cpu_tensor"
)
_PLACED = "DTensorSpec TensorMeta ShardOrderEntry"
"""Classes that describe where the parts of a distributed tensor are."""
_USES: Final[Mapping[tuple[str, str], Use]] = dict(
    [
        *_names(
            Use.TENSOR,
            "torch._utils",
            "_rebuild_tensor_v2 _rebuild_tensor _rebuild_tensor_v3 _rebuild_parameter "
            "_rebuild_parameter_with_state",
        ),
        *_names(Use.TENSOR, "torch._tensor", "_rebuild_from_type_v2 _rebuild_from_type"),
        *_names(Use.UNREADABLE, "torch._utils", _UNREADABLE_TENSORS),
        *_names(Use.STORAGE, "torch", " ".join(STORAGES)),
        *_names(Use.STORAGE, "torch.cuda", " ".join(STORAGES)),
        *_names(Use.STORAGE, "torch.storage", "UntypedStorage"),
        *_names(Use.UNREADABLE, "torch", _UNREADABLE_STORAGES),
        *_names(Use.UNREADABLE, "torch.cuda", _UNREADABLE_STORAGES),
        *_names(Use.UNREADABLE, "torch.storage", "TypedStorage"),
        *_names(Use.DTYPE, "torch", " ".join(DTYPES_BY_LIBRARY_NAME)),
        *_names(Use.UNREADABLE, "torch", _UNREADABLE_DTYPES),
        *_names(
            Use.VALUE, "torch", "Size device Tensor Generator per_tensor_affine per_channel_affine"
        ),
        *_names(Use.VALUE, "torch.nn.parameter", "Parameter Buffer"),
        *_names(Use.VALUE, "torch.serialization", "_get_layout"),
        *_names(Use.VALUE, "collections", "OrderedDict Counter defaultdict deque"),
        *_names(Use.VALUE, "_codecs", "encode"),
        *_names(
            Use.VALUE,
            "builtins",
            "bytearray bytes set frozenset complex slice range dict list tuple int float str bool "
            "object",
        ),
        *_names(Use.VALUE, "copyreg", "_reconstructor"),
        *_names(Use.VALUE, "typing", "Any"),
        *_names(Use.RECORD, "torch.distributed.tensor", "DTensor"),
        *_names(Use.RECORD, "torch.distributed.tensor._dtensor_spec", _PLACED),
        *_names(
            Use.RECORD,
            "torch.distributed.tensor.placement_types",
            "Replicate Shard _StridedShard Partial _MaskPartial",
        ),
        *_names(Use.RECORD, "torch.distributed.device_mesh", "DeviceMesh"),
        *_names(Use.RECORD, "torch.distributed._mesh_layout", "_MeshLayout _FlatLayout"),
        *_names(Use.RECORD, "numpy", "ndarray dtype float64 float32 int64 int32 bool_"),
        *_names(Use.RECORD, "numpy.core.multiarray", "_reconstruct scalar"),
        *_names(Use.RECORD, "numpy._core.multiarray", "_reconstruct scalar"),
        *_names(Use.RECORD, "argparse", "Namespace"),
        *_names(Use.RECORD, "pathlib", "Path PosixPath WindowsPath PurePosixPath PureWindowsPath"),
        *_names(Use.RECORD, "pathlib._local", "Path PosixPath WindowsPath PurePosixPath"),
        *_names(Use.RECORD, "datetime", "datetime date time timedelta timezone"),
        *_names(Use.RECORD, "decimal", "Decimal"),
        *_names(Use.RECORD, "uuid", "UUID"),
        *_names(Use.RECORD, "omegaconf.base", "ContainerMetadata Metadata"),
        *_names(Use.RECORD, "omegaconf.dictconfig", "DictConfig"),
        *_names(Use.RECORD, "omegaconf.listconfig", "ListConfig"),
        *_names(
            Use.RECORD,
            "omegaconf.nodes",
            "AnyNode StringNode IntegerNode FloatNode BooleanNode EnumNode",
        ),
        *_names(Use.RECORD, "pytorch_lightning.utilities.parsing", "AttributeDict"),
        *_names(Use.RECORD, "lightning.fabric.utilities.data", "AttributeDict"),
        *_names(Use.RECORD, "pytorch_lightning.callbacks.model_checkpoint", "ModelCheckpoint"),
    ]
)
_MAKERS: Final[Mapping[tuple[str, str], Callable[[tuple[Any, ...]], Any]]] = {
    ("collections", "OrderedDict"): make_mapping,
    ("collections", "Counter"): make_mapping,
    ("collections", "defaultdict"): make_mapping,
    ("builtins", "dict"): make_mapping,
    ("builtins", "set"): _items,
    ("builtins", "frozenset"): _items,
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): _bytes,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("torch", "Size"): _size,
}
_MODULES: Final[Mapping[str, str]] = {
    "__builtin__": "builtins",
    "copy_reg": "copyreg",
    "torch.tensor": "torch._tensor",
}
"""Modules by their names in Python 2 and old versions of torch."""


def look_up(module: str, name: str, offset: int) -> Global:
    """Return the record of a global that the pickle first uses at byte ``offset``."""
    key = (_MODULES.get(module, module), name)
    return Global(module, name, offset, _USES.get(key), _MAKERS.get(key))
