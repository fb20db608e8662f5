"""Small checkpoints that demand much memory or time, of which the reader uses little."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from itertools import repeat

import pytest

from tests.support.checkpoints import (
    GOOD,
    MIB,
    VALUES,
    Reader,
    call,
    deflated_file,
    described,
    entries,
    legacy_file,
    listed,
    mapping,
    members,
    named,
    number,
    numbers,
    pickled,
    refusal,
    several,
    storage,
    tensor,
    tensors,
    text,
    zip_file,
)
from tests.support.zip_files import Member, make_zip

Write = Callable[..., bytes]

# Bombs that take seconds come in one or two kinds of container: limits of what a pickle does are those of the
# machine that reads it, whatever the pickle was in. Each container, and each bomb, is tried at least once.
in_zip = pytest.mark.parametrize("written", [zip_file])
in_zip_and_legacy = pytest.mark.parametrize("written", [zip_file, legacy_file])

GOOD_DICT = mapping(w=tensor())
DOUBLED = b")" + b"2\x86" * 60
"""A tuple that holds the previous tuple twice, 60 levels deep: DUP, TUPLE2."""


def slot(number: int) -> bytes:
    return struct.pack("<I", number)


def padding(size: int) -> bytes:
    """Return ``size`` bytes of opcodes without effect: limits may depend on the size."""
    return b"B" + slot(size) + bytes(size) + b"0"


def copies(piece: bytes, times: int) -> bytes:
    """Return a deflate stream of repeated ``piece``, without holding all of it in memory."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packer.compress(piece)
    first = packer.flush(zlib.Z_FULL_FLUSH)  # nothing after it refers back
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    again = packer.compress(piece) + packer.flush(zlib.Z_FULL_FLUSH)
    assert first or again
    return (first or again) * times + zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS).flush()


def repeated(member: Member, piece: bytes, times: int) -> Member:
    """Return a compressed entry of repeated ``piece``, without a checksum."""
    fields = {"size": len(piece) * times, "crc": 0}
    return Member(member.name, b"", 8, copies(piece, times), local=fields, listed=fields)


@pytest.mark.parametrize(
    "value",
    [
        *(entries((DOUBLED, number(1))), DOUBLED + b")R", DOUBLED + b"Q", several(DOUBLED) + b"Q"),
        call(named("torch._utils", "_rebuild_tensor_v2"), DOUBLED),
        several(text("storage"), DOUBLED, text("0"), text("cpu"), number(4)) + b"Q",
        several(text("storage"), named("torch", "FloatStorage"), DOUBLED, b"N", number(4)) + b"Q",
        several(text("storage"), named("torch", "FloatStorage"), text("0"), b"N", DOUBLED) + b"Q",
        *(tensor(size=DOUBLED), tensor(stride=DOUBLED), tensor(offset=DOUBLED), tensor(of=DOUBLED)),
        *(tensor(more=[flags]) for flags in (entries((DOUBLED, b"\x88")), mapping(conj=DOUBLED))),
        call(named("torch._tensor", "_rebuild_from_type_v2"), DOUBLED, b"N", DOUBLED, b"N"),
        call(named("torch._utils", "_rebuild_parameter"), DOUBLED, b"\x89", b"N"),
        call(named("builtins", "frozenset"), b"](" + DOUBLED + b"e"),
        call(named("_codecs", "encode"), DOUBLED, text("latin1")),
        call(named("_codecs", "encode"), text("x"), DOUBLED),
        call(named("builtins", "bytes"), DOUBLED),
        call(named("collections", "OrderedDict"), b"](" + several(DOUBLED, b"N") + b"e"),
        call(named("torch", "Size"), DOUBLED),
        *(DOUBLED + text("name") + b"\x93", text("module") + DOUBLED + b"\x93", DOUBLED + b"}b"),
        *(tensor() + DOUBLED + b"b", b"\x8f(" + DOUBLED + b"\x90", DOUBLED),
    ],
)
def test_a_tuple_doubled_60_times_does_not_hang(
    value: bytes, written: Write, reader: Reader
) -> None:
    assert not reader.take(written(pickled(mapping(w=tensor(), x=value), 4))).error
    assert not reader.take(written(pickled(value, 4))).error
    assert not reader.take(written(pickled(mapping(w=tensor(), x=value), 4)), None).error


def test_a_list_doubled_60_times_does_not_hang(written: Write, reader: Reader) -> None:
    value = b"]" + b"".join(
        b"q" + bytes([index]) + b"](h" + bytes([index]) + b"h" + bytes([index]) + b"e"
        for index in range(60)
    )
    data = written(pickled(b"(" + value + b"l"))
    assert not reader.take(data).error


@pytest.mark.parametrize("of", ["]q\x00h\x00a", "}q\x00X\x01\x00\x00\x00kh\x00s"])
def test_refuses_a_container_that_contains_itself(of: str, written: Write, reader: Reader) -> None:
    data = written(pickled(mapping(w=tensor(), x=of.encode("latin-1"))))
    assert "nested more than 64 levels" in refusal(reader, data)


def test_refuses_20_million_marks(written: Write, reader: Reader) -> None:
    if written is not legacy_file:  # which cannot be compressed
        message = refusal(reader, written(pickled(b"(" * 20_000_000 + GOOD_DICT)))
        assert ("limit" if written is deflated_file else "marks") in message
    if written is not zip_file:
        assert "marks" in refusal(reader, written(pickled(b"(" * 3 * MIB + GOOD_DICT)))


def test_refuses_a_pickle_of_512_mib(reader: Reader) -> None:
    parts = members(b"")
    parts["data.pkl"] = repeated(parts["data.pkl"], b"N0" * (MIB // 2), 512)
    data = make_zip(list(parts.values()))
    assert len(data) < MIB
    assert "pickles of at most 67108864 are read" in refusal(reader, data)


def test_refuses_records_of_a_gib(reader: Reader) -> None:
    for name in ("version", "byteorder"):
        parts = members(pickled(GOOD_DICT))
        parts[name] = repeated(parts[name], bytes(MIB), 1024)
        assert "over the limit of 1024" in refusal(reader, make_zip(list(parts.values())))


def test_inspection_skips_pickles_that_are_bombs(reader: Reader) -> None:
    bomb = repeated(Member(b""), b"N0" * (MIB // 2), 512)
    bombs = [
        Member(f"archive/{index}.pkl".encode(), b"", 8, bomb.data, listed=bomb.listed)
        for index in range(100)
    ]
    for member in bombs:
        member.local = bomb.local
    asking = pickled(named("os", "system") + b"0" + GOOD_DICT)
    data = make_zip([*bombs, *members(asking).values()])
    outcome = reader.read(reader.write(data), inspect=True)
    assert not outcome.error
    assert "os.system" in outcome.globals
    assert "it uses" in outcome.refusal


def test_refuses_a_storage_of_a_gib_in_one_mib(reader: Reader) -> None:
    count = 2**28
    for size in ((count,), (2, 2)):
        strides = (1,) if len(size) == 1 else (2, 1)
        value = mapping(w=tensor(size, strides, of=storage(count=count)))
        parts = members(pickled(value))
        parts["data/0"] = repeated(parts["data/0"], bytes(MIB), 1024)
        data = make_zip(list(parts.values()))
        assert len(data) < 2 * MIB
        assert "times the file" in refusal(reader, data)


def test_refuses_a_storage_that_is_larger_than_stated(reader: Reader) -> None:
    parts = members(pickled(GOOD_DICT))
    member = repeated(parts["data/0"], bytes(MIB), 1024)
    fields = {"size": 16, "crc": 0}
    parts["data/0"] = Member(member.name, b"", 8, member.data, local=fields, listed=fields)
    assert "more than its 16 bytes" in refusal(reader, make_zip(list(parts.values())))


def test_refuses_2_to_the_38_elements_expanded_from_one(written: Write, reader: Reader) -> None:
    value = mapping(w=tensor((2**38,), (0,), of=storage(count=1)))
    assert "times the file" in refusal(reader, written(pickled(value), {"0": VALUES[:4]}))
    value = mapping(w=tensor((2**20, 2**20, 2**20), (0, 0, 0), of=storage(count=1)))
    assert "times the file" in refusal(reader, written(pickled(value), {"0": VALUES[:4]}))


def test_reads_a_small_expanded_tensor(written: Write, reader: Reader) -> None:
    value = mapping(w=tensor((1000,), (0,), of=storage(count=1)))
    data = written(pickled(value), {"0": VALUES[:4]})
    assert tensors(reader, data) == {"w": described(VALUES[:4] * 1000, [1000])}


@in_zip_and_legacy
def test_refuses_20_000_expanded_tensors(written: Write, reader: Reader) -> None:
    one = tensor((2**20,), (0,), of=storage(count=1))
    value = b"}(" + b"".join(text(f"w{index}") + one for index in range(20_000)) + b"u"
    assert "times the file" in refusal(reader, written(pickled(value), {"0": VALUES[:4]}))


@in_zip_and_legacy
def test_reads_20_000_names_of_one_tensor(written: Write, reader: Reader) -> None:
    first = text("w") + tensor() + b"q\x00"
    value = b"}(" + first + b"".join(text(f"{i}") + b"h\x00" for i in range(20_000)) + b"u"
    found = tensors(reader, written(pickled(value)))
    assert len(found) == 20_001
    assert found["w"] == found["777"] == GOOD


@pytest.mark.parametrize(
    ("nested", "written"),
    [
        (b")" + b"\x85" * MIB, deflated_file),
        (b"]" * 200_000 + b"a" * 199_999, zip_file),
        (b"]" * 200_000 + b"a" * 199_999, legacy_file),
    ],
    ids=["tuples", "lists", "lists, legacy"],
)
def test_refuses_deep_nesting(nested: bytes, written: Write, reader: Reader) -> None:
    data = written(pickled(mapping(w=tensor(), x=nested)))
    assert "nested more than 64 levels" in refusal(reader, data)
    assert tensors(reader, written(pickled(nested + b"0" + GOOD_DICT))) == {"w": GOOD}
    assert not reader.take(written(pickled(entries((nested, tensor()))))).error


def test_nested_calls_and_references_do_not_hang(written: Write, reader: Reader) -> None:
    function = named("torch", "device") + b"q\x00"
    value = function + b"h\x00" * 100_000 + b")R" + b"\x85R" * 100_000
    assert tensors(reader, written(pickled(mapping(w=tensor(), x=value)))) == {"w": GOOD}
    assert "reference" in refusal(
        reader, written(pickled(b"N" + b"Q" * 100_000 + b"0" + GOOD_DICT))
    )


def test_refuses_100_000_dimensions(written: Write, reader: Reader) -> None:
    many = numbers(*repeat(1, 100_000))
    value = mapping(w=tensor(many, many))
    assert "100000 dimensions" in refusal(reader, written(pickled(value)))


@pytest.mark.parametrize(
    "digits",
    [
        *[b"L" + b"9" * count + b"L\n" for count in (3_000_000, 60_000, 5_000)],
        *[opcode + b"9" * 3_000_000 + b"\n" for opcode in (b"I", b"F", b"g", b"V")],
        b"\x8b" + struct.pack("<i", 3 * MIB) + b"\xee" * (3 * MIB),
    ],
    ids=["LONG", "LONG, 60,000", "LONG, 5,000", "INT", "FLOAT", "GET", "UNICODE", "LONG4"],
)
def test_refuses_numbers_of_millions_of_digits(
    digits: bytes, written: Write, reader: Reader
) -> None:
    assert "pickle byte" in refusal(reader, written(pickled(mapping(w=tensor(), x=digits))))


@pytest.mark.parametrize("number_", [2**8000, -(2**8000)])
def test_numbers_of_thousands_of_digits_are_safe_in_messages(
    number_: int, written: Write, reader: Reader
) -> None:
    large = number(number_)
    assert tensors(reader, written(pickled(mapping(w=tensor(), x=large)))) == {"w": GOOD}
    for value in (
        tensor(size=several(large)),
        tensor(stride=several(large, large)),
        tensor(offset=large),
        tensor(of=storage(count=large)),
        entries((large, tensor())),
        entries((text("w"), tensor()), (large, listed(tensor()))),
    ):
        assert not reader.take(written(pickled(mapping(w=value)))).error


@pytest.mark.parametrize(
    ("function", "argument", "written"),
    [
        (named("builtins", "frozenset"), listed(b"N" * 500_000), zip_file),
        (named("builtins", "set"), b"(" + b"N" * 500_000 + b"t", deflated_file),
        (named("builtins", "bytes"), listed(b"K\x01" * 500_000), legacy_file),
        (named("collections", "OrderedDict"), listed(*repeat(b"(NNt", 20_000)), zip_file),
        (named("collections", "Counter"), entries(*repeat((b"N", b"N"), 20_000)), legacy_file),
    ],
)
def test_refuses_one_list_copied_100_000_times(
    function: bytes, argument: bytes, written: Write, reader: Reader
) -> None:
    for end in (b"e", b"1N"):  # kept, and dropped
        calls = b"](" + b"h\x00h\x01\x85R" * 100_000 + end
        value = function + b"q\x000" + argument + b"q\x010" + mapping(w=tensor(), x=calls)
        outcome = reader.take(written(pickled(value)))
        assert not outcome.error
        assert "copies its" in outcome.refusal


def test_refuses_one_text_encoded_100_000_times(written: Write, reader: Reader) -> None:
    value = text("a" * MIB) + b"q\x000" + text("latin1") + b"q\x010" + named("_codecs", "encode")
    calls = b"](" + b"h\x02h\x00h\x01\x86R" * 100_000 + b"e"
    data = written(pickled(value + b"q\x020" + mapping(w=tensor(), x=calls)))
    assert "copies its" in refusal(reader, data)


@in_zip
def test_colliding_keys_do_not_hang(written: Write, reader: Reader) -> None:
    # Integers hash to themselves modulo this prime.
    keys = b"".join(number(index * (2**61 - 1)) + b"N" for index in range(1, 100_000))
    data = written(pickled(mapping(w=tensor(), x=b"}(" + keys + b"u")))
    assert tensors(reader, data) == {"w": GOOD}


def collide_in_memory() -> bytes:
    """Return opcodes that memoize values under numbers that collide.

    A dict probes slot 5 * n + 1 after slot n, once the upper bits are used up. So the numbers first
    fill most of one probe sequence, and then all start at its beginning.
    """
    bits, length = 20, 600_000
    mask = (1 << bits) - 1
    way, place = [], 0
    for _ in range(length):
        way.append(place)
        place = (5 * place + 1) & mask
    position = {place: index for index, place in enumerate(way)}
    late: list[int] = []
    candidate = 1 << bits
    while len(late) < 100:
        candidate += 4099
        place, upper = candidate & mask, candidate
        while upper and place in position:
            upper >>= 5
            place = (5 * place + upper + 1) & mask
        if not upper and position.get(place, length) < 30_000:
            late.append(candidate)
    puts = b"".join(b"r" + slot(index) for index in [*way, *late])
    return b"N" + puts + b"".join(b"j" + slot(index) + b"0" for index in late) * 2000 + b"0"


def test_colliding_memo_numbers_do_not_hang(reader: Reader) -> None:
    assert not reader.take(zip_file(pickled(collide_in_memory() + GOOD_DICT))).error


def test_refuses_too_many_globals(written: Write, reader: Reader) -> None:
    names = b"".join(named("torch", f"x{index}") + b"0" for index in range(100_000))
    assert "globals" in refusal(reader, written(pickled(names + GOOD_DICT)))


def test_refuses_too_many_references(reader: Reader) -> None:
    many = b"N" + b"Q" * 2 * MIB + b"0" + b"NQ0" * 3 * MIB
    outcome = reader.take(zip_file(pickled(many + GOOD_DICT)), memory=1024 * MIB)
    assert "objects" in outcome.refusal


def test_refuses_too_many_containers(reader: Reader) -> None:
    value = b"](" + (b"(" + b"}NNs" * 1000 + b"l") * 4500 + b"e0" + GOOD_DICT
    outcome = reader.take(zip_file(pickled(value)), memory=1024 * MIB)
    assert "objects" in outcome.refusal


def test_a_compressed_pickle_has_a_lower_limit(reader: Reader) -> None:
    value = mapping(w=tensor(), x=b"]" + (b"(" + b"M\0\2" * 1000 + b"e") * 1300)
    assert tensors(reader, deflated_file(pickled(value))) == {"w": GOOD}
    value = mapping(w=tensor(), x=b"]" + (b"(" + b"M\0\2" * 1000 + b"e") * 1500)
    assert "limit" in refusal(reader, deflated_file(pickled(value)))


@pytest.mark.parametrize("item", [tensor(), b"N", b"]", b"}", b")"])
def test_refuses_items_that_are_shared_too_often(
    item: bytes, written: Write, reader: Reader
) -> None:
    value = (
        (item + b"q\x00" + listed(b"h\x00" * 1000) + b"q\x01")
        + (listed(b"h\x01" * 1000) + b"q\x02" + listed(b"h\x02" * 1000) + b"q\x03")
        + padding(3 * MIB)
        + mapping(w=tensor(), x=b"h\x03")
    )
    data = written(pickled(b"(" + value + b"1" + value))
    assert refusal(reader, data)


def test_refuses_lists_with_millions_of_uses_of_one_tensor(reader: Reader) -> None:
    value = tensor() + b"q\x000]" + (b"(" + b"h\x00" * 1000 + b"e") * 4000
    assert "tensors" in refusal(reader, zip_file(pickled(value)))


@in_zip
def test_refuses_a_module_used_a_million_times(written: Write, reader: Reader) -> None:
    hidden = call(named("builtins", "set"), listed(text("x") * 100_000))
    parts = mapping(
        _parameters=b"}", _buffers=b"}", _modules=b"}", _non_persistent_buffers_set=hidden
    )
    value = named("evil", "M") + b")\x81" + parts + b"bq\x000"
    data = written(pickled(value + mapping(w=tensor(), x=listed(b"h\x00" * MIB))))
    assert "shares its parts too often" in refusal(reader, data)


@pytest.mark.parametrize("depth", [1, 3, 60])
def test_refuses_long_keys_above_many_tensors(depth: int, written: Write, reader: Reader) -> None:
    value = listed(b"h\x00" * 50_000)
    for _ in range(depth):
        value = entries((b"h\x01", value))
    first = tensor() + b"q\x000" + text("a" * 3 * MIB) + b"q\x010"
    assert "characters" in refusal(reader, written(pickled(first + value)))


def test_limits_apply_to_pickles_of_a_legacy_header(reader: Reader) -> None:
    good = legacy_file(pickled(GOOD_DICT))
    facts = pickled(mapping(protocol_version=number(1001), little_endian=b"\x88"))
    assert good.count(facts) == 1
    for bomb in (b"(" * 3 * MIB, b"]" * 3 * MIB, b"N\x94" * 9 * MIB):
        data = good.replace(facts, b"\x80\x02" + bomb)
        assert reader.take(data).refusal


@pytest.mark.parametrize("order", [b"little", b"big"])
@pytest.mark.parametrize("method", [0, 8])
def test_refuses_20_000_tensors_spread_over_one_large_storage(
    order: bytes, method: int, reader: Reader
) -> None:
    count = 4 * MIB
    one = tensor((2,), (count - 1,), of=storage(count=count))
    value = b"}(" + b"".join(text(f"w{index}") + one for index in range(20_000)) + b"u"
    parts = members(pickled(value), {"0": bytes(4 * count)}, method=method)
    parts["byteorder"].content = order
    assert "have to be read" in refusal(reader, make_zip(list(parts.values())))


def test_refuses_20_000_tensors_of_two_large_compressed_storages_in_turn(reader: Reader) -> None:
    count = 4 * MIB
    value = b"}("
    for index in range(10_000):
        for key in ("0", "1"):
            one = tensor((1,), (1,), of=storage(key, count=count), offset=index * 40)
            value += text(f"w{index}.{key}") + one
    data = deflated_file(pickled(value + b"u"), {"0": bytes(4 * count), "1": bytes(4 * count)})
    assert "have to be read" in refusal(reader, data)
