"""A registry that offers compressed forms of a model, honest ones and others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import blobstore
from blobstore.compression.base import BaseBlob
from blobstore.compression.spans import Span
from blobstore.core.digest import Digest
from blobstore.core.tensor import DType
from blobstore.manifests.descriptor import Descriptor
from blobstore.operations.transfer.pull import Pulled
from blobstore.registry.layouts.ollama import plan_ollama
from blobstore.registry.manifest import OCI_INDEX, OCI_MANIFEST
from blobstore.store.local import LocalStore
from tests.support import frozen
from tests.support.cold import cold
from tests.support.models import add_blobs
from tests.support.stub_registry import StubRegistry

COLD = "application/vnd.blobstore.cold.v1"
COLD_BASES = "application/vnd.blobstore.cold.bases.v1"
ANNOTATION = "blobstore.cold.digest"
REPOSITORY = "team/tune"


class ColdCase:
    """A registry that has a model of two blobs, ``x`` and ``y``, and lists compressed forms of them."""

    def __init__(self, folder: Path, registry: StubRegistry) -> None:
        self.registry = registry
        self.origin = LocalStore(folder / "origin")
        add_blobs(
            self.origin,
            "tune",
            {
                "x": frozen.layer("x", frozen.tuned(5, 1)),
                "y": frozen.layer("y", frozen.tuned(6, 1)),
            },
        )
        plan = plan_ollama(self.origin.read_manifest("tune"))
        self.remote = registry.put(self.origin, plan, REPOSITORY, "latest")
        self.root = plan.root
        self.layers = frozen.layers(self.origin, "tune")
        self.store = LocalStore(folder / "store")
        self.listed: list[dict[str, Any]] = []
        """What the registry says refers to the model."""

    def data(self, name: str) -> bytes:
        """Return the bytes of a blob."""
        return self.registry.blobs[str(self.layers[name].digest)]

    def delta(self, name: str, base: str | bytes) -> bytes:
        """Return a blob, encoded against another one, or against bytes of the same layout."""
        data = self.data(name)
        begin = len(data) - 2 * frozen.COUNT
        spans = [Span(begin, None), Span(2 * frozen.COUNT, DType.BF16, base_begin=begin)]
        data_of_base = self.data(base) if isinstance(base, str) else base
        return cold(data, spans=spans, base=BaseBlob.hot(data_of_base))

    def offer(self, *layers: Mapping[str, Any]) -> None:
        """List compressed forms, as a registry without the referrers API does."""
        self.offer_manifest(json.dumps(manifest_of(layers)).encode())

    def offer_bases(self, *layers: Mapping[str, Any], count: int = 1) -> None:
        """List forms of bases, in so many manifests, with what is offered already."""
        manifest = manifest_of(layers) | {"artifactType": COLD_BASES}
        self._list(json.dumps(manifest).encode(), count, COLD_BASES, self.listed)

    def offer_manifest(self, data: bytes, count: int = 1) -> None:
        """List some bytes as so many manifests of compressed forms."""
        self._list(data, count, COLD, [])

    def _list(self, data: bytes, count: int, kind: str, others: list[dict[str, Any]]) -> None:
        digest = str(Digest.of(data))
        self.registry.put_manifest(REPOSITORY, digest, OCI_MANIFEST, data)
        item = {
            "mediaType": OCI_MANIFEST,
            "digest": digest,
            "size": len(data),
            "artifactType": kind,
        }
        self.listed = [*others, *[item] * count]
        index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": self.listed}
        tag = f"sha256-{self.root.digest.hex}"
        self.registry.put_manifest(REPOSITORY, tag, OCI_INDEX, json.dumps(index).encode())

    def form(
        self, blob: Descriptor, data: bytes, base: Descriptor | None = None, **stated: Any
    ) -> dict[str, Any]:
        """Let the registry have the bytes of a compressed form; return its entry in a manifest."""
        digest = str(Digest.of(data))
        self.registry.blobs[digest] = data
        annotations = {
            ANNOTATION: str(blob.digest),
            "blobstore.cold.size": str(blob.size),
        }
        if base is not None:
            annotations |= {
                "blobstore.cold.base.digest": str(base.digest),
                "blobstore.cold.base.size": str(base.size),
            }
        entry = {"mediaType": COLD, "digest": digest, "size": len(data)}
        return entry | {"annotations": annotations} | stated

    def pull(self, **options: Any) -> Pulled:
        """Pull the model, and check that the store has it and nothing else."""
        pulled = blobstore.pull(self.remote, "tune", store=self.store, **options)
        assert self.store.read_manifest("tune") == self.origin.read_manifest("tune")
        for blob in self.store.resolve("tune").blobs:
            self.store.check_digest(*blob.id)
        for folder in ("partial", "temporary"):
            assert not list(self.store.folder(folder).glob("*"))
        return pulled

    def sent(self, *entries: Mapping[str, Any]) -> list[int]:
        """Return how many bytes of some forms the registry has sent."""
        return [self.registry.sent[str(entry["digest"])] for entry in entries]


def manifest_of(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    config = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": str(Digest.of(b"{}")),
        "size": 2,
    }
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "artifactType": COLD,
        "config": config,
        "layers": list(layers),
    }
