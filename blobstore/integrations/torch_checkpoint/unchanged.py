"""Recognises blobs that no rank has changed since the step before, so that their parts need not travel.

Each rank remembers a digest of its parts of each blob, and the owner that of the blob. If the digests of all ranks are
the same again, so is the blob. What is remembered counts only if the coordinator's last step has made it: a rank that
failed, or has started since, remembers nothing. A blob that has changed once is not looked at again, so a training that
changes everything hashes its parts in two steps only.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from blobstore.core.digest import Digest
    from blobstore.core.workers import WorkerPool
    from blobstore.integrations.torch_checkpoint.layout import GatheredBlob, RankState
    from blobstore.store.ingest import Ingested


class Unchanged:
    """What one rank remembers of the blobs of the step before."""

    def __init__(self) -> None:
        self.token = ""
        """Names the step; empty if nothing is remembered."""
        self._parts: dict[str, bytes | None] = {}
        """Digests of this rank's parts by blob; None if the blob has changed before."""
        self._blobs: dict[str, tuple[Digest, int]] = {}
        """The digests and sizes of the blobs that this rank owns."""
        self._new: dict[str, bytes | None] = {}
        self.found: dict[str, Ingested] = {}
        """The blobs that this rank owns, and that the store has still."""

    def look(
        self,
        previous: str,
        blobs: Sequence[GatheredBlob],
        own: Collection[str],
        state: RankState,
        find: Callable[[Digest, int], Ingested | None],
        pool: WorkerPool,
    ) -> list[bool]:
        """Return of each blob whether it may be unchanged, as far as this rank knows.

        Args:
            previous: the token of the coordinator's last step.
            blobs: the blobs whose parts several ranks have.
            own: those that this rank owns.
            state: the parts that this rank has.
            find: looks for a blob in the store, and keeps it.
            pool: hashes the parts.
        """
        if not previous or self.token != previous:
            self.forget()

        def parts_of(blob: GatheredBlob) -> bytes | None:
            known = self._parts.get(blob.name, b"")
            return None if known is None else _digest_of_parts(blob, state)

        self.found = {}
        self._new = dict(zip((blob.name for blob in blobs), pool.run(blobs, parts_of), strict=True))
        votes = []
        for name, digest in self._new.items():
            is_same = digest is not None and self._parts.get(name) == digest
            if is_same and name in own:
                item = find(*self._blobs[name]) if name in self._blobs else None
                is_same = item is not None
                if item is not None:
                    self.found[name] = item
            votes.append(is_same)
        return votes

    def settle(self, unchanged: Collection[str]) -> None:
        """Take the votes of all ranks into account."""
        for name, digest in self._new.items():
            if name not in unchanged and self._parts.get(name) is not None and digest is not None:
                self._new[name] = None
        self.found = {name: item for name, item in self.found.items() if name in unchanged}

    def remember(self, token: str, added: Mapping[str, Ingested]) -> None:
        """Remember the step ``token``, when all ranks have written."""
        self.token, self._parts = token, self._new
        self._blobs = {name: (item.digest, item.size) for name, item in added.items()}

    def forget(self) -> None:
        """Remember nothing."""
        self.token, self._parts, self._blobs = "", {}, {}


def _digest_of_parts(blob: GatheredBlob, state: RankState) -> bytes:
    digest = hashlib.sha256(blob.header)
    for key, shape in blob.tensors:
        digest.update(repr((key, shape, state.boxes.get(key))).encode())
        for _, piece in state.pieces(key):
            digest.update(piece.numpy().data)
    return digest.digest()
