"""The run of opcodes by which torch writes nearly every tensor, taken as a whole.

A checkpoint of 20,000 tensors has 600,000 opcodes, and they repeat: 27 of them make the arguments of
``_rebuild_tensor_v2`` out of a storage's key and some numbers. A regular expression takes such a run
apart in the time of a few opcodes. What it makes is what the opcodes one by one would make; where it
does not match, they are taken one by one.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from blobstore.sources.pickle_vm.globals import Use, make_mapping
from blobstore.sources.pickle_vm.values import Global, Persistent, Reduced

if TYPE_CHECKING:
    from blobstore.sources.pickle_vm.state import State

_NUMBER = rb"(?:K.|M..|J.{4})"
_TUPLE = (
    rb"("
    + _NUMBER
    + rb"\x85|"
    + _NUMBER
    + rb"{2}\x86|"
    + _NUMBER
    + rb"{3}\x87|\("
    + _NUMBER
    + rb"{4,6}t)"
)
_CALL = re.compile(
    # the function: BINGET, MARK; MARK, the kind of reference, the storage's class, its key and its device, its count: TUPLE
    rb"h(.)\(\(h(.)h(.)X(.)\0\0\0([0-9]+)r(.{4})h(.)(" + _NUMBER + rb")tr(.{4})"
    # BINPERSID, offset, sizes, strides
    rb"Q(" + _NUMBER + rb")" + _TUPLE + rb"r(.{4})" + _TUPLE + rb"r(.{4})"
    # no gradient, OrderedDict() for the hooks: TUPLE, REDUCE, LONG_BINPUT
    rb"\x89h(.)\)Rr(.{4})tr(.{4})Rr(.{4})",
    re.DOTALL,
)
_SLOTS = struct.Struct("<7I").pack
_NUMBERS = re.compile(rb"K(.)|M(..)|J(.{4})", re.DOTALL)
_AFTER_CALL = 6
"""Bytes of REDUCE and LONG_BINPUT, with which a run ends."""
_OBJECTS = 7
"""Tuples, dicts, references and calls that a run makes."""


class Numbers(dict[bytes, tuple[int, ...]]):
    """The numbers that opcodes push, by those opcodes: BININT1, BININT2 and the signed BININT."""

    def __missing__(self, opcodes: bytes) -> tuple[int, ...]:
        found = self[opcodes] = tuple(
            int.from_bytes(one or two or four, "little", signed=bool(four))
            for one, two, four in _NUMBERS.findall(opcodes)
        )
        return found


def read_whole(state: State, position: int, numbers: Numbers) -> tuple[Reduced, int] | None:
    """Return the call whose function and arguments are made from ``position`` on, and its end.

    Returns None where the opcodes are others, or would not succeed.
    """
    found = _CALL.match(state.data, position)
    if found is None:
        return None
    (
        called,
        kind,
        cls,
        length,
        key,
        s1,
        device,
        count,
        s2,
        offset,
        sizes,
        s3,
        strides,
        s4,
        hooks,
        s5,
        s6,
        s7,
    ) = found.groups()
    memo = state.memo
    known = memo.items
    a = len(known)
    slots = _SLOTS(a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6)
    if b"".join((s1, s2, s3, s4, s5, s6, s7)) != slots or memo.others:
        return None
    try:
        function = known[called[0]]
        maker = known[hooks[0]]
        text = key.decode()
        identifier = (known[kind[0]], known[cls[0]], text, known[device[0]], numbers[count][0])
    except IndexError:
        return None
    if (
        type(function) is not Global
        or function.use is not Use.TENSOR
        or type(maker) is not Global
        or maker.make is not make_mapping
        or length[0] != len(key)
    ):
        return None
    reference = Persistent(identifier, found.start(10) - 1)
    made: dict[Any, Any] = {}
    size, stride = numbers[sizes], numbers[strides]
    arguments = (reference, numbers[offset][0], size, stride, False, made)
    function.is_called = True
    end = found.end()
    call = Reduced(function, arguments, end - _AFTER_CALL)
    memo.items += (text, identifier, size, stride, made, arguments, call)
    state.persistents.append(reference)
    state.objects += _OBJECTS
    return call, end
