"""The artifact that a model is in a registry: manifests with their exact bytes, blobs, and signatures.

The manifests are those that ``push`` would send, so their digests are those of pushed models: a signature of
one is a signature of the other.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from blobstore.core.workers import WorkerPool
from blobstore.errors import RemoteRefused
from blobstore.manifests import media_types
from blobstore.registry.layouts.attached import (
    bundle_manifest,
    cosign_manifest,
    cosign_of,
    referrer,
)
from blobstore.registry.layouts.oci import MAX_LAYERS, plan_oci
from blobstore.registry.layouts.plan import checked_manifest
from blobstore.registry.layouts.tar import TAR_END, padding, tar_header
from blobstore.remotes.cold_layers import COLD
from blobstore.remotes.model_metadata import model_metadata
from blobstore.remotes.registry_plan import plan_for_registry
from blobstore.remotes.send_cold import cold_lists
from blobstore.serve.messages import Content
from blobstore.serve.model_files import whole_blob
from blobstore.signatures.cosign import envelopes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from blobstore.core.digest import Digest
    from blobstore.core.files import FileVersion
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.models.small_files import ModelFiles
    from blobstore.registry.layouts.attached import Attached
    from blobstore.registry.layouts.tar import TarLayer
    from blobstore.registry.manifest import RemoteManifest
    from blobstore.serve.cold_files import ColdFiles, Owners
    from blobstore.serve.messages import Part
    from blobstore.serve.pulled import Origin
    from blobstore.store.local import LocalStore


@dataclass(slots=True, eq=False)
class Artifact:
    """A version of a model as registries have it."""

    reference: Reference
    model: Digest
    """The digest of the manifest that the store has of it."""
    roots: tuple[RemoteManifest, ...]
    """The manifests that the tag stands for; each has another media type."""
    manifests: dict[Digest, RemoteManifest] = field(repr=False)
    """All manifests, also the parts of an index, and signatures."""
    blobs: dict[Digest, Content] = field(repr=False)
    """The blobs besides those of the model."""
    tags: dict[str, Digest] = field(default_factory=dict)
    """Tags that clients derive from the digest of a manifest."""
    referrers: dict[Digest, list[dict[str, Any]]] = field(default_factory=dict)
    """Descriptors of the manifests that refer to another one."""
    key: object = None
    """The key of the library's cache."""
    origin: Origin | None = None
    """The commit that the model was fetched from, if it was."""
    layers: Mapping[Digest, Descriptor] = field(default_factory=dict, repr=False)
    """The blobs of the model, whose compressed forms clients may use; none of an image."""
    cold_version: FileVersion | None = None
    """When the cold files were listed; see :class:`~blobstore.serve.cold_files.ColdFiles`."""
    cold: set[Digest] = field(default_factory=set, repr=False)
    """The cold files and the manifests that list them, among the blobs and manifests."""
    bases: dict[Digest, Owners] = field(default_factory=dict, repr=False)
    """The blobs of other models that these are deltas against, and the models. A blob and its delta give away the base."""

    def digests(self) -> Collection[Digest]:
        """Return the digests of all manifests and blobs."""
        return {*self.manifests, *self.blobs, *self.layers}

    def has(self, digest: Digest) -> bool:
        """Return whether a manifest or a blob has this digest."""
        return any(digest in several for several in (self.manifests, self.blobs, self.layers))

    def content(self, digest: Digest) -> Content | None:
        """Return the blob with a digest, or None. The blob of a layer is made here, when a client asks for it."""
        layer = self.layers.get(digest)
        return self.blobs.get(digest) or (layer and whole_blob(layer))

    def list_cold(self, files: ColdFiles, bases: Mapping[Digest, Owners]) -> None:
        """List manifests of cold layers as referrers of the model, instead of the former ones.

        ``bases`` are those of them that are not blobs of the model.
        Clients that have read the former list still get these by their digests.
        """
        root = self.roots[0]
        listed = [one for one in self.referrers.get(root.digest, ()) if one["artifactType"] != COLD]
        made = [referrer(root, COLD, part) for part in cold_lists(files.layers)]
        stored = [layer.stored.digest for layer in files.layers]
        # First: from here on, only clients that may read the bases get what follows.
        self.bases |= bases
        self.cold.update(stored, (one.manifest.digest for one in made))
        listed += [_attach(self, one) for one in made]
        # Before the list, whose readers ask for these blobs at once.
        self.blobs |= dict(zip(stored, files.contents, strict=True))
        self.referrers[root.digest] = listed
        # Last: until then, another request lists them again.
        self.cold_version = files.version


def make_artifact(store: LocalStore, reference: Reference, model: ModelFiles) -> Artifact:
    """Return the artifact of a model.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        RemoteRefused: its manifest is larger than registries accept.
    """
    plan = plan_oci(model.data, model_metadata(model), manifest=model.manifest)
    roots = [plan.root]
    with contextlib.suppress(RemoteRefused):
        roots.append(checked_manifest(media_types.MANIFEST, model.data))
    manifests = {one.digest: one for one in (*plan.manifests, *roots)}
    blobs = {digest: Content((made,)) for digest, made in plan.made.items()}
    layers = {layer.digest: layer for layer in plan.blobs}
    artifact = Artifact(reference, model.digest, tuple(roots), manifests, blobs, layers=layers)
    signed = list(envelopes(store.signatures(model.digest)))
    for root in roots:
        bundles = [bundle_manifest(root, one.data) for one in signed if one.kind == "oms"]
        artifact.referrers[root.digest] = [_attach(artifact, one) for one in bundles]
    for digest, own in cosign_of(signed, [*(one.digest for one in roots), artifact.model]).items():
        _attach(artifact, cosign_manifest(digest, own))
    return artifact


def make_image(store: LocalStore, reference: Reference, model: Digest) -> Artifact:
    """Return the image of a model, which container runtimes mount. Its layers are put together when they are sent.

    All blobs are read once for the digests of the layers, unless ``push`` has noted them.

    Raises as :func:`make_artifact`.
    """
    plan = plan_for_registry(
        store, reference, "image", MAX_LAYERS, lambda size, _: WorkerPool(None, None, size)
    )
    blobs = {digest: Content((made,)) for digest, made in plan.made.items()}
    blobs |= {digest: _tar_content(tar) for digest, tar in plan.tars.items()}
    manifests = {one.digest: one for one in plan.manifests}
    return Artifact(reference, model, (plan.root,), manifests, blobs)


def _tar_content(tar: TarLayer) -> Content:
    parts: list[Part] = []
    for file in tar.files:
        parts.append(tar_header(file.path, file.size))
        parts += whole_blob(file).parts
        parts.append(bytes(padding(file.size)))
    return Content([*parts, TAR_END])


def _attach(artifact: Artifact, made: Attached) -> dict[str, Any]:
    """Add a manifest that belongs to another, with its blobs; return how referrers list it."""
    artifact.manifests[made.manifest.digest] = made.manifest
    artifact.blobs |= {digest: Content((data,)) for digest, data in made.blobs.items()}
    if made.tag:
        artifact.tags[made.tag] = made.manifest.digest
    return made.listed.to_json()
