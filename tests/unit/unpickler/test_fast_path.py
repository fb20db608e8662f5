from __future__ import annotations

import io
import struct
import zipfile
from typing import Any

import pytest
import torch

from blobstore.errors import CheckpointRefused
from blobstore.unpickler import machine
from blobstore.unpickler.fast_path import Numbers, read_calls
from blobstore.unpickler.machine import run
from blobstore.unpickler.state import State
from blobstore.unpickler.values import Persistent, Reduced
from tests.support.pickle_values import canonical

HEAD = (
    b"\x80\2ctorch._utils\n_rebuild_tensor_v2\nq\0000U\7storageq\0010ctorch\nFloatStorage\nq\0020"
    b"U\3cpuq\0030ccollections\nOrderedDict\nq\0040"
)
"""What is remembered under the numbers 0 to 4."""
KNOWN = 5


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def put(slot: int) -> bytes:
    return b"r" + number(slot)


def tensor(
    key: bytes = b"12",
    count: bytes = b"K\6",
    offset: bytes = b"K\0",
    size: bytes = b"K\2K\3\x86",
    stride: bytes = b"K\3K\1\x86",
    first: int = KNOWN,
) -> bytes:
    """Return the opcodes of a tensor as torch writes them, from the 257th value of a pickle on.

    Its parts are remembered from the number ``first`` on.
    """
    text, identifier, shape, steps, hooks, arguments, call = map(put, range(first, first + 7))
    return b"".join(
        [
            *[b"h\0((h\1h\2X", number(len(key)), key, text, b"h\3", count, b"t", identifier, b"Q"],
            *[offset, size, shape, stride, steps, b"\x89h\4)R", hooks, b"t", arguments, b"R", call],
        ]
    )


def named(name: bytes, first: int = KNOWN, slot: int | None = None) -> bytes:
    """Return the opcodes of a name and a tensor, as an entry of a dict has them."""
    text = b"X" + number(len(name)) + name + put(first if slot is None else slot)
    return text + tensor(first=first + 1)


AFTER = tensor(first=KNOWN + 7)
"""Another tensor, behind the first."""


def pickled(*tensors: bytes) -> bytes:
    """Return a pickle of tensors and of all that they have remembered."""
    slots = range(KNOWN, KNOWN + 7 * len(tensors))
    return HEAD + b"(" + b"".join(tensors) + b"".join(b"j" + number(slot) for slot in slots) + b"t."


def story(data: bytes) -> Any:
    """Return all that is reported about a pickle, whether it can be read or not."""
    try:
        result = run(data)
    except CheckpointRefused as error:
        return (type(error), str(error))
    return (
        canonical(result.value),
        result.end,
        [(str(item), item.offset, item.is_called, item.is_class) for item in result.globals],
        [(item.offset, canonical(item.identifier)) for item in result.persistents],
        [item.offset for item in result.value if type(item) in (Reduced, Persistent)]
        if type(result.value) is tuple
        else None,
    )


def stories(data: bytes, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the reports with and without the fast path."""
    first = story(data)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "read_calls", lambda *arguments: arguments[2])
        return first, story(data)


class Matches(list[int]):
    """How many tensors :func:`read_calls` found, each time it was asked."""

    def __call__(
        self, state: State, stack: list[Any], position: int, segment: int, numbers: Numbers
    ) -> int:
        before = len(stack)
        end = read_calls(state, stack, position, segment, numbers)
        self.append(sum(type(value) is Reduced for value in stack[before:]))
        assert (end > position) == bool(self[-1])
        return end


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> Matches:
    noted = Matches()
    monkeypatch.setattr(machine, "read_calls", noted)
    return noted


TENSORS = [
    tensor(),
    tensor(key=b"0"),
    tensor(key=b"9" * 255),
    tensor(count=b"M\0\1"),
    tensor(count=b"J\0\0\1\0"),
    tensor(count=b"J\xff\xff\xff\xff"),
    tensor(offset=b"M\xff\xff"),
    tensor(offset=b"J\0\0\0\x80"),
    tensor(size=b"K\6\x85", stride=b"K\1\x85"),
    tensor(size=b"K(M((J((((\x87", stride=b"KtM\x85\x86JKMJt\x87"),
    tensor(size=b"(K\1K\2K\3K\1t", stride=b"(K\6K\3K\1K\1t"),
    tensor(size=b"(K\1K\2K\3K\1M\1\0J\1\0\0\0t", stride=b"(K\6K\3K\1K\1K\0K\0t"),
    tensor(size=b"K\n\x85", stride=b"M\r\n\x85"),
]


@pytest.mark.parametrize("which", range(len(TENSORS)))
def test_makes_the_same_value_as_the_single_opcodes(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, single = stories(pickled(TENSORS[which], AFTER), monkeypatch)
    assert whole == single
    assert whole[1] == len(pickled(TENSORS[which], AFTER))


@pytest.mark.parametrize("which", range(len(TENSORS)))
def test_reads_a_tensor_at_once(which: int, matches: Matches) -> None:
    value = run(pickled(TENSORS[which], AFTER)).value
    assert matches == [1, 1]
    assert [type(item) for item in value[:2]] == [Reduced, Reduced]


def test_memoizes_the_parts_of_a_tensor(matches: Matches) -> None:
    value = run(pickled(tensor())).value
    call, text, identifier, size, stride, hooks, arguments, again = value
    assert matches == [1]
    assert again is call
    assert call.arguments is arguments
    assert arguments[2] is size
    assert arguments[3] is stride
    assert arguments[5] is hooks
    assert arguments[0].identifier is identifier
    assert identifier[2] is text


@pytest.mark.parametrize(
    "other",
    [
        tensor(key=b""),
        tensor(key=b"a"),
        tensor(key=b"9" * 256),
        tensor(count=b"\x8a\1\6"),
        tensor(offset=b"U\1a"),
        tensor(size=b")", stride=b")"),
        tensor(size=b"(K\1K\2K\3K\4K\5K\6K\7t"),
        tensor(size=b"K\1K\2\x85"),
        tensor(size=b"K\1N\x86"),
        tensor().replace(b"\x89", b"\x88"),
        tensor().replace(b"X\2\0\0\0", b"X\1\0\0\0"),
        tensor().replace(b"h\0(", b"h\2("),
        tensor().replace(b"h\0(", b"h\4("),
        tensor().replace(b"h\0(", b"h\1("),
        tensor().replace(b"h\0(", b"h\x63("),
        tensor().replace(b"h\4", b"h\0"),
        tensor().replace(b"h\4", b"h\1"),
        tensor().replace(b"h\4", b"h\x63"),
        tensor().replace(b"h\3", b"h\x63"),
        tensor().replace(put(KNOWN), put(3)),
        *[tensor().replace(put(KNOWN + part), put(4)) for part in range(4)],
        *[tensor().replace(put(KNOWN + part), put(99)) for part in range(7)],
        *[tensor().replace(put(KNOWN + part), put(KNOWN + part + 1)) for part in range(6)],
        tensor(first=0),
        tensor(first=KNOWN - 1),
        tensor(first=KNOWN + 1),
        b"Nr\7\0\0\0" + tensor(),
        tensor()[:-1],
    ],
)
def test_leaves_other_tensors_to_the_single_opcodes(
    other: bytes, matches: Matches, monkeypatch: pytest.MonkeyPatch
) -> None:
    story(pickled(other))
    assert not any(matches)
    monkeypatch.undo()
    whole, single = stories(pickled(other), monkeypatch)
    assert whole == single


@pytest.mark.slow
def test_a_changed_byte_changes_both_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    body = tensor()
    for at in range(len(body)):
        for change in {body[at] ^ 1 << bit for bit in range(8)} | set(b"\0\3\4(012QRthrKMJX\x85"):
            changed = body[:at] + bytes([change]) + body[at + 1 :]
            whole, single = stories(pickled(changed), monkeypatch)
            assert whole == single, (at, change)


def test_reports_truncation_in_every_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickled(tensor())
    for size in range(len(HEAD), len(data)):
        whole, single = stories(data[:size], monkeypatch)
        assert whole == single


NAMES = [b"a.weight", b"", "größe".encode(), b"n" * 255, b"n" * 256, b"\xed\xa0\x80", b"X\1\0\0\0"]


@pytest.mark.parametrize("name", NAMES)
def test_reads_the_name_between_two_tensors_at_once(
    name: bytes, matches: Matches, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = pickled(tensor(), named(name, KNOWN + 7), named(b"last", KNOWN + 15))
    run(data)
    assert sum(matches) == 3
    assert len(matches) == (1 if len(name) < 256 else 2)
    monkeypatch.undo()
    whole, single = stories(data, monkeypatch)
    assert whole == single


@pytest.mark.parametrize(
    "entry",
    [
        named(b"\xff", KNOWN + 7),
        named(b"a", KNOWN + 7, slot=KNOWN + 6),
        named(b"a", KNOWN + 7, slot=99),
        named(b"a", KNOWN + 8),
        named(b"a", KNOWN + 7)[:-6] + b"R",
        b"X\1\0\0\0",
        b"X\1\0\0\0a" + put(KNOWN + 7) + b"K\1",
        b"X\xff\0\0\0a" + put(KNOWN + 7),
    ],
)
def test_leaves_a_name_without_a_complete_tensor_to_the_single_opcodes(
    entry: bytes, matches: Matches, monkeypatch: pytest.MonkeyPatch
) -> None:
    story(pickled(tensor(), entry))
    assert matches[0] == 1
    assert sum(matches) == 1
    monkeypatch.undo()
    whole, single = stories(pickled(tensor(), entry), monkeypatch)
    assert whole == single


def test_looks_at_the_limits_between_runs_of_tensors(matches: Matches) -> None:
    entries = [named(b"n%d" % index, KNOWN + 8 * index) for index in range(1000)]
    value = run(HEAD + b"(" + b"".join(entries) + b"t.").value
    assert sum(matches) == 1000
    assert len(value) == 2000
    assert max(matches) < 200
    assert len(matches) > 5


def test_reads_numbers_once() -> None:
    numbers = Numbers()
    assert numbers[b"(K\0M\0\x80J\xff\xff\xff\xffKKt"] == (0, 32768, -1, 75)
    assert numbers[b"K\1\x85"] is numbers[b"K\1\x85"]
    assert len(numbers) == 2


@pytest.mark.slow
def test_reads_most_tensors_of_torch_at_once(
    matches: Matches, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(1,), (300,), (2, 3), (4, 1, 300), (2, 1, 3, 3), (1, 2, 1, 2, 70_000)]
    tensors = {f"layer.{index}": torch.zeros(shapes[index % 6]) for index in range(120)}
    file = io.BytesIO()
    torch.save(tensors, file)
    with zipfile.ZipFile(file) as archive:
        data = archive.read("archive/data.pkl")
    value = run(data).value
    assert sum(matches) > 60
    assert [call.arguments[2] for call in value.values()] == [shapes[i % 6] for i in range(120)]
    monkeypatch.undo()
    whole, single = stories(data, monkeypatch)
    assert whole == single
