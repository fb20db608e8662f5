"""The handlers of the less frequent opcodes, in tables by their effect on the stack."""

from __future__ import annotations

import re
import struct
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quote
from blobstore.errors import CheckpointDamaged, CheckpointUnsupported
from blobstore.unpickler import opcodes as op
from blobstore.unpickler.globals import put
from blobstore.unpickler.values import Items, Record, Reduced, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Final

    from blobstore.unpickler.state import State

_LAST_PROTOCOL = 5
_LAST_SLOT = 2**32 - 1
_MAX_DIGITS = 1 << 10
_MAX_INTEGER_SIZE = 1 << 10
_ESCAPED = re.compile(rb"""(?:[^\\]|\\(?:[\\'"nrt]|x[0-9a-f]{2}))*""").fullmatch
"""Matches the ``repr`` of a byte string in Python 2."""


def _fixed(layout: str) -> Callable[[State, int], tuple[Any, int]]:
    """Return a reader of a number of fixed size."""
    number = struct.Struct(layout)
    unpack, size = number.unpack_from, number.size

    def read(state: State, position: int) -> tuple[Any, int]:
        return unpack(state.data, position)[0], position + size

    return read


_u8 = _fixed("<B")
_u32 = _fixed("<I")
_u64 = _fixed("<Q")
_i32 = _fixed("<i")


def _i32_size(state: State, position: int) -> tuple[int, int]:
    size, begin = _i32(state, position)
    if size < 0:
        raise CheckpointDamaged(f"a negative length: {size}")
    return size, begin


def _sized(
    size_of: Callable[[State, int], tuple[int, int]], decode: Callable[[bytes], Any] = bytes
) -> Callable[[State, int], Any]:
    def read(state: State, position: int) -> tuple[Any, int]:
        size, begin = size_of(state, position)
        return decode(state.take(begin, begin + size)), begin + size

    return read


def _text(data: bytes) -> str:
    """Decode a string. It may have lone surrogates, which Python allows."""
    return str(data, "utf-8", "surrogatepass")


def _as_text(data: bytes) -> str | bytes:
    """Decode a ``str`` of Python 2: a string if it is UTF-8, otherwise bytes."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _integer(size_of: Callable[[State, int], tuple[int, int]]) -> Callable[[State, int], Any]:
    def read(state: State, position: int) -> tuple[int, int]:
        size, begin = size_of(state, position)
        if size > _MAX_INTEGER_SIZE:
            raise CheckpointUnsupported(f"an integer has {size} bytes")
        data = state.take(begin, begin + size)
        return int.from_bytes(data, "little", signed=True), begin + size

    return read


def _text_integer(state: State, position: int) -> tuple[int | bool, int]:
    line, end = state.line(position)
    if line in (b"00", b"01"):  # how protocol 0 writes false and true
        return line == b"01", end
    return _decimal(line.removesuffix(b"L")), end


def _decimal(line: bytes) -> int:
    if len(line) > _MAX_DIGITS or not line.removeprefix(b"-").isdigit():
        raise CheckpointDamaged(f"a line of {len(line)} bytes is not an integer")
    return int(line)


def _text_float(state: State, position: int) -> tuple[float, int]:
    line, end = state.line(position)
    try:
        return float(line if len(line) <= _MAX_DIGITS else b""), end
    except ValueError:
        raise CheckpointDamaged(f"a line of {len(line)} bytes is not a number") from None


def _quoted_text(state: State, position: int) -> tuple[str | bytes, int]:
    line, end = state.line(position)
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[:1] != line[-1:]:
        raise CheckpointDamaged("a string is not in quotes")
    if _ESCAPED(line[1:-1]) is None:
        raise CheckpointDamaged("a string has an escape that Python 2 does not write")
    return _as_text(_unescaped(line[1:-1], "unicode_escape").encode("latin-1")), end


def _escaped_text(state: State, position: int) -> tuple[str, int]:
    line, end = state.line(position)
    return _unescaped(line, "raw_unicode_escape"), end


def _unescaped(line: bytes, codec: str) -> str:
    try:
        return line.decode(codec)
    except UnicodeDecodeError:
        raise CheckpointDamaged("a string has an invalid escape") from None


def _global(state: State, position: int) -> tuple[Any, int]:
    module, position = state.line(position)
    name, position = state.line(position)
    return state.find(_as_text(module), _as_text(name)), position


def _instance(state: State, position: int) -> tuple[Any, int]:
    """Record the class that INST names, for reports, and refuse the opcode."""
    found, _ = _global(state, position)
    found.is_called = True
    raise CheckpointDamaged(
        f"the opcode makes an object of {quote(found)}, in a way that torch never writes"
    )


def _slot(state: State, position: int) -> tuple[int, int]:
    """Read the number of a memo slot. Numbers over 32 bits could be chosen to collide."""
    line, end = state.line(position)
    if 0 <= (slot := _decimal(line)) <= _LAST_SLOT:
        return slot, end
    raise CheckpointDamaged(f"the memo has slots 0 to {_LAST_SLOT}")


def _get(
    slot_of: Callable[[State, int], tuple[int, int]],
) -> Callable[[State, int], tuple[Any, int]]:
    def read(state: State, position: int) -> tuple[Any, int]:
        slot, end = slot_of(state, position)
        return state.memo[slot], end

    return read


PUSHING: Final[Mapping[int, Callable[[State, int], tuple[Any, int]]]] = {
    op.BININT: _i32,
    op.LONG1: _integer(_u8),
    op.LONG4: _integer(_i32_size),
    op.INT: _text_integer,
    op.LONG: _text_integer,
    op.BINFLOAT: _fixed(">d"),
    op.FLOAT: _text_float,
    op.BINUNICODE8: _sized(_u64, _text),
    op.SHORT_BINUNICODE: _sized(_u8, _text),
    op.UNICODE: _escaped_text,
    op.STRING: _quoted_text,
    op.BINSTRING: _sized(_i32_size, _as_text),
    op.SHORT_BINSTRING: _sized(_u8, _as_text),
    op.BINBYTES: _sized(_u32),
    op.SHORT_BINBYTES: _sized(_u8),
    op.BINBYTES8: _sized(_u64),
    op.BYTEARRAY8: _sized(_u64),
    op.GLOBAL: _global,
    op.INST: _instance,
    op.GET: _get(_slot),
    op.LONG_BINGET: _get(_u32),
}
"""Opcodes that push a value: called with the offset of their argument, return value and end."""


def _append_all(_: State, stack: list[Any], items: list[Any]) -> None:
    target = stack[-1]
    if type(target) in (Record, Reduced):
        raise CheckpointUnsupported("the target of an append is an object of a class")
    if type(target) is not list:
        raise CheckpointDamaged("the target of an append is not a list")
    target.extend(items)


def _put_pairs(state: State, stack: list[Any], items: list[Any]) -> None:
    """Put alternating keys and values into the dict on the stack."""
    target = stack[-1]
    if type(target) is Record:
        target = target.entries
    if type(target) is Reduced:
        raise CheckpointUnsupported("the target of a new entry is an object of a class")
    if type(target) is not dict:
        raise CheckpointDamaged("the target of a new entry is not a dict")
    state.objects += len(items) // 2
    if len(items) % 2:
        raise CheckpointDamaged("a key has no value")
    for key, value in zip(items[::2], items[1::2], strict=True):
        if type(key) is str and key not in target:  # nearly always
            target[key] = value
        else:
            put(target, key, value)


def _add_all(_: State, stack: list[Any], items: list[Any]) -> None:
    target = stack[-1]
    if type(target) is not Items:
        raise CheckpointDamaged("the target of new items is not a set")
    target.items.extend(items)


def _collect(make: Callable[[list[Any]], Any]) -> Callable[[State, list[Any], list[Any]], None]:
    def push(state: State, stack: list[Any], items: list[Any]) -> None:
        state.objects += 1
        stack.append(make(items))

    return push


def _dict(state: State, stack: list[Any], items: list[Any]) -> None:
    state.objects += 1
    stack.append({})
    _put_pairs(state, stack, items)


ENDING: Final[Mapping[int, Callable[[State, list[Any], list[Any]], None]]] = {
    op.SETITEMS: _put_pairs,
    op.APPENDS: _append_all,
    op.ADDITEMS: _add_all,
    op.LIST: _collect(list),
    op.DICT: _dict,
    op.FROZENSET: _collect(Items),
    op.POP_MARK: lambda *_: None,
}
"""Opcodes that take all items since the last mark: called with the stack below it and the items."""


def _empty(make: Callable[[], Any]) -> Callable[[State, list[Any]], None]:
    def push(state: State, stack: list[Any]) -> None:
        state.objects += 1
        stack.append(make())

    return push


def _tuple3(state: State, stack: list[Any]) -> None:
    state.objects += 1
    third = stack.pop()
    second = stack.pop()
    stack[-1] = (stack[-1], second, third)


def _stack_global(state: State, stack: list[Any]) -> None:
    name = stack.pop()
    stack[-1] = state.find(stack[-1], name)


def _new(state: State, stack: list[Any]) -> None:
    arguments = stack.pop()
    stack[-1] = state.new(stack[-1], arguments)


def _put(state: State, stack: list[Any]) -> None:
    value = stack.pop()
    _put_pairs(state, stack, [stack.pop(), value])


def _new_with_names(state: State, stack: list[Any]) -> None:
    if stack.pop():
        raise CheckpointUnsupported("an object is made with named arguments")
    _new(state, stack)


def _build(_: State, stack: list[Any]) -> None:
    """Record the attributes of an object. Attributes of a dict or a set are ignored.

    They are never set on an object, where they could replace a method, such as ``items`` of a dict.
    """
    attributes = stack.pop()
    target = stack[-1]
    if is_tensor(target):
        # torch.load would call set_() or __setstate__(), which give the tensor other contents.
        raise CheckpointDamaged("it sets the state of a tensor, which torch.save never writes")
    if type(target) in (Record, Reduced) and target.state is None:
        target.state = attributes
    elif type(target) not in (dict, Items):
        raise CheckpointDamaged("the target of attributes is not an object, or has some already")


TAKING: Final[Mapping[int, Callable[[State, list[Any]], None]]] = {
    op.EMPTY_DICT: _empty(dict),
    op.EMPTY_LIST: _empty(list),
    op.EMPTY_SET: _empty(lambda: Items([])),
    op.BUILD: _build,
    op.SETITEM: _put,
    op.APPEND: lambda state, stack: _append_all(state, stack, [stack.pop()]),
    op.TUPLE3: _tuple3,
    op.STACK_GLOBAL: _stack_global,
    op.NEWOBJ: _new,
    op.NEWOBJ_EX: _new_with_names,
    op.POP: lambda _, stack: stack.pop(),
    op.DUP: lambda _, stack: stack.append(stack[-1]),
}
"""Opcodes without an argument that work on the top of the stack."""


def _memoize(state: State, stack: list[Any], position: int) -> int:
    state.memo[len(state.memo)] = stack[-1]
    return position


def _text_put(state: State, stack: list[Any], position: int) -> int:
    slot, end = _slot(state, position)
    state.memo[slot] = stack[-1]
    return end


def _protocol(state: State, _: list[Any], position: int) -> int:
    state.protocol = state.data[position]
    if state.protocol > _LAST_PROTOCOL:
        raise CheckpointUnsupported(f"protocol {state.protocol} is unknown")
    return position + 1


def _frame(state: State, _: list[Any], position: int) -> int:
    size, begin = _u64(state, position)
    if begin + size > len(state.data):
        raise state.cut_short()
    return begin


NOTING: Final[Mapping[int, Callable[[State, list[Any], int], int]]] = {
    op.MEMOIZE: _memoize,
    op.PUT: _text_put,
    op.PROTO: _protocol,
    op.FRAME: _frame,
}
"""Opcodes that do not change the stack: they return the offset of the next opcode."""
