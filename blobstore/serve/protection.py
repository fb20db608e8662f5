"""Keeps the blobs of models from gc while they are sent, and for a while after that.

A cache may forget a model at any time, so it cannot protect blobs. Instead, each response has a :class:`Use` of its
model. While there is a use, or was one lately, the blobs are in the lease of this process.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING
from weakref import WeakSet

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from blobstore.core.digest import Digest
    from blobstore.store.local import LocalStore

RETRY_SECONDS = 1.0
"""Seconds until leasing the blobs of a model that is served is tried again."""


class _Model:
    def __init__(self, blobs: Collection[Digest]) -> None:
        self.blobs = blobs
        self.is_sure_until = -math.inf
        """When the blobs have to be leased again: never if they are, soon if the store could not be written."""
        self.used = time.monotonic()
        self.uses: WeakSet[Use] = WeakSet()

    def is_idle(self, seconds: float) -> bool:
        return not self.uses and self.used <= time.monotonic() - seconds


class Use:
    """The use of a model by one response. It ends when nothing refers to it any more; call it from time to time."""

    __slots__ = ("__weakref__", "_model")

    def __init__(self, model: _Model) -> None:
        self._model = model
        model.uses.add(self)

    def __call__(self) -> None:
        """Note that bytes of it are sent."""
        self._model.used = time.monotonic()


class Protection:
    """The models whose blobs stay, by the digests of their manifests. Threads may share it.

    All have one lease, since each is an open file. It is replaced when some models need it no longer.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._models: dict[Digest, _Model] = {}
        self._changing = threading.Lock()
        """Held while the lease is written, which may wait for gc."""
        self._looking = threading.Lock()
        """Held for moments while the table of models is used, because the thread of the event loop takes it."""
        self._lease = contextlib.ExitStack()
        self._hold: Callable[[Iterable[Digest]], bool] = _hold_nothing
        self._is_current = True
        """Whether the lease has the blobs of all models, and no others."""

    def add(self, manifest: Digest, blobs: Iterable[Digest]) -> None:
        """Protect the blobs of a model, before the caller looks whether they are there. It counts as used now.

        If the store cannot be written, the model counts as protected for a moment only: it is served all the same.
        """
        with self._changing:
            # Another thread may have added it while this one waited.
            if self.touch(manifest):
                return
            with self._looking:
                model = self._models.setdefault(manifest, _Model(frozenset(blobs)))
            if self._hold(model.blobs):
                model.is_sure_until = math.inf
            else:
                self._renew()

    def touch(self, manifest: Digest) -> bool:
        """Note that a model is used now; return whether it is protected. If not, call :meth:`add`."""
        with self._looking:
            known = self._models.get(manifest)
            if known is None:
                return False
            known.used = time.monotonic()
            return known.used < known.is_sure_until

    def use(self, manifest: Digest) -> Use:
        """Return a use of a model that was just touched. A model without blobs in the store needs no protection."""
        with self._looking:
            return Use(self._models.get(manifest) or _Model(()))

    def is_idle(self, manifest: Digest, seconds: float) -> bool:
        """Return whether nobody uses a model now, and nobody has used it that lately."""
        with self._looking:
            known = self._models.get(manifest)
            return known is None or known.is_idle(seconds)

    def end_idle(self, seconds: float, manifests: Iterable[Digest] | None = None) -> list[Digest]:
        """End the protection of idle models, of all or of some; return their manifests.

        Blobs that could not be leased before are tried again.
        """
        with self._changing:
            with self._looking:
                asked = list(self._models if manifests is None else manifests)
                idle = [one for one in asked if one in self._models]
                idle = [one for one in idle if self._models[one].is_idle(seconds)]
                for one in idle:
                    # From here on, `touch` makes the next request protect it again.
                    del self._models[one]
            if idle or not self._is_current:
                self._renew()
        return idle

    def _renew(self) -> None:
        """Replace the lease by one of the models that are left. It stays if the store cannot be written."""
        models = list(self._models.values())
        blobs = set().union(*(model.blobs for model in models))
        lease = contextlib.ExitStack()
        hold: Callable[[Iterable[Digest]], bool] = _hold_nothing
        if blobs:
            hold = lease.enter_context(self._store.lease_if_writable(()))
        self._is_current = not blobs or hold(blobs)
        if self._is_current:
            self._lease, self._hold, lease = lease, hold, self._lease
        # Only now: the blobs must not be without a lease in between.
        lease.close()
        soon = time.monotonic() + RETRY_SECONDS
        for model in models:
            model.is_sure_until = max(model.is_sure_until, math.inf if self._is_current else soon)


def _hold_nothing(_: Iterable[Digest]) -> bool:
    return False
