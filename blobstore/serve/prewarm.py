"""Fetches the models of a lock file when a server starts, and keeps it from being ready until they are there.

What the upstream has is fetched as for a client without a token: the upstream says who may read it, and it is a part of
the cache. Everything else becomes the store's own, as by ``blobstore sync``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

from blobstore.core.arguments import local_path
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UsageError
from blobstore.operations.transfer.sync import read_lock, sync_models
from blobstore.serve.messages import Request
from blobstore.serve.names import is_name
from blobstore.serve.refusal import Refusal
from blobstore.serve.targets import parse_target
from blobstore.serve.unprepared import prepared
from blobstore.sources.hub_listing import COMMIT

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from blobstore.manifests.lock_file import LockedModel
    from blobstore.serve.library import Library
    from blobstore.serve.pull_through import PullThrough

_RETRY_SECONDS: Final = 30.0
"""Seconds until models that could not be fetched are asked for again."""


class Prewarm:
    """The models of a lock file that are not there yet. It has a thread; close it."""

    def __init__(
        self,
        file: str | os.PathLike[str],
        library: Library,
        through: PullThrough | None,
        note: Callable[..., object],
    ) -> None:
        """Read the lock file, and begin. Raises NotFound, UsageError or BlobstoreError as ``blobstore sync``."""
        self._library, self._through, self._note = library, through, note
        self._ended = threading.Event()
        library.awaited = read_lock(local_path(file, "source"))
        threading.Thread(target=self._run, name="blobstore-prewarm", daemon=True).start()

    def close(self) -> None:
        """Begin no more models."""
        self._ended.set()

    def _run(self) -> None:
        while self._library.awaited and not self._ended.is_set():
            self._library.awaited = [one for one in self._library.awaited if not self._fetch(one)]
            if self._library.awaited:
                self._ended.wait(_RETRY_SECONDS)

    def _fetch(self, model: LockedModel) -> bool:
        """Return whether a model is there now."""
        if self._ended.is_set():
            return False
        try:
            if (through := self._cache_of(model)) is None:
                error = sync_models([model], store=self._library.store)[0].error
                if error is not None:
                    raise error
            else:
                # A registry's client gets a model when all of it is there.
                target = f"/v2/{model.repository}/manifests/{model.commit}"
                request = Request("GET", target)
                prepared(lambda: through.visible(request, parse_target(target), ""))
        except (BlobstoreError, Refusal, OSError) as error:
            self._note(prewarm=str(model.reference), error=str(error))
            return False
        self._note(prewarm=str(model.reference))
        return True

    def _cache_of(self, model: LockedModel) -> PullThrough | None:
        """Return what fetches a model from the upstream as it is; None for others.

        Raises:
            UsageError: clients cannot ask for the model. It does not become the store's own instead, because the
                upstream could not say who may read that.
        """
        through = self._through
        if through is None or not through.has_upstream or model.remote or model.options:
            return None
        if model.repository and not (is_name(model.repository) and COMMIT.fullmatch(model.commit)):
            where = f"{quote(model.repository)} at {quote(model.commit)}"
            raise UsageError(f"clients cannot ask a cache for {where}")
        return through if model.repository else None
