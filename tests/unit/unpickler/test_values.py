from __future__ import annotations

from typing import Any

import pytest

from blobstore.unpickler.values import (
    Global,
    Items,
    Key,
    Number,
    Persistent,
    Record,
    Reduced,
)

FUNCTION = Global("os", "system", 3)


def records() -> list[Any]:
    return [
        Global("os", "system", 3),
        Reduced(FUNCTION, (1,), 5),
        Record(FUNCTION, (1,), 5),
        Persistent("a", 5),
        Items([1]),
        Key(1.5),
    ]


@pytest.mark.parametrize("which", range(6))
def test_compares_and_hashes_by_identity(which: int) -> None:
    first, second = records()[which], records()[which]
    assert first != second
    assert len({first, second, first}) == 2


@pytest.mark.parametrize("which", range(6))
def test_has_no_other_attributes(which: int) -> None:
    record = records()[which]
    with pytest.raises(AttributeError):
        record.items_of_an_attacker = 1
    assert not hasattr(record, "__dict__")


@pytest.mark.parametrize(
    "record",
    [
        Reduced(FUNCTION, ("inside",), 0),
        Record(FUNCTION, ("inside",), 0),
        Persistent("inside", 0),
        Items(["inside"]),
        Key("inside"),
    ],
)
def test_is_shown_without_what_it_refers_to(record: Any) -> None:
    assert "inside" not in repr(record)
    assert "inside" not in str(record)


def test_a_global_is_shown_as_module_and_name() -> None:
    assert str(FUNCTION) == "os.system"


def test_a_global_that_is_not_on_the_list_may_be_a_function() -> None:
    assert FUNCTION.use is None
    assert FUNCTION.make is None
    assert FUNCTION.is_function
    assert not FUNCTION.is_class
    assert not FUNCTION.is_called


def test_records_have_no_state_and_no_entries_at_first() -> None:
    first, second = Record(FUNCTION, (), 1), Record(FUNCTION, (), 1)
    assert first.state is None
    assert first.entries == {}
    assert first.entries is not second.entries
    assert Reduced(FUNCTION, (), 1).state is None
    assert Persistent("a", 1).meaning is None


def test_equal_numbers_are_one_key() -> None:
    assert {Number(2): "a"} == {Number(2): "a"}
    assert Number(2) == 2
    assert str(Number(-7)) == "-7"
    assert len({Number(2**100), Number(2**100), Number(3)}) == 2


def test_numbers_do_not_hash_to_where_a_file_chooses() -> None:
    prime = 2**61 - 1  # to which Python reduces integers
    assert len({hash(index * prime) for index in range(100)}) == 1
    assert len({hash(Number(index * prime)) for index in range(100)}) > 90


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrap",
    [
        lambda inner: Persistent(inner, 0),
        lambda inner: Reduced(FUNCTION, (inner,), 0),
        lambda inner: Record(FUNCTION, (inner,), 0),
        lambda inner: Items([inner]),
        Key,
    ],
    ids=["persistent", "reduced", "record", "items", "key"],
)
def test_long_chains_are_freed_without_recursion(wrap: Any) -> None:
    chain: Any = None
    for _ in range(100_000):
        chain = wrap(chain)
    del chain
