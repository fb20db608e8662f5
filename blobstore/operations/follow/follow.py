"""The operation ``follow``: gives a name each version of another place, as soon as it is there.

The place is asked repeatedly, or delays its answer until there is another version. A version is fetched
and checked while the name has the former one. Then one rename gives the name its new manifest, so readers get the
former version until then, whatever happens in between.
"""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.workers import check_jobs
from blobstore.errors import BlobstoreError, MissingLibrary, UsageError
from blobstore.http.retry import Patience
from blobstore.manifests.reference import Reference
from blobstore.operations.follow.places import Target, find_place
from blobstore.operations.follow.trainer import SCHEMES, TrainerFolder
from blobstore.operations.maintenance.names import remove_models
from blobstore.operations.transfer.pull import STREAMS
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.names import replace_any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from blobstore.core.progress import Progress
    from blobstore.operations.follow.places import Installed, Place

INTERVAL: Final = 10.0
_MAX_WAIT: Final = 30
"""Seconds that a server is asked to wait at most, so that a proxy does not end the connection."""
_PATIENCE: Final = Patience(first=1, attempts=sys.maxsize)
_LABEL: Final = re.compile(r"[0-9a-f]{12}|v[0-9]{6,9}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A version that was installed."""

    reference: Reference
    source: str
    version: str
    """The name of it at the place: the digest of a manifest, a commit, or the number of a trainer's version."""
    digest: Digest
    """Of the manifest that the name has now."""
    previous: Digest | None
    """Of the manifest that it had before."""
    bytes_fetched: int
    kept: Reference | None
    """The tag that the version keeps when the name moves on."""
    seconds: float
    """From the moment when the version was seen."""
    notices: tuple[str, ...] = ()


def follow(
    reference: str | Reference,
    source: str,
    *,
    store: StoreLike = None,
    interval: float = INTERVAL,
    keep_last: int | None = None,
    once: bool = False,
    streams: int = STREAMS,
    limit_rate: float | str | None = None,
    jobs: int | None = None,
    plain_http: bool | None = None,
    stop: threading.Event | None = None,
    on_error: Callable[[BlobstoreError, float], object] = lambda _error, _seconds: None,
    progress: Progress | None = None,
) -> Iterator[Followed]:
    """Keep a name equal to what another place has, and yield each version after it is installed.

    The name gets the model of the place, whatever it had before; ``restore`` undoes that. If another process gives it
    another model while a version is fetched, the next request notices that. The iterator ends
    with ``once``, or after ``stop`` is set. Until then errors are reported, and the place is asked again
    after a pause that grows up to a minute.

    Args:
        reference: the name.
        source: a tag in a registry or at ``blobstore serve`` (``oci://host/repository:tag``), a name in
            object storage (``s3://``, ``gs://``, ``az://``, ``file://``), a repository of the Hub
            (``hf://org/name@revision``), the folder of another store, which has the same name, or a folder
            that a trainer writes (``slime:FOLDER``, ``sglang:FOLDER``, ``modelexpress:FOLDER``). The changes of
            a trainer apply to the model that the name has.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        interval: seconds between two requests. ``blobstore serve`` waits up to half a minute, and answers
            when there is another version.
        keep_last: the number of versions to keep. Each gets a tag of its own, such as
            ``latest-0f3c5a1b9d2e``, and older tags of this form are removed. By default a version has no name
            once the next one is installed, and ``gc`` removes the blobs that only it needs.
        once: ask once, and raise errors.
        streams: number of blobs, or of parts of large blobs, that are fetched at once.
        limit_rate: maximum number of bytes per second, or a text such as ``10MB``.
        jobs: number of threads; by default one per processor.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.
        stop: ends the iterator between two steps.
        on_error: called with an error, and the seconds until the next attempt.
        progress: called with the current blob, bytes done and total bytes.

    Raises:
        UsageError: an argument is invalid, or ``source`` is not a place that can be followed.
        MissingLibrary: a library that the place needs is not installed.
        BlobstoreError: with ``once``, the version cannot be read or installed; otherwise the store cannot be used.
    """
    check_jobs(jobs)
    if not 0 < interval < float("inf"):
        raise UsageError(f"the interval must be a positive number of seconds, got {interval}")
    if keep_last is not None and keep_last < 1:
        raise UsageError(f"keep_last must be at least 1, got {keep_last}")
    options = {"streams": streams, "limit_rate": limit_rate, "plain_http": plain_http}
    target = Target(
        store=LocalStore.of(store),
        reference=Reference.of(reference),
        jobs=jobs,
        progress=progress,
        transfer=options,
    )
    target.store.names.check_name(target.reference)
    is_trained = source.startswith(SCHEMES)
    place = TrainerFolder(target, source) if is_trained else find_place(target, source)
    follower = _Follower(target, source, place, keep_last)
    return _versions(follower, interval, stop or threading.Event(), on_error, once=once)


def _versions(
    follower: _Follower,
    interval: float,
    stop: threading.Event,
    on_error: Callable[[BlobstoreError, float], object],
    *,
    once: bool,
) -> Iterator[Followed]:
    failures = 0
    wait = 0 if once else max(1, min(int(interval), _MAX_WAIT))
    with follower.place:
        while not stop.is_set():
            try:
                found = follower.step(wait)
            except (UsageError, MissingLibrary):
                raise
            except BlobstoreError as error:
                if once:
                    raise
                failures += 1
                delay = _PATIENCE.delay(failures, 0, random.random()) or 0  # noqa: S311 - not a secret
                on_error(error, delay)
                _sleep(delay, stop)
                continue
            failures = 0
            if found is not None:
                yield found
            if once:
                return
            # After a version there may be another one already.
            if found is None and not follower.has_waited:
                _sleep(interval, stop)


def _sleep(seconds: float, stop: threading.Event) -> None:
    """Sleep, until ``stop`` is set. Raises as :func:`interrupts.check`."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not stop.wait(min(left, interrupts.POLL)):
        interrupts.check()


class _Follower:
    """A name and the place that it follows."""

    def __init__(self, target: Target, source: str, place: Place, keep_last: int | None) -> None:
        self.place = place
        self.has_waited = False
        """Whether the place waited for a change when it was last asked."""
        self._target = target
        self._source = source
        self._keep_last = keep_last
        self._installed: tuple[str, Digest | None] | None = None
        """The last version, and the manifest that it gave the name."""

    def step(self, wait: int) -> Followed | None:
        """Install the version that the place has; return None if the name has it already. Raises BlobstoreError."""
        target = self._target
        seen = target.seen()
        before = seen.old if isinstance(seen.old, Digest) else None
        # Another process may have given the name another manifest.
        if self._installed is not None and self._installed[1] == before:
            known: str | None = self._installed[0]
        else:
            known = None if before is None else self.place.known()
        # May be interrupted at any moment, because the request changes nothing.
        look = interrupts.call(partial(self.place.look, known, wait))
        self.has_waited = look.has_waited
        if look.version == known:
            return None
        started = time.monotonic()
        installed = self.place.install(seen)
        with interrupts.deferred():  # all is done
            return self._installed_as(installed, before, started)

    def _installed_as(
        self, installed: Installed, before: Digest | None, started: float
    ) -> Followed | None:
        """Return the version that was installed; None if the name has the same model as before."""
        target = self._target
        digest = target.manifest()
        self._installed = installed.version, digest
        if digest is None:  # another process has removed it
            return None
        label = installed.label or digest.short  # the place may know the model by another digest
        kept = None if self._keep_last is None else self._keep(label, digest, self._keep_last)
        if digest == before:
            return None
        return Followed(
            reference=target.reference,
            source=self._source,
            version=installed.version,
            digest=digest,
            previous=before,
            bytes_fetched=installed.bytes_fetched,
            kept=kept,
            seconds=time.monotonic() - started,
            notices=installed.notices,
        )

    def _keep(self, label: str, digest: Digest, count: int) -> Reference | None:
        """Give the version a tag of its own, and remove those beyond ``count``; return None if it is gone."""
        store, reference = self._target.store, self._target.reference
        start = f"{reference.tag}-"
        kept = Reference(*reference.parts[:3], f"{start}{label}")
        data, manifest = store.parse(reference)
        if Digest.of(data) != digest:  # another process has given the name to another model
            return None
        # Before older tags are removed: a crash in between leaves a version too many, not one too few.
        store.names.publish(replace_any(kept), manifest)
        tags = [
            one
            for one in store.references()
            if one.parts[:3] == reference.parts[:3]
            and one.tag.startswith(start)
            and _LABEL.fullmatch(one.tag.removeprefix(start))
        ]
        remove_models(tags, keep_last=count, store=store)
        return kept
