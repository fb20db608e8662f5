"""The machine that reads a pickle into inert values.

A pickle is a program for a stack machine. This machine knows the opcodes, but executes nothing: a
global becomes a record of two names, a call a record of a global and its arguments, an object a record
of its class and state. It imports, calls and modifies nothing, hashes only strings and integers, and
never recurses.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.errors import CheckpointDamaged, CheckpointRefused
from blobstore.unpickler.fast_path import Numbers, read_calls
from blobstore.unpickler.handlers import ENDING, NOTING, PUSHING, TAKING
from blobstore.unpickler.opcodes import (
    BINGET,
    BININT1,
    BININT2,
    BINPERSID,
    BINPUT,
    BINUNICODE,
    EMPTY_TUPLE,
    LONG_BINPUT,
    MARK,
    NAMES,
    NEWFALSE,
    NEWTRUE,
    NONE,
    POP,
    REDUCE,
    REFUSED,
    STOP,
    TUPLE,
    TUPLE1,
    TUPLE2,
)
from blobstore.unpickler.state import CutShort, LimitReached, State
from blobstore.unpickler.values import Persistent

if TYPE_CHECKING:
    from blobstore.unpickler.values import Global, Record

_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_CONSTANTS = {EMPTY_TUPLE: (), NEWFALSE: False, NEWTRUE: True, NONE: None}
_SEGMENT = 1 << 14
"""Bytes of the pickle between two checks of the limits. Every opcode has at least one byte."""


class Limits(NamedTuple):
    """The resources that a pickle may use. Real checkpoints use a small part of them."""

    values: int = 1 << 20
    """Values on the stack."""
    marks: int = 1 << 10
    """Containers that are not complete."""
    memories: int = 1 << 23
    """Values in the memo."""
    objects: int = 1 << 21
    """Lists, dicts and their entries, tuples, calls and objects."""


class Result(NamedTuple):
    """The contents of a pickle."""

    value: Any
    end: int
    """Offset of the first byte after the pickle."""
    protocol: int
    globals: tuple[Global, ...]
    """All globals of the pickle in order, even if the value does not contain them."""
    records: tuple[Record, ...]
    """Objects of classes that are not on the list of known globals."""
    persistents: tuple[Persistent, ...]
    """All references to outside data, even if the value does not contain them."""

    @property
    def refused(self) -> list[Global]:
        """The globals that are neither on the list nor only the class of a plain object."""
        return [
            item
            for item in self.globals
            if item.use is None and (item.is_called or not item.is_class)
        ]


LIMITS = Limits()


class Scan(NamedTuple):
    """The globals of a pickle, even if it cannot be read."""

    globals: tuple[Global, ...]
    """The globals up to the point where reading ended."""
    result: Result | None
    refusal: CheckpointRefused | None
    """The reason if there is no result."""


def run(data: bytes, *, start: int = 0, limits: Limits = LIMITS) -> Result:
    """Read the pickle at byte ``start`` of ``data``.

    Raises:
        CutShort: ``data`` ends before the pickle does.
        LimitReached: it exceeds the limits.
        CheckpointDamaged: it is not a pickle, or has an opcode that no checkpoint has. The message has
            the offset and the opcode.
        CheckpointUnsupported: it makes a value that has no inert form.
    """
    return _run(State(data, start), limits)


def scan(data: bytes, *, start: int = 0, limits: Limits = LIMITS) -> Scan:
    """Read a pickle as :func:`run` does, as far as possible."""
    state = State(data, start)
    try:
        result = _run(state, limits)
    except CheckpointRefused as error:
        return Scan(tuple(state.globals.values()), None, error)
    return Scan(result.globals, result, None)


def _run(state: State, limits: Limits) -> Result:
    data = state.data
    kind: type[CheckpointRefused] = CheckpointDamaged
    try:
        return Result(
            _loop(state, limits),
            state.position,
            state.protocol,
            tuple(state.globals.values()),
            tuple(state.records),
            tuple(state.persistents),
        )
    except CutShort:
        raise
    except (IndexError, struct.error) as error:
        # An argument ends too early, or an opcode needs more values than there are.
        if isinstance(error, struct.error) or state.position >= len(data):
            raise state.cut_short() from None
        reason = "the stack holds too few values"
    except UnicodeDecodeError:
        reason = "a string is not UTF-8"
    except KeyError:
        reason = "the memo has no value of that number"
    except CheckpointRefused as error:
        reason, kind = str(error), type(error)
    code = data[state.at]
    raise state.refusal(reason, NAMES.get(code, f"0x{code:02x}"), kind)


def _loop(state: State, limits: Limits) -> Any:  # noqa: C901, PLR0912, PLR0915 - one loop
    """Run until STOP, and return the value.

    The most frequent opcodes of checkpoints come first and are inlined: a call would cost more than
    their work.
    """
    data, memo, persistents = state.data, state.memo, state.persistents
    remembered, others = memo.items, memo.others
    size = len(data)
    frames: list[list[Any]] = []
    stack: list[Any] = []
    numbers = Numbers()
    at = position = state.at
    objects = 0
    try:
        while True:
            used = (len(stack), len(frames), len(memo), objects + state.objects)
            for what, count, limit in zip(Limits._fields, used, limits, strict=True):
                if count > limit:
                    raise LimitReached(f"the pickle needs more than {limit} {what}")
            segment = position + _SEGMENT
            while position < segment:
                at = position
                code = data[at]
                position += 1
                if code == LONG_BINPUT:
                    slot = _U32(data, position)[0]
                    position += 4
                    if slot == len(remembered) and not others:
                        remembered.append(stack[-1])
                    else:
                        memo[slot] = stack[-1]
                elif code == BINGET:
                    slot = data[position]
                    position += 1
                    if data[position] == MARK:  # probably the start of a tensor
                        end = read_calls(state, stack, at, segment, numbers)
                        if end > at:
                            position = end
                            continue
                    stack.append(remembered[slot] if slot < len(remembered) else memo[slot])
                elif code == BINUNICODE:
                    begin = position + 4
                    position = begin + _U32(data, position)[0]
                    if position > size:
                        raise state.cut_short()
                    stack.append(str(data[begin:position], "utf-8", "surrogatepass"))
                elif code == BININT1:
                    stack.append(data[position])
                    position += 1
                elif code == TUPLE1:
                    stack[-1] = (stack[-1],)
                    objects += 1
                elif code == MARK:
                    frames.append(stack)
                    stack = []
                elif code == TUPLE:
                    value = tuple(stack)
                    stack = frames.pop()
                    stack.append(value)
                    objects += 1
                elif code == BININT2:
                    stack.append(_U16(data, position)[0])
                    position += 2
                elif code == TUPLE2:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                    objects += 1
                elif code == REDUCE:
                    arguments = stack.pop()
                    stack[-1] = state.call(stack[-1], arguments, at)
                elif code == BINPUT:
                    memo[data[position]] = stack[-1]
                    position += 1
                elif code in _CONSTANTS:
                    stack.append(_CONSTANTS[code])
                elif code == BINPERSID:
                    stack[-1] = Persistent(stack[-1], at)
                    persistents.append(stack[-1])
                    objects += 1
                elif code == POP and not stack:  # how protocol 0 discards a mark
                    stack = frames.pop()
                elif code in PUSHING:
                    state.at = at
                    value, position = PUSHING[code](state, position)
                    stack.append(value)
                elif code in ENDING:
                    items = stack
                    stack = frames.pop()
                    ENDING[code](state, stack, items)
                elif code in TAKING:
                    state.at = at
                    TAKING[code](state, stack)
                elif code in NOTING:
                    position = NOTING[code](state, stack, position)
                elif code == STOP:
                    if len(stack) != 1 or frames:
                        raise CheckpointDamaged("the stack does not have exactly one value")
                    return stack[0]
                elif code in REFUSED:
                    raise CheckpointDamaged(f"the opcode {REFUSED[code]}, which no checkpoint uses")
                else:
                    raise CheckpointDamaged(
                        "there is no such opcode; this is not a pickle, or it is damaged"
                    )
    finally:
        state.at, state.position = at, position
