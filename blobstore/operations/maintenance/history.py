"""The operations ``history`` and ``restore``: the models that a name had, until gc removes their blobs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from blobstore.core import interrupts
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import (
    InvalidManifest,
    InvalidReference,
    ModelNotFound,
    NotFound,
    UsageError,
)
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.manifests.step_record import is_state_of, state_of
from blobstore.operations.maintenance.names import Named, drop_state
from blobstore.store.local import LocalStore, StoreLike
from blobstore.store.name_patterns import id_start
from blobstore.store.names import ABSENT, NewModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerModel:
    """A model that a name had."""

    digest: Digest
    """The digest of the manifest's bytes, whose start is the ID."""
    until: float
    """When the name was given to another model, in seconds since the epoch."""
    size: int
    """Bytes of the blobs."""
    is_restorable: bool
    """Whether the store still has all of them."""
    data: bytes
    """The bytes of the manifest."""


def model_history(
    reference: str | Reference, *, store: StoreLike = None
) -> tuple[FormerModel, ...]:
    """Return the models that a name had before, each once, latest first.

    Args:
        reference: the name, which need not exist now.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Raises:
        ModelNotFound: the store has no such name and never had, or has forgotten it.
        StoreError: the store cannot be read.
    """
    store, reference = LocalStore.of(store), Reference.of(reference)
    is_own = next(store.names.former(reference), None) is not None
    return _history(store if is_own else store.holder(reference), reference)


def _history(store: LocalStore, reference: Reference) -> tuple[FormerModel, ...]:
    """Return the models that a name had before in the store itself. Raises as :func:`model_history`."""
    current = None
    missing: ModelNotFound | None = None
    try:
        current = Digest.of(store.read_manifest(reference))
    except ModelNotFound as error:
        missing = error
    except InvalidManifest:  # too large; it is being replaced, perhaps
        current = None
    found: dict[Digest, FormerModel] = {}
    for former in store.names.former(reference):
        digest = Digest.of(former.data)
        try:
            manifest = Manifest.from_bytes(former.data)
            store.check_manifest(former.data, manifest)
        except InvalidManifest:
            continue
        blobs = manifest.blobs
        if digest != current and digest not in found:
            found[digest] = FormerModel(
                digest=digest,
                until=former.until,
                size=sum(blob.size for blob in blobs),
                is_restorable=store.has_blobs(blobs),
                data=former.data,
            )
    if missing is not None and not found:
        raise missing
    return tuple(found.values())


def restore_model(
    reference: str | Reference,
    ident: str | Digest | None = None,
    *,
    store: StoreLike = None,
) -> Named:
    """Give a name the model that it had before. The model that it has now becomes a former one.

    The state of a training step goes with its model, and one of another step is removed.

    Args:
        reference: the name, which need not exist now.
        ident: the former model's ID or the start of it; by default the latest former model.
        store: the store or its folder; by default ``$BLOBSTORE_HOME`` or ``~/.blobstore``.

    Returns:
        the name, the digest of the model, and whether another model had the name.

    Raises:
        ModelNotFound: the store has no such name and never had, or has forgotten it.
        NotFound: there is no such former model, or gc has removed its blobs.
        NameConflict: a name of the store differs only in case.
        NameTaken: another process gave the name another model in the meantime.
        StoreBusy: the store's lock could not be acquired in time.
        StoreError: the store cannot be written.
        UsageError: ``ident`` is not the start of one ID.
    """
    store, reference = LocalStore.of(store), Reference.of(reference)
    seen = store.names.seen(reference)
    former = _chosen(_history(store, reference), reference, ident)
    manifest = Manifest.from_bytes(former.data)
    blobs = manifest.blobs
    # Under the lock, gc cannot remove a blob between this look and the new name.
    with store.writing(), store.exclusive_lock():
        if not store.has_blobs(blobs):
            raise NotFound(
                f"{quote(reference)} cannot be restored to {former.digest.short}: gc has removed "
                "some of its blobs"
            )
        state = _state(store, reference, manifest)
        with interrupts.deferred():
            if not state:
                drop_state(store, reference, manifest)
            store.names.place(*state, NewModel(seen.to(former.digest), former.data, blobs))
    replaced = seen.old not in (ABSENT, former.digest)
    return Named(source=reference, target=reference, digest=former.digest, replaced=replaced)


def _state(store: LocalStore, step: Reference, model: Manifest) -> list[NewModel]:
    """Return the state of a model that its step gets back, with its name: what the step has or had as its state."""
    with contextlib.suppress(InvalidReference, ModelNotFound):  # the name would be too long
        name = state_of(step)
        found = [one.data for one in _history(store, name) if one.is_restorable]
        with contextlib.suppress(ModelNotFound, InvalidManifest):
            found.insert(0, store.read_manifest(name))
        for data in found:
            with contextlib.suppress(InvalidManifest):
                state = Manifest.from_bytes(data)
                if is_state_of(state, model):
                    return [NewModel(store.names.seen(name).to(Digest.of(data)), data, state.blobs)]
    return []


def _chosen(
    history: tuple[FormerModel, ...], reference: Reference, ident: str | Digest | None
) -> FormerModel:
    start = id_start(str(ident)) if ident is not None else ""
    if start is None:
        raise UsageError(f"{quote(ident)} is not the start of an ID: 4 or more hexadecimal digits")
    near = [former for former in history if former.digest.hex.startswith(start)]
    if not near:
        what = f" with the ID {quote(ident)}" if ident else ""
        raise NotFound(f"{quote(reference)} has no former model{what}")
    if ident and len(near) > 1:
        raise UsageError(f"{quote(ident)} is the start of several IDs")
    return near[0]
