"""Makes the plain values of a training's state from a pickle of which nothing was executed.

All mappings become dicts, and sizes of torch tuples: the pickle's reader makes no others.
"""

from __future__ import annotations

import re
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.escape import quote
from blobstore.errors import CheckpointUnsupported
from blobstore.unpickler.values import Global, Number, Reduced, Use, is_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.plain_values import Writers

    Keys = tuple[str | int, ...]

_MAX_DEPTH = 64
_MAX_COST = 16 * 2**20
"""Bytes of texts and arrays, and ``_COST`` for each value: a kilobyte can share its values 2^60 times."""
_COST = 8
_NUMBER = re.compile(r"[biufc](1|2|4|8|16)")
_ARRAY = re.compile(r"numpy\._?core\.multiarray\._reconstruct")
_SCALAR = re.compile(r"numpy\._?core\.multiarray\.scalar")


class _Device(str):
    """A device of torch by its name."""

    __slots__ = ()


WRITERS: Final[Writers] = {
    Global: ("dtype", attrgetter("name")),
    _Device: ("device", str),
    Number: ("int", hex),
}
"""How values of torch are written, and integers as keys."""


class PlainParts:
    """Makes plain values, up to a limit for all of them."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        """Make nothing yet; ``tensors`` stand for the tensors of the checkpoint, by name."""
        self._tensors = tensors
        self._left = _MAX_COST

    def of(self, value: Any, keys: Keys = ()) -> Any:
        """Return the plain value to which ``keys`` lead. Raises CheckpointUnsupported for any other."""
        kind, name = type(value), ".".join(map(str, keys))
        self._left -= _COST + (len(value) if kind in (str, bytes) else 0)
        if self._left < 0 or len(keys) > _MAX_DEPTH:
            raise CheckpointUnsupported(f"{quote(name)}: the values are too many or too deep")
        if is_tensor(value) and (name or "tensor") in self._tensors:
            return self._tensors[name or "tensor"]
        if kind is dict and {*map(type, value)} <= {str, Number}:
            return {key: self.of(one, (*keys, key)) for key, one in value.items()}
        if kind is list or kind is tuple:
            return kind(self.of(one, (*keys, index)) for index, one in enumerate(value))
        if kind is Reduced:
            value = ... if is_tensor(value) else self._made(value)
        elif value is not None and kind not in (bool, int, float, complex, str, bytes):
            value = value if kind is Global and value.use is Use.DTYPE else ...
        if value is ...:
            raise CheckpointUnsupported(f"{quote(name)} is no tensor, and not a plain value")
        return value

    def _made(self, value: Reduced) -> Any:
        """Return what a call would make, if it is a device of torch, or an array or number of numpy; else ``...``."""
        name = str(value.function)
        try:
            match value.arguments, value.state:
                case (str(kind), *index), None if name == "torch.device":
                    return _Device(":".join((kind, *(str(int(one)) for one in index))))
                case (_, (0,), _), (1, tuple(shape), kind, False, bytes(data)) if _ARRAY.fullmatch(
                    name
                ):
                    self._left -= len(data)
                    return _array(kind, data).reshape(shape)
                case (kind, bytes(data)), None if _SCALAR.fullmatch(name):
                    return _array(kind, data).reshape(())[()]
        except (AttributeError, IndexError, TypeError, ValueError):
            pass
        return ...


def _array(dtype: Any, data: bytes) -> Any:
    """Return an array of numbers. Raises an error if the type is another one."""
    import numpy as np

    code, order = dtype.arguments[0], dtype.state[1]
    if str(dtype.function) != "numpy.dtype" or not _NUMBER.fullmatch(code) or order not in "<>|=":
        raise ValueError(code)
    return np.frombuffer(data, np.dtype(order + code))
