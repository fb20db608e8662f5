"""What a registry has of a model: manifests with their exact bytes, blobs, and signatures.

The manifests are those that ``push`` would send, so their digests are those of pushed models: a signature of
one is a signature of the other.
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.workers import WorkerPool
from blobstore.errors import InvalidSignature, RemoteRefused
from blobstore.operations.transfer.send_cold import cold_lists
from blobstore.registry.layouts.image import IMAGE_CONFIG
from blobstore.registry.layouts.oci import MAX_LAYERS, plan_oci
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.layouts.tar import TAR_END, padding, tar_header
from blobstore.remotes.cold_layers import COLD
from blobstore.remotes.model_metadata import model_metadata
from blobstore.remotes.referrers import image_manifest
from blobstore.remotes.registry_plan import plan_for_registry
from blobstore.serve.messages import Content
from blobstore.serve.model_files import whole_blob
from blobstore.signatures import cosign
from blobstore.signatures.bundle import BUNDLE, PREDICATE
from blobstore.signatures.cosign import ANNOTATION, SIMPLE_SIGNING, envelopes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from blobstore.core.files import FileVersion
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference
    from blobstore.registry.layouts.tar import TarLayer
    from blobstore.registry.manifest import RemoteManifest
    from blobstore.serve.cold_files import ColdFiles
    from blobstore.serve.messages import Part
    from blobstore.serve.pulled import Origin
    from blobstore.signatures.signature import Envelope
    from blobstore.store.local import LocalStore

_EMPTY: Final = b"{}"
_EMPTY_TYPE: Final = "application/vnd.oci.empty.v1+json"


@dataclass(slots=True, eq=False)
class Artifact:
    """A version of a model as registries have it."""

    reference: Reference
    roots: tuple[RemoteManifest, ...]
    """The manifests that the tag stands for; each has another media type."""
    manifests: dict[Digest, RemoteManifest] = field(repr=False)
    """All manifests, also the parts of an index, and signatures."""
    blobs: dict[Digest, Content] = field(repr=False)
    tags: dict[str, Digest] = field(default_factory=dict)
    """Tags that clients derive from the digest of a manifest."""
    referrers: dict[Digest, list[Mapping[str, Any]]] = field(default_factory=dict)
    """Descriptors of what refers to a manifest."""
    key: object = None
    """What the library keeps it under."""
    origin: Origin | None = None
    """What the model was fetched from."""
    stored: Sequence[Descriptor] = field(default=(), repr=False)
    """The blobs of the model, if clients use their compressed forms."""
    cold_version: FileVersion | None = None
    """When the cold files were listed; see :class:`~blobstore.serve.cold_files.ColdFiles`."""

    def list_cold(self, files: ColdFiles) -> None:
        """Let manifests of cold layers refer to the model, instead of those that did so before.

        The former stay by their digests for clients that have read the list.
        """
        root = self.roots[0]
        listed = [one for one in self.referrers.get(root.digest, ()) if one["artifactType"] != COLD]
        listed += [_add_referrer(self, root, COLD, part) for part in cold_lists(files.layers)]
        stored = (layer.stored.digest for layer in files.layers)
        self.blobs |= dict(zip(stored, files.contents, strict=True))
        self.referrers[root.digest] = listed
        self.cold_version = files.version


def make_artifact(
    store: LocalStore, reference: Reference, data: bytes, manifest: Manifest
) -> Artifact:
    """Return what a registry has of the model with the manifest ``data``.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged.
        RemoteRefused: its manifest is larger than registries accept.
    """
    plan = plan_oci(data, model_metadata(store, reference))
    roots = [plan.root]
    with contextlib.suppress(RemoteRefused):
        roots.append(plan_ollama(data).root)
    manifests = {one.digest: one for one in (*plan.manifests, *roots)}
    blobs = {layer.digest: whole_blob(layer) for layer in manifest.blobs}
    blobs |= {digest: Content((made,)) for digest, made in plan.made.items()}
    artifact = Artifact(reference, tuple(roots), manifests, blobs, stored=manifest.blobs)
    signed = list(envelopes(store.signatures(Digest.of(data))))
    for root in roots:
        _add_bundles(artifact, root, [one for one in signed if one.kind == "oms"])
        _add_cosign(artifact, root, [one for one in signed if one.kind != "oms"])
    return artifact


def make_image(store: LocalStore, reference: Reference) -> Artifact:
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
    return Artifact(reference, (plan.root,), manifests, blobs)


def _tar_content(tar: TarLayer) -> Content:
    parts: list[Part] = []
    for file in tar.files:
        parts.append(tar_header(file.path, file.size))
        parts += whole_blob(file).parts
        parts.append(bytes(padding(file.size)))
    return Content([*parts, TAR_END])


def _add_bundles(artifact: Artifact, root: RemoteManifest, signed: list[Envelope]) -> None:
    """Add a manifest for each signature, which refers to ``root``."""
    for one in signed:
        layers = [_add_blob(artifact, BUNDLE, one.data)]
        annotations = {
            "dev.sigstore.bundle.content": "dsse-envelope",
            "dev.sigstore.bundle.predicateType": PREDICATE,
        }
        listed = _add_referrer(artifact, root, BUNDLE, layers, annotations=annotations)
        artifact.referrers.setdefault(root.digest, []).append(listed)


def _add_referrer(
    artifact: Artifact,
    root: RemoteManifest,
    kind: str,
    layers: Sequence[Mapping[str, Any]],
    **others: Any,
) -> Mapping[str, Any]:
    """Add a manifest of a kind that refers to ``root``, and return how it is listed."""
    content = {
        "artifactType": kind,
        "config": _add_blob(artifact, _EMPTY_TYPE, _EMPTY),
        "layers": layers,
        "subject": _descriptor(root.media_type, root.data),
        **others,
    }
    made = image_manifest(content)
    artifact.manifests[made.digest] = made
    return _descriptor(made.media_type, made.data) | {"artifactType": kind}


def _add_cosign(artifact: Artifact, root: RemoteManifest, signed: list[Envelope]) -> None:
    """Add the signatures of ``root`` as one manifest, where cosign looks for them."""
    layers = []
    for one in signed:
        with contextlib.suppress(InvalidSignature):
            if cosign.parse_envelope(one).stated == root.digest:
                layer = _add_blob(artifact, SIMPLE_SIGNING, one.signed)
                layer["annotations"] = {ANNOTATION: base64.b64encode(one.signature).decode()}
                layers.append(layer)
    if layers:
        config = {
            "architecture": "",
            "os": "",
            "config": {},
            "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
        }
        described = _add_blob(artifact, IMAGE_CONFIG, strict_json.dumps(config).encode())
        made = image_manifest({"config": described, "layers": layers})
        artifact.manifests[made.digest] = made
        artifact.tags[cosign.tag_of(root.digest)] = made.digest


def _add_blob(artifact: Artifact, media_type: str, data: bytes) -> dict[str, Any]:
    artifact.blobs[Digest.of(data)] = Content((data,))
    return _descriptor(media_type, data)


def _descriptor(media_type: str, data: bytes) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": str(Digest.of(data)), "size": len(data)}
