"""The operations ``rm`` and ``tag`` of remote models: names in registries and object storage."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.errors import Conflict, InvalidReference, NameTaken, UsageError
from blobstore.manifests.model import Manifest
from blobstore.manifests.step_record import is_state_of, state_of
from blobstore.objects.leases import leased
from blobstore.objects.source import ObjectSource
from blobstore.objects.store import ObjectStore
from blobstore.operations.maintenance.gc_objects import needed_by
from blobstore.registry.client import RegistryClient
from blobstore.registry.reference import RemoteReference, check_reference
from blobstore.remotes.addresses import is_in_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.objects.address import ModelAddress
    from blobstore.objects.client import ObjectTag


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteTag:
    """The result of :func:`tag_remote`."""

    source: RemoteReference | ModelAddress
    target: RemoteReference | ModelAddress
    digest: Digest
    """Of the manifest."""
    is_new: bool
    """Whether the tag was not that of this model already."""
    replaced: bool
    """Whether the tag was that of another model."""


def remove_remote(
    addresses: Sequence[str], *, dry_run: bool = False, plain_http: bool | None = None
) -> list[RemoteReference | ModelAddress]:
    """Remove names of remote models, and return them. Blobs stay until garbage is collected there.

    An address in a registry with a digest stands for the manifest, which is removed with all of its tags.

    Raises:
        InvalidReference: an address is not valid.
        ModelNotFound: there is no such name; then none is removed.
        RemoteRefused: the registry removes no tags, or access is denied.
        RemoteError: a remote cannot be reached.
    """
    found: list[RemoteReference | ModelAddress] = []
    for address in addresses:
        if is_in_objects(address):
            found.append(ObjectSource.locate(address)[1])
            continue
        remote = RemoteReference.parse(address)
        remote.check_writable()
        with RegistryClient(remote.host, plain_http=plain_http) as client:
            client.get_manifest(remote.repository, remote.reference)
        found.append(remote)
    for place in () if dry_run else found:
        if isinstance(place, RemoteReference):
            with RegistryClient(place.host, plain_http=plain_http) as client:
                client.delete_manifest(place.repository, place.reference)
        else:
            ObjectStore(place.store).remove([place.reference])
    return found


def tag_remote(
    address: str, tag: str, *, force: bool = False, plain_http: bool | None = None
) -> RemoteTag:
    """Give a remote model another tag, without reading its blobs. In object storage, the state of a step goes with it.

    Args:
        address: the model.
        tag: the new tag.
        force: take the tag from another model.
        plain_http: whether to use HTTP without TLS for a registry; by default only for this machine.

    Raises:
        InvalidReference: an address or the tag is not valid.
        ModelNotFound: there is no such model.
        NameTaken: another model has the tag.
        Conflict: another process gave the tag or the name another model in the meantime.
        StoreBusy: garbage is being collected there, and that does not end within a minute.
        RemoteError: the remote cannot be reached, or denies access.
    """
    return (_tag_object if is_in_objects(address) else _tag_in_registry)(
        address, tag, force, plain_http
    )


def _tag_object(address: str, tag: str, force: bool, plain_http: bool | None) -> RemoteTag:
    del plain_http
    store, source, data = ObjectSource.locate(address)
    target = replace(source, reference=replace(source.reference, tag=tag))
    state, new_state = None, None
    with contextlib.suppress(InvalidReference):  # the name would be too long
        state = replace(source, reference=state_of(target.reference))
        new_state, _ = store.read_former(state_of(source.reference))
    if new_state and not is_state_of(Manifest.from_bytes(new_state), Manifest.from_bytes(data)):
        new_state = None
    # The state first, as a step is saved: it exists if its model does.
    models = [(state, new_state), (target, data)] if state and new_state else [(target, data)]
    formers = [store.read_former(place.reference) for place, _ in models]
    for (place, new), (former, _) in zip(models, formers, strict=True):
        _check_taken(place, former not in {None, new}, force)
    former, _ = formers[-1]
    stale = state if state and not new_state and former not in {None, data} else None
    changes = [
        (*model, old[1]) for model, old in zip(models, formers, strict=True) if model[1] != old[0]
    ]
    if changes:
        _place(store, source.reference, data, changes, stale)
    return RemoteTag(
        source=source,
        target=target,
        digest=Digest.of(data),
        is_new=former != data,
        replaced=former not in {None, data},
    )


def _place(
    store: ObjectStore,
    source: Reference,
    data: bytes,
    changes: Sequence[tuple[ModelAddress, bytes, ObjectTag | None]],
    stale: ModelAddress | None,
) -> None:
    """Give names to the model that ``source`` has, and to its state; remove the name of a former state."""
    needed = [needed_by(store, place.reference, manifest) for place, manifest, _ in changes]
    with leased(store.client, set().union(*needed)) as check_lease:
        # As long as the name has it, no collection has removed its blobs; from here on, the lease keeps them.
        if store.read_manifest(source) != data:
            raise Conflict(
                f"{quote(source)} was given another model in the meantime", advice="tag it again"
            )
        if stale and store.has_model(stale.reference):
            store.remove([stale.reference])
        for place, manifest, version in changes:
            store.place(place.reference, manifest, version, check_lease)


def _tag_in_registry(address: str, tag: str, force: bool, plain_http: bool | None) -> RemoteTag:
    source = RemoteReference.parse(address)
    source.check_writable()
    target = replace(source, tag=tag, digest=None)
    if ":" in tag:
        raise UsageError(f"{quote(tag)} is not a tag")
    check_reference(tag)
    with RegistryClient(source.host, plain_http=plain_http) as client:
        manifest = client.get_manifest(source.repository, source.reference)
        former = client.head_manifest(source.repository, tag)
        _check_taken(target, former not in {None, manifest.digest}, force)
        if former != manifest.digest:
            client.put_manifest(source.repository, tag, manifest)
    return RemoteTag(
        source=source,
        target=target,
        digest=manifest.digest,
        is_new=former != manifest.digest,
        replaced=former not in {None, manifest.digest},
    )


def _check_taken(target: RemoteReference | ModelAddress, is_taken: bool, force: bool) -> None:
    if is_taken and not force:
        raise NameTaken(
            f"another model has the name {quote(target)}", advice="replace it with force=True"
        )
