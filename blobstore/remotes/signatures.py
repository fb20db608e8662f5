"""Signatures in registries, next to the manifest that they sign.

Signatures for cosign are layers of one image manifest, whose tag is made of the signed digest. An OMS bundle
is a manifest of its own that refers to the signed one. Nothing that a registry returns is trusted: what is
fetched counts only if the policy's keys have signed it, and is not parsed before.
"""

from __future__ import annotations

import contextlib
import time
from itertools import count, islice
from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import limits
from blobstore.core.digest import Digest
from blobstore.core.limits import Budget, gather
from blobstore.errors import BlobDamaged, RemoteError
from blobstore.manifests.media_types import LOCAL_MANIFEST
from blobstore.registry.layouts.attached import bundle_manifest, cosign_manifest, cosign_of
from blobstore.registry.manifest import ImageManifest
from blobstore.remotes.referrers import noting_errors, send_attached, send_referrers, tag_to_extend
from blobstore.signatures import cosign
from blobstore.signatures.bundle import BUNDLE, decoded
from blobstore.signatures.cosign import (
    ANNOTATION,
    MAX_PAYLOAD,
    SIMPLE_SIGNING,
    envelopes,
    signed_by,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from blobstore.manifests.reference import Reference
    from blobstore.registry.client import RegistryClient
    from blobstore.registry.manifest import RemoteDescriptor, RemoteManifest
    from blobstore.registry.reference import RemoteReference
    from blobstore.signatures.keys import PrivateKey
    from blobstore.signatures.policy import Policy
    from blobstore.signatures.signature import Envelope
    from blobstore.store.local import LocalStore


class SelectedSignatures(NamedTuple):
    """The signatures that came with a model and are kept."""

    data: list[bytes]
    is_verified: bool
    """Whether a key of the policy made each of them."""
    left: int = 0
    """Those that came and are not kept."""

    @classmethod
    def of(
        cls, found: Iterable[bytes], manifest: Digest, policy: Policy | None
    ) -> SelectedSignatures:
        """Keep the signatures by keys of the policy; without such keys, a limited number of well-formed ones."""
        numbers = count()
        counted = (data for data, _ in zip(found, numbers, strict=False))
        if policy is not None and policy.keys:
            # A valid signature of another model proves nothing about this one.
            trusted = (one for one in signed_by(counted, policy.keys) if one.manifest == manifest)
            kept = [one.data for one in trusted]
            return cls(kept, is_verified=True, left=next(numbers) - len(kept))
        budget = Budget(limits.UNVERIFIED, "signatures")
        kept = []
        for one in envelopes(counted):
            with contextlib.suppress(RemoteError):  # smaller ones may follow
                budget.spend(len(one.data))
                kept.append(one.data)
        return cls(kept, is_verified=False, left=next(numbers) - len(kept))

    def notices(self, reference: Reference) -> tuple[str, ...]:
        """Return what to say about the signatures that are not kept."""
        why = "no key of the policy made them" if self.is_verified else "malformed, or too many"
        text = f"{reference}: signatures that came with it and are not kept: {self.left} ({why})"
        return (text,) if self.left else ()


def fetch_signatures(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    manifest: Digest,
    referrers: Iterable[RemoteDescriptor],
    on_error: Callable[[RemoteError], object] = lambda _: None,
) -> Iterator[bytes]:
    """Yield the signatures that a registry has of a model, one at a time; none of them is parsed or verified.

    Those that cannot be fetched are left out, as are those beyond the limits.

    Args:
        client: the registry.
        repository: the repository of the model.
        root: the model's manifest in the registry.
        manifest: the digest of its manifest in a store.
        referrers: the manifests that, as the registry says, refer to ``root``.
        on_error: called with the error if a signature, or the list of them, cannot be fetched.
    """
    budget = Budget(limits.SIGNATURES, f"signatures of {root.digest.short}")
    # If the registry's manifest differs from the store's, a signature of it is kept with it,
    # because that is what was signed.
    subjects = {root.digest: root.data, manifest: b""}
    for digest, subject in subjects.items():
        with noting_errors(on_error):
            content = client.get_manifest(repository, cosign.tag_of(digest)).parse()
            if isinstance(content, ImageManifest):
                layers = content.layers
                yield from _fetch_cosign(client, repository, layers, subject, budget, on_error)
    bundles = (item for item in referrers if item.artifact_type == BUNDLE)
    for item in islice(bundles, limits.SIGNATURES.count):
        with noting_errors(on_error):
            yield from _fetch_bundles(client, repository, item, budget)


def _fetch_cosign(
    client: RegistryClient,
    repository: str,
    layers: Iterable[RemoteDescriptor],
    subject: bytes,
    budget: Budget,
    on_error: Callable[[RemoteError], object],
) -> Iterator[bytes]:
    wanted = (one for one in layers if one.media_type == SIMPLE_SIGNING)
    for layer in islice(wanted, limits.SIGNATURES.count):
        with noting_errors(on_error):
            signature = decoded(layer.annotations.get(ANNOTATION, ""), ANNOTATION)
            payload = _fetch_blob(client, repository, layer, MAX_PAYLOAD, budget)
            yield cosign.write_signature(payload, signature, subject)


def _fetch_bundles(
    client: RegistryClient, repository: str, item: RemoteDescriptor, budget: Budget
) -> Iterator[bytes]:
    content = client.get_manifest(repository, str(item.digest)).parse()
    layers = content.layers if isinstance(content, ImageManifest) else ()
    # Each bundle is sent with a manifest of its own.
    for layer in islice((one for one in layers if one.media_type == BUNDLE), 1):
        yield _fetch_blob(client, repository, layer, limits.SIGNATURES.one, budget)


def _fetch_blob(
    client: RegistryClient, repository: str, layer: RemoteDescriptor, limit: int, budget: Budget
) -> bytes:
    """Return a small blob. Raises BlobDamaged if it is too large, or has another digest."""
    if layer.size > limit:
        raise BlobDamaged(f"blob {layer.digest.short} of {layer.size} bytes is over {limit}")
    budget.spend(layer.size)
    # No more bytes are read than the registry has stated and the budget allows.
    pieces = client.read_blob(repository, layer.digest, 0, layer.size, size=layer.size)
    with contextlib.closing(pieces):
        data = gather(pieces)
    if Digest.of(data) != layer.digest:
        raise BlobDamaged(f"blob {layer.digest.short} has another digest")
    return data


def push_signatures(
    client: RegistryClient,
    target: RemoteReference,
    root: RemoteManifest,
    store: LocalStore,
    key: PrivateKey | None,
) -> int:
    """Give a registry the signatures that a store has of a model; return how many it has now.

    One for cosign is found by the digest that it states: that of the manifest there, or in the store.

    With ``key``, the manifest in the registry is signed first, unless it was signed with it before.

    Raises:
        RemoteError: the registry cannot be reached, or refuses them.
        StoreError: the new signature cannot be stored.
    """
    spelled = root.parse().annotations.get(LOCAL_MANIFEST)
    manifest = root.digest if spelled is None else Digest.parse(spelled)
    own = signed_by(store.signatures(manifest), [] if key is None else [key.public])
    if key is not None and not any(one.stated == root.digest for one in own):
        signed = cosign.payload(f"{target.host}/{target.repository}", root.digest, int(time.time()))
        subject = b"" if root.digest == manifest else root.data
        data = cosign.write_signature(signed, key.sign(signed, is_sha256=True), subject)
        # Kept before it is sent: if sending fails, the next push sends it and need not sign again.
        store.keep_signature(manifest, data, is_verified=True)
    kept = list(envelopes(store.signatures(manifest)))
    by_digest = cosign_of(kept, [root.digest, manifest])
    for digest, found in by_digest.items():
        _send_cosign(client, target.repository, root, digest, found)
    bundles = [bundle_manifest(root, one.data) for one in kept if one.kind == "oms"]
    send_referrers(client, target.repository, root, bundles)
    return sum(map(len, by_digest.values())) + len(bundles)


def _send_cosign(
    client: RegistryClient,
    repository: str,
    root: RemoteManifest,
    digest: Digest,
    signatures: Sequence[Envelope],
) -> None:
    """Add signatures to those that the tag of a manifest has; an earlier push may have sent them."""
    # As with an index of referrers: of two processes that do this at once, one loses its entries.
    found = tag_to_extend(client, repository, cosign.tag_of(digest), root)
    content = found.parse() if found is not None else None
    before = content.layers if isinstance(content, ImageManifest) else ()
    made = cosign_manifest(digest, signatures, before)
    # Without the signatures, the manifest is the same only if none of them is new.
    if made.manifest != cosign_manifest(digest, (), before).manifest:
        send_attached(client, repository, made)
