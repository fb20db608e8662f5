"""Leases in object storage, so that garbage collection and imports of one store do not disturb each other.

Object storage has no locks, but a list shows every object that was written before. An import first writes
a lease, which names the blobs that it relies on, and then looks for the note of a collection. A collection
first writes that note, and then reads the leases. So one of the two always sees the other: either the
collection keeps the blobs of the lease, or the import waits until the collection has ended.

Both may be killed. A lease counts for a day after it was written, and the note of a collection for an
hour. So an import that took longer gives nothing a name, and a collection deletes nothing half an hour after it
wrote its note. Times of objects are those of the server; durations are measured by a clock that goes on while
the machine is suspended.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from blobstore.core import interrupts, limits, strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.system import seconds_since_start
from blobstore.errors import Conflict, RemoteError, StoreBusy
from blobstore.objects.response_rules import LOOK_FOR_COLLECTION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    from blobstore.objects.conditional_writes import ConditionalClient

LEASE_TIME: Final = timedelta(days=1)
COLLECTION_TIME: Final = timedelta(hours=1)
_LEASES: Final = ".blobstore/leases"
_NOTE: Final = ".blobstore/gc"
_MARGIN: Final = timedelta(minutes=10)
"""Longer than giving a name or ending a collection takes: after this time, neither is begun."""
_PAUSE: Final = 1.0
"""Seconds between two looks at the note of a collection."""
_MAX_LEASE: Final = limits.LEASE.one


@contextlib.contextmanager
def leased(
    client: ConditionalClient,
    digests: Iterable[Digest],
    wait: float = 60,
    pause: Callable[[float], object] = interrupts.sleep,
) -> Iterator[Callable[[], None]]:
    """Keep blobs from being collected until the block ends, whether they are there yet or not.

    Yields what raises StoreBusy if the lease has come to its end: to be called before a name is written.

    Args:
        client: the objects of the store.
        digests: the blobs.
        wait: seconds to wait for a collection that is running.
        pause: waits for some seconds.

    Raises:
        StoreBusy: a collection is running, and does not end in time.
        RemoteError: the object storage cannot be reached, denies access, or ignores conditions, so that no
            name could be written afterwards.
    """
    client.check_conditions()
    key = f"{_LEASES}/{uuid.uuid4().hex}"
    # Before the lease is written, so that it ends here before it does for a collection.
    end = seconds_since_start() + (LEASE_TIME - _MARGIN).total_seconds()

    def check() -> None:
        if seconds_since_start() > end:
            raise StoreBusy(
                f"the import into {quote(client.address)} took so long that its blobs may have been "
                "collected as garbage",
                advice="run it again: it sends only what is missing",
            )

    # The lease is written before the note is looked for; a collection does it the other way around.
    client.put(key, strict_json.dumps([digest.hex for digest in digests]).encode())
    try:
        until = time.monotonic() + wait
        while _is_collecting(client, _written(client, key)):
            if time.monotonic() >= until:
                raise _busy(client)
            pause(_PAUSE)
        yield check
    finally:
        with contextlib.suppress(RemoteError):  # it ends by itself
            client.delete([key])


class Leased(NamedTuple):
    """The objects that running imports rely on."""

    digests: set[Digest]
    since: datetime | None
    """When the oldest of them began; they may rely on any blob that was written since."""


class Collection:
    """A collection of garbage that is running."""

    def __init__(self, client: ConditionalClient) -> None:
        """Begin.

        Raises:
            StoreBusy: another collection is running.
            RemoteError: the object storage cannot be reached, or denies access.
        """
        self._client = client
        mine = uuid.uuid4().hex.encode()
        former = client.get(_NOTE, len(mine))
        # The age of the note is judged by the server's clock, which an object that was just written tells.
        probe = f"{_LEASES}/{mine.decode()}"
        client.put(probe, b"[]")
        now = _written(client, probe)
        client.delete([probe])
        if former is not None and _is_collecting(client, now):
            raise _busy(client)
        self._began = seconds_since_start()
        # Conditional on what was read: of two collections that begin at once, one fails.
        try:
            client.replace(_NOTE, mine, None if former is None else former.tag)
        except Conflict:
            raise _busy(client) from None
        self.now = now
        """By the server's clock."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lasted < COLLECTION_TIME - _MARGIN:  # else it may be another's by now
            with contextlib.suppress(RemoteError):  # it ends by itself
                self._client.delete([_NOTE])

    @property
    def may_delete(self) -> bool:
        """Whether imports still wait for this collection."""
        # Half of the time, so that deletions which are under way end before imports stop waiting.
        return self._lasted < COLLECTION_TIME / 2

    @property
    def _lasted(self) -> timedelta:
        return timedelta(seconds=seconds_since_start() - self._began)

    def leased(self) -> Leased:
        """Return the objects that imports rely on; remove the leases of imports that were killed long ago.

        Raises:
            RemoteError: a lease cannot be read.
        """
        found: set[Digest] = set()
        since: datetime | None = None
        budget = limits.Budget(limits.LEASE, f"leases in {quote(self._client.address)}")
        for item in self._client.list(_LEASES):
            # Both times are the server's, so no clocks are compared.
            if item.modified + LEASE_TIME < self.now:
                self._client.delete([item.key])
                continue
            version = self._client.get(item.key, _MAX_LEASE)
            if version is None:  # the import has ended
                continue
            budget.spend(len(version.data))
            since = item.modified if since is None else min(since, item.modified)
            try:
                found.update(map(Digest, strict_json.loads(version.data)))
            except (ValueError, TypeError) as error:
                raise RemoteError(f"the lease {quote(item.key)} cannot be read: {error}") from None
        return Leased(found, since)


def _is_collecting(client: ConditionalClient, now: datetime) -> bool:
    found = client.modified(_NOTE, LOOK_FOR_COLLECTION)
    return found is not None and found + COLLECTION_TIME > now


def _written(client: ConditionalClient, key: str) -> datetime:
    """Return the server's time, as that of an object that was just written."""
    found = client.modified(key)
    if found is None:
        raise RemoteError(
            f"{quote(client.address)} does not show the object {key}, which was written"
        )
    return found


def _busy(client: ConditionalClient) -> StoreBusy:
    return StoreBusy(
        f"garbage is being collected in {quote(client.address)}",
        advice="try again later, or wait for longer",
    )
