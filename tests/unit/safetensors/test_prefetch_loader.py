"""Loading in the background: order, bounds, errors and ends. Groups here are plain Python."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from blobstore.safetensors import SafetensorError
from blobstore.safetensors.prefetch_loader import PrefetchLoader, attempt

SECONDS = 120


class Letters:
    """Gives each letter of a text, of 10 bytes each, after one request per letter."""

    stream = None

    def __init__(self, text: str, request: Callable[[], object] = lambda: None) -> None:
        self.text = text
        self.request = request
        self.sizes: Mapping[str, int] = dict.fromkeys(text, 10)
        self.is_begun = threading.Event()

    def begin(self) -> list[Callable[[], object]]:
        self.is_begun.set()
        return [self.request for _ in self.text]

    def build(self) -> Iterator[tuple[str, str]]:
        return ((letter, letter.upper()) for letter in self.text)


def refuse() -> None:
    raise OSError("no disk")


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name.startswith("blobstore-prefetch")]


@pytest.mark.parametrize("count", [1, 4])
def test_all_tensors_arrive_once(count: int) -> None:
    with PrefetchLoader([Letters("abc"), Letters("d"), Letters("")], threads=count) as loader:
        assert loader.names() == list("abcd")
        assert len(loader) == 4
        assert loader.take("c") == "C"
        assert dict(loader) == {"a": "A", "b": "B", "d": "D"}
        assert list(loader) == []


@pytest.mark.parametrize(("name", "what"), [("a", "was taken before"), ("x", "is not in the plan")])
def test_a_tensor_can_be_taken_once_if_it_is_in_the_plan(name: str, what: str) -> None:
    with PrefetchLoader([Letters("a")]) as loader:
        loader.take("a")
        with pytest.raises(SafetensorError, match=what):
            loader.take(name)


def test_no_more_is_loaded_than_may_be_in_flight() -> None:
    groups = [Letters(letter) for letter in "abcd"]
    with PrefetchLoader(groups, bytes_in_flight=20) as loader:
        assert groups[1].is_begun.wait(SECONDS)
        assert not groups[2].is_begun.wait(0.05)
        loader.take("a")
        assert groups[2].is_begun.wait(SECONDS)
        assert not groups[3].is_begun.wait(0.05)
        assert len(list(loader)) == 3


def test_a_tensor_that_is_waited_for_is_loaded_whatever_is_in_flight() -> None:
    groups = [Letters(letter) for letter in "abcd"]
    with PrefetchLoader(groups, bytes_in_flight=10, threads=1) as loader:
        assert loader.take("d") == "D"
        assert not groups[2].is_begun.is_set()
        assert sorted(dict(loader)) == ["a", "b", "c"]


def test_a_group_larger_than_the_bound_is_loaded_alone() -> None:
    with PrefetchLoader([Letters("abc"), Letters("def")], bytes_in_flight=1) as loader:
        assert sorted(dict(loader)) == list("abcdef")


def test_an_error_is_raised_where_its_tensors_are_taken() -> None:
    with PrefetchLoader([Letters("ab", refuse), Letters("c")]) as loader:
        assert loader.take("c") == "C"
        for name in "ab":
            with pytest.raises(OSError, match="no disk"):
                loader.take(name)


@pytest.mark.parametrize("method", ["begin", "build"])
def test_errors_of_groups_are_raised_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    group = Letters("a")
    monkeypatch.setattr(group, method, refuse)
    with PrefetchLoader([group]) as loader, pytest.raises(OSError, match="no disk"):
        list(loader)


def test_a_tensor_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Letters("abc")
    built = {"a": "a", "b": attempt(refuse), "c": "c"}
    monkeypatch.setattr(group, "build", built.items)
    with PrefetchLoader([group]) as loader:
        assert (loader.take("a"), loader.take("c")) == ("a", "c")
        with pytest.raises(OSError, match="no disk"):
            loader.take("b")


def test_tensors_that_were_built_before_an_error_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Iterator[tuple[str, str]]:
        yield "a", "A"
        refuse()

    group = Letters("ab")
    monkeypatch.setattr(group, "build", build)
    with PrefetchLoader([group]) as loader:
        assert loader.take("a") == "A"
        with pytest.raises(OSError, match="no disk"):
            loader.take("b")


def test_closing_ends_the_threads_and_those_who_wait() -> None:
    blocked, waiting = threading.Event(), threading.Event()
    caught: list[SafetensorError] = []

    def wait() -> None:
        waiting.set()
        try:
            loader.take("a")
        except SafetensorError as error:
            caught.append(error)

    loader = PrefetchLoader([Letters("a", lambda: blocked.wait(SECONDS)), Letters("b")])
    other = threading.Thread(target=wait)
    other.start()
    assert waiting.wait(SECONDS)
    loader.close()
    other.join(SECONDS)
    assert str(caught[0]) == "the loader is closed"
    blocked.set()
    for thread in threads():
        thread.join(SECONDS)
    assert not threads()
    with pytest.raises(SafetensorError, match="closed"):
        list(loader)


def test_a_loader_that_nobody_uses_ends() -> None:
    loader = PrefetchLoader([Letters(letter) for letter in "abc"], bytes_in_flight=1)
    assert threads()
    del loader
    gc.collect()
    for thread in threads():
        thread.join(SECONDS)
    assert not threads()


@pytest.mark.parametrize("options", [{"threads": 0}, {"bytes_in_flight": 0}])
def test_bounds_must_be_positive(options: dict[str, int]) -> None:
    with pytest.raises(SafetensorError, match="at least 1"):
        PrefetchLoader([], **options)


@pytest.mark.parametrize("name", ["threads", "bytes_in_flight"])
@pytest.mark.parametrize(
    ("value", "found"), [(2.5, "'float' object"), ("2", "'str' object"), (None, "'None'")]
)
def test_bounds_must_be_integers(name: str, value: Any, found: str) -> None:
    message = f"argument '{name}': {found} is not an instance of 'int'"
    with pytest.raises(TypeError, match=message):
        PrefetchLoader([], **{name: value})


def test_tensors_are_iterated_over_as_they_arrive() -> None:
    may_end = threading.Event()
    with PrefetchLoader([Letters("a", lambda: may_end.wait(SECONDS)), Letters("b")]) as loader:
        found = iter(loader)
        assert next(found) == ("b", "B")
        may_end.set()
        assert next(found) == ("a", "A")


def test_a_tensor_that_was_taken_and_dropped_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Letters("ab")
    monkeypatch.setattr(group, "build", lambda: ((name, {name}) for name in group.text))
    with PrefetchLoader([group]) as loader:
        tensor = weakref.ref(loader.take("a"))
        gc.collect()
        assert tensor() is None
        assert loader.take("b") == {"b"}
