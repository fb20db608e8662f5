"""Documents of strangers share one budget of memory in the process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blobstore.core import limits, strict_json
from blobstore.core.limits import Budget, Crowded, Held, Limit, Memory, read_document
from blobstore.errors import RemoteError

ENTRY = b'{"a":0},'
COST = strict_json.memory_of(ENTRY)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Memory for ten entries."""
    memory = Memory(10 * COST)
    monkeypatch.setattr(limits, "DOCUMENTS", memory)
    return memory


def test_a_document_holds_what_it_takes_to_parse_it_as_long_as_it_is_there(memory: Memory) -> None:
    document = read_document([ENTRY, ENTRY], 100, "it")
    assert document == ENTRY * 2
    assert memory.taken == 2 * COST
    other = document
    del document
    assert memory.taken == 2 * COST
    del other
    assert memory.taken == 0


def test_a_document_is_refused_while_it_is_read_if_others_take_the_memory(memory: Memory) -> None:
    read = []

    def pieces() -> Iterator[bytes]:
        for number in range(10):
            read.append(number)
            yield ENTRY

    first = read_document([ENTRY] * 8, 100, "first")
    with pytest.raises(Crowded, match=r"second: this process reads too many large documents now"):
        read_document(pieces(), 100, "second")
    assert len(read) == 3
    assert memory.taken == 8 * COST, "what was read of the second is free"
    del first
    assert read_document(pieces(), 100, "second")


def test_a_document_that_no_process_has_the_memory_for_is_no_matter_of_others(
    memory: Memory,
) -> None:
    with pytest.raises(RemoteError, match="it would take more than") as caught:
        read_document([ENTRY] * 11, 100, "it")
    assert not isinstance(caught.value, Crowded)
    assert memory.taken == 0


def test_a_document_of_too_many_bytes_is_not_read_on(memory: Memory) -> None:
    pieces = iter([ENTRY] * 5)
    with pytest.raises(RemoteError, match="it: more than 20 bytes"):
        read_document(pieces, 20, "it")
    assert len(list(pieces)) == 2
    assert memory.taken == 0


def test_an_error_of_the_reader_releases_the_memory(memory: Memory) -> None:
    def pieces() -> Iterator[bytes]:
        yield ENTRY
        raise OSError("lost")

    with pytest.raises(OSError, match="lost") as caught:
        read_document(pieces(), 100, "it")
    assert memory.taken == 0, caught


def test_memory_is_released_once(memory: Memory) -> None:
    held = Held()
    held.add(COST, "it")
    held.add(COST, "it")
    with pytest.raises(Crowded):
        Held().add(9 * COST, "other")
    assert memory.taken == 2 * COST
    held.release()
    held.release()
    del held
    assert memory.taken == 0


def test_what_is_over_a_budget_is_not_counted() -> None:
    budget = Budget(Limit(0, 10, 2), "the list")
    budget.spend(5)
    with pytest.raises(RemoteError, match="the list: more than 10 bytes"):
        budget.spend(6)
    budget.spend(5)
    with pytest.raises(RemoteError, match="the list: more than 2 entries"):
        budget.spend(0)
