"""The fast path: reads the sequence of opcodes that torch writes for nearly every tensor at once.

A checkpoint of 20,000 tensors has 600,000 opcodes, and they repeat: 27 of them make the arguments of
``_rebuild_tensor_v2`` from the key of a storage and some numbers. A regular expression parses such a
sequence in the time of a few opcodes. The result is exactly that of the single opcodes. If the
expression does not match, the machine reads the opcodes one by one.
"""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from blobstore.unpickler.globals import make_mapping
from blobstore.unpickler.values import Global, Persistent, Reduced, Use

if TYPE_CHECKING:
    from blobstore.unpickler.state import State

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
    # function: BINGET, MARK; MARK, kind of reference, storage class, key, device, element count: TUPLE
    rb"h(.)\(\(h(.)h(.)X(.)\0\0\0([0-9]+)r(.{4})h(.)(" + _NUMBER + rb")tr(.{4})"
    # BINPERSID, offset, sizes, strides
    rb"Q(" + _NUMBER + rb")" + _TUPLE + rb"r(.{4})" + _TUPLE + rb"r(.{4})"
    # no gradient, OrderedDict() for the hooks: TUPLE, REDUCE, LONG_BINPUT
    rb"\x89h(.)\)Rr(.{4})tr(.{4})Rr(.{4})"
    # usually the name of the next tensor: BINUNICODE
    rb"(?:X(.)\0\0\0)?",
    re.DOTALL,
)
_SLOTS = struct.Struct("<7I").pack
_SLOT = struct.Struct("<I").pack
_NAME = 5
"""Bytes of BINUNICODE and its length."""
_PUT = 5
"""Bytes of LONG_BINPUT."""
_NUMBERS = re.compile(rb"K(.)|M(..)|J(.{4})", re.DOTALL)
_AFTER_CALL = 6
"""Bytes of REDUCE and LONG_BINPUT, the end of a sequence."""
_OBJECTS = 7
"""Number of tuples, dicts, references and calls that a sequence makes."""


class Numbers(dict[bytes, tuple[int, ...]]):
    """Cache of the integers that sequences of BININT1, BININT2 and signed BININT push."""

    def __missing__(self, opcodes: bytes) -> tuple[int, ...]:
        found = self[opcodes] = tuple(
            int.from_bytes(one or two or four, "little", signed=bool(four))
            for one, two, four in _NUMBERS.findall(opcodes)
        )
        return found


def read_calls(  # noqa: C901, PLR0915 - one loop: a call costs more than most of its lines
    state: State, stack: list[Any], position: int, segment: int, numbers: Numbers
) -> int:
    """Read the calls from ``position`` on that start before ``segment``, and push them on the stack.

    The name between two calls is pushed too, as in the entries of a dict.

    Returns:
        The offset after the last call: ``position`` if there are other opcodes, or if the single
        opcodes would fail.
    """
    data, memo = state.data, state.memo
    known, persistents = memo.items, state.persistents
    if memo.others:
        return position
    begin = position
    name: str | None = None
    checked = (b"", b"")
    while begin < segment:
        found = _CALL.match(data, begin)
        if found is None:
            break
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
            next_length,
        ) = found.groups()
        a = len(known) + (name is not None)
        slots = _SLOTS(a, a + 1, a + 2, a + 3, a + 4, a + 5, a + 6)
        if b"".join((s1, s2, s3, s4, s5, s6, s7)) != slots:
            break
        try:
            function = known[called[0]]
            maker = known[hooks[0]]
            text = key.decode()
            identifier = (known[kind[0]], known[cls[0]], text, known[device[0]], numbers[count][0])
        except IndexError:
            break
        if length[0] != len(key):
            break
        if checked != (called, hooks):
            if not (
                type(function) is type(maker) is Global
                and function.use is Use.TENSOR
                and maker.make is make_mapping
            ):
                break
            checked = (called, hooks)
            function.is_called = True
        if name is not None:
            stack.append(name)
            known.append(name)
        reference = Persistent(identifier, found.start(10) - 1)
        made: dict[Any, Any] = {}
        size, stride = numbers[sizes], numbers[strides]
        arguments = (reference, numbers[offset][0], size, stride, False, made)
        position = found.end(18)
        call = Reduced(function, arguments, position - _AFTER_CALL)
        known += (text, identifier, size, stride, made, arguments, call)
        persistents.append(reference)
        stack.append(call)
        state.objects += _OBJECTS
        if next_length is None:
            break
        begin = position + _NAME + next_length[0]
        if data[begin : begin + _PUT] != b"r%b" % _SLOT(len(known)):
            break
        try:
            name = str(data[position + _NAME : begin], "utf-8", "surrogatepass")
        except UnicodeDecodeError:
            break
        begin += _PUT
    return position
