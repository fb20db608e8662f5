"""Plain values of Python as JSON, and back to the same values and types. No code is called by what is read.

What JSON has is written as it is: None, booleans, numbers, texts, lists, and dicts with texts as keys, in their order.
Any other value is an object with one key, which begins with ``$`` and says what it is.
"""

from __future__ import annotations

import base64
import contextlib
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

from blobstore.core.escape import quote
from blobstore.errors import UnsupportedSource, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SIGN: Final = "$"
_MIN, _MAX = -(2**63), 2**64 - 1
"""Integers beyond these are written as text, because many programs cannot read them from JSON."""
_SECONDS: Final = 1.0
_SECONDS_PER_KEY: Final = 20e-6
"""Of a thread, a hundred times as long as usual, for a dict or set that is read."""
_TRIED: Final = 1000
"""Keys that are tried before the next look at the clock."""
_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SCALARS = (type(None), bool, int, float, str, complex, bytes)
_GROUPS = {kind.__name__: kind for kind in (tuple, set, frozenset)}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict}
_MAPPINGS |= {kind.__name__: kind for kind in (OrderedDict, Counter)}
_ERRORS: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, ImportError, LookupError)
_ERRORS += (RuntimeError, TypeError, ValueError)
"""What is raised for values that nothing has written so."""
_NUMBERS = "biufc"
"""Kinds of numpy's types whose bytes are all there is."""


Writers = Mapping[type, tuple[str, Callable[[Any], Any]]]
"""By type, the name of more kinds, and what returns a value of JSON for one."""
Readers = Mapping[str, Callable[[Any], Any]]
"""By name, what returns a value of a kind, or raises an error if it was not written so."""


def encode(value: Any, place: str, writers: Writers = MappingProxyType({})) -> Any:
    """Return a value as JSON has it.

    Args:
        value: the value.
        place: where it stands, for messages.
        writers: for values of other types.

    Raises:
        UnsupportedSource: it is, or holds, a value of another type; the message says where.
    """
    kind = type(value)
    if kind in _SCALARS:
        return _scalar(value, place)
    if kind is list:
        return _listed(value, place, writers)
    if kind in _GROUPS.values():
        # Sets have no order, and equal values should have equal bytes.
        members = value if kind is tuple else sorted(value, key=repr)
        return {f"${kind.__name__}": _listed(members, place, writers)}
    if kind in _MAPPINGS.values():
        is_plain = kind is dict and all(
            type(key) is str and is_unicode(key) and not key.startswith(_SIGN) for key in value
        )
        if is_plain:
            return {key: encode(value[key], _joined(place, key), writers) for key in sorted(value)}
        pairs = [
            [encode(key, place, writers), encode(one, _joined(place, key), writers)]
            for key, one in value.items()
        ]
        return {f"${kind.__name__}": pairs}
    if kind in writers:
        name, write = writers[kind]
        return {f"${name}": write(value)}
    full = f"{kind.__module__}.{kind.__qualname__}"
    if full in _OF_TORCH:
        return {f"${kind.__name__.lower()}": _OF_TORCH[full](value)}
    dtype: Any = getattr(value, "dtype", None) if kind.__module__ == "numpy" else None
    is_array = full == "numpy.ndarray"  # others have more than bytes, such as matrices
    if getattr(dtype, "kind", "O") in _NUMBERS and (is_array or kind is dtype.type):
        data = [dtype.str, list(value.shape), _text(value.tobytes())]
        return {"$array" if is_array else "$scalar": data}
    return _refuse(place, f"a {full}")


def decode(value: Any, readers: Readers = MappingProxyType({})) -> Any:
    """Return the value that :func:`encode` wrote; ``readers`` are for what its ``writers`` wrote.

    Raises:
        ValueError: it was not written so.
    """
    if isinstance(value, list):
        return [decode(one, readers) for one in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith(_SIGN) for key in value):
        return {key: decode(one, readers) for key, one in value.items()}
    ((key, content),) = value.items()
    name = key.removeprefix(_SIGN)
    try:
        if name in _GROUPS:
            members = [decode(one, readers) for one in content]
            return _GROUPS[name](members if name == "tuple" else _spread(members))
        if name in _MAPPINGS:
            keys = _spread([decode(key, readers) for key, _ in content])
            pairs = zip(keys, (decode(one, readers) for _, one in content), strict=True)
            return _MAPPINGS[name](dict(pairs))
        return (readers.get(name) or _READERS[name])(content)
    except _ERRORS as error:
        raise ValueError(f"no value of the kind {quote(name)}: {quote(error)}") from None


def _spread(keys: list[Any]) -> list[Any]:
    """Return the keys of a dict or set. Raises ValueError if making it takes long, as with keys chosen to collide.

    Hashes of texts have a random seed, and those of numbers have none.
    """
    tried: dict[Any, None] = {}
    until = time.thread_time() + _SECONDS + len(keys) * _SECONDS_PER_KEY
    for begin in range(0, len(keys), _TRIED):
        tried |= dict.fromkeys(keys[begin : begin + _TRIED])
        if time.thread_time() > until:
            raise ValueError("the keys collide")
    return keys


@contextlib.contextmanager
def depth_checked() -> Iterator[None]:
    """Raise UsageError for a state in the block that is nested too deeply, or holds itself."""
    try:
        yield
    except RecursionError:
        raise UsageError("the state is nested too deeply, or holds itself") from None


def _scalar(value: Any, place: str) -> Any:
    match value:
        case bytes():
            return {"$bytes": _text(value)}
        case complex():
            return {"$complex": [_scalar(value.real, place), _scalar(value.imag, place)]}
        case float() if not math.isfinite(value):
            return {"$float": str(value)}
        case int() if not _MIN <= value <= _MAX:
            return {"$int": hex(value)}
        case str() if not is_unicode(value):
            _refuse(place, "a text that is not Unicode")
    return value


def _listed(values: Sequence[Any], place: str, writers: Writers) -> list[Any]:
    return [encode(one, f"{place}[{index}]", writers) for index, one in enumerate(values)]


def _joined(place: str, key: object) -> str:
    return f"{place}.{key}" if place else f"{key}"


def _refuse(place: str, what: str) -> NoReturn:
    raise UnsupportedSource(
        f"the value {quote(place)} is {what}, which cannot be kept as a plain value",
        advice="make numbers, texts, lists, dicts or tensors of it, or leave it out of the state",
    )


def is_unicode(text: str) -> bool:
    """Return whether a text can be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _complex(parts: Sequence[Any]) -> complex:
    real, imaginary = map(decode, parts)
    return complex(float(real), float(imaginary))


def _array(content: Sequence[Any]) -> Any:
    import numpy as np

    name, shape, text = content
    dtype = np.dtype(str(name))
    if dtype.kind not in _NUMBERS or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError("not an array of numbers")
    return np.frombuffer(_bytes(text), dtype).reshape(shape).copy()


def _of_torch(kind: str) -> Callable[[Any], Any]:
    def read(content: Any) -> Any:
        import torch

        found = getattr(torch, content) if kind == "dtype" else getattr(torch, kind)(content)
        if type(found) is not getattr(torch, kind):
            raise TypeError(content)
        return found

    return read


_OF_TORCH: Final[Mapping[str, Callable[[Any], Any]]] = {
    "torch.dtype": lambda value: str(value).removeprefix("torch."),
    "torch.device": str,
    "torch.Size": list,
}
_READERS: Final[Readers] = {
    "int": lambda text: int(text, 16),
    "float": _SPECIAL.__getitem__,
    "complex": _complex,
    "bytes": _bytes,
    "array": _array,
    "scalar": lambda content: _array(content)[()],
    **{kind.lower(): _of_torch(kind) for kind in ("dtype", "device", "Size")},
}
