"""The interface of the places that ``push`` sends models to: registries, and object storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Generator, Mapping, Sequence

    from blobstore.core.digest import BlobId, Digest
    from blobstore.core.workers import WorkerPool
    from blobstore.manifests.reference import Reference
    from blobstore.objects.address import ModelAddress
    from blobstore.registry.layouts.plan import RemoteLayout
    from blobstore.registry.reference import RemoteReference
    from blobstore.remotes.checked_pieces import PushedBlob
    from blobstore.remotes.cold_layers import ColdLayer

Sent = Literal["sent", "resumed", "mounted", "present"]
"""The way in which a target got bytes: now, by an interrupted push, from another repository, or earlier."""


class PushedModel(NamedTuple):
    """A model as a target has it after a push."""

    address: RemoteReference | ModelAddress
    digest: Digest
    """Of the manifest that the name refers to."""
    layout: RemoteLayout | Literal["store"]
    manifests: int
    blobs: Sequence[PushedBlob]
    """The blobs that the manifests need, each once."""
    is_published: bool
    """Whether the name referred to this model before the push."""
    replaced: Digest | None = None
    """Of another manifest that the name had before, if it is kept."""


class PushTarget(Protocol):
    """A repository of a registry, or a store in object storage, that one model is pushed to.

    While a target is open, ``gc`` keeps the blobs, here and in object storage. Any number of threads may send
    and read blobs. All methods but ``abort`` raise RemoteError if the target cannot be reached, or fails.
    """

    kind: str
    """The kind of target, for messages."""
    checks_manifests: bool
    """Whether it accepts a manifest only with all its blobs: then these need not be looked for."""
    model: PushedModel
    notices: Sequence[str]
    """Notices for the user about the target."""

    def has(self, blob: PushedBlob) -> bool:
        """Return whether the target says that it has a blob and keeps it, which is only a hint."""

    def send(self, blob: PushedBlob, report: Callable[[int], object]) -> Mapping[Sent, int]:
        """Give the target a blob; return bytes by how it got them. ``report`` gets the bytes done.

        Raises:
            BlobDamaged, BlobMissing: the blob is not intact; the target does not get its end.
        """

    def publish(self, workers: WorkerPool, sent: Counter[Sent]) -> None:
        """Give the model its name, when its blobs are there.

        Blobs that turn out to be missing are sent by ``workers``; ``sent`` is then corrected.
        """

    def send_signatures(self) -> int:
        """Send the signatures of the model; return how many the target has."""

    def read_cold_layers(self, *, verify: bool) -> Mapping[Digest, ColdLayer]:
        """Return listed cold layers that need not be sent again, by blob; with ``verify`` once read back."""

    def read_forms_with(self, model: Reference) -> Mapping[Digest, ColdLayer]:
        """Return the cold layers that are listed with another model of the store, those of bases too, by blob."""

    def list_cold_layers(self, layers: Sequence[ColdLayer], bases: Sequence[ColdLayer]) -> None:
        """List cold layers that were sent, and those of their bases, for clients that lack these."""

    def check_manifests(self) -> None:
        """Read the manifests back. Raises BlobDamaged or Conflict if they are others."""

    def read(self, blob: BlobId) -> Generator[memoryview, None, None]:
        """Yield the bytes of a blob, unchecked. Raises BlobDamaged and BlobMissing."""

    def abort(self) -> None:
        """End what other threads wait for, as cancelled."""
