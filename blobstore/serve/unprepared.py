"""Exceptions of requests that cannot be answered yet: the work that has to be done first."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, cast

from blobstore.core import capacity
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from blobstore.core.capacity import Capacity

Result = TypeVar("Result")


class BodyNeeded(Exception):
    """The head of a request allows an answer. Read the body, and ask again."""


class NotPrepared(Exception):
    """Work has to be done before the question can be answered. Call ``prepare`` on a thread, and ask again.

    Work with an equal ``key`` is the same, and need not be done twice at once.
    """

    is_counted = True
    """Whether metrics count it. They must not show that there are names which a client may not see."""
    threads = capacity.PREPARE
    """The row of the threads that do it."""
    pause = 0.1
    """Seconds until the same work is asked for again, because another thread has not finished it."""

    def __init__(
        self, prepare: Callable[..., object], *key: object, threads: Capacity | None = None
    ) -> None:
        super().__init__("call prepare, and ask again")
        self.threads = threads or self.threads
        self.prepare: Callable[[], object] = partial(prepare, *key)
        self.key = (prepare, *key)


class NotListed(NotPrepared):
    """Names, or their manifests or origins, have to be listed first."""

    is_counted = False


class NotFetched(NotPrepared):
    """The work waits for another server, which may take its time."""

    is_counted = False
    threads = capacity.FETCH


class List(NotPrepared):
    """The answer is a list, which takes its time to make. What ``prepare`` returns is the answer itself."""

    is_counted = False
    threads = capacity.LIST

    def __init__(self, make: Callable[[], object], *key: object) -> None:
        super().__init__(make)
        self.prepare = partial(prepared, make)
        self.key = (List, *key)


class ListOfAll(List):
    """The list is one of all models, for which those of one model do not wait."""

    threads = capacity.LIST_ALL


def prepared(question: Callable[[], Result]) -> Result:
    """Return the answer to a question after doing all the work for it here, on a thread. Raises as that work."""
    needed = set()
    while True:
        try:
            return question()
        except List as first:
            return cast("Result", first.prepare())
        except NotPrepared as first:
            if first.key in needed:
                time.sleep(first.pause)
            needed.add(first.key)
            first.prepare()


class OnlyHere(BlobstoreError):
    """The damaged model is the store's own, so no other server is asked for it."""


_WAIT_SECONDS: Final = 5.0
"""Seconds that a thread waits for files that arrive, less than clients do. They then ask again."""


def wait_for(event: threading.Event) -> None:
    """Wait until something has arrived, or for a while."""
    event.wait(_WAIT_SECONDS)
