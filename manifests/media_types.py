"""Media types of manifests, configs and layers: Ollama's, and the three of our own. And one annotation."""

from __future__ import annotations

from typing import Final

MANIFEST: Final = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG: Final = "application/vnd.docker.container.image.v1+json"

TENSOR: Final = "application/vnd.ollama.image.tensor"
"""One tensor blob; the layer's name is the tensor's name or the group's prefix."""
JSON: Final = "application/vnd.ollama.image.json"
"""One JSON file of the source; the layer's name is the file's name."""
TEMPLATE: Final = "application/vnd.ollama.image.template"
SYSTEM: Final = "application/vnd.ollama.image.system"
LICENSE: Final = "application/vnd.ollama.image.license"
PARAMS: Final = "application/vnd.ollama.image.params"
MODEL: Final = "application/vnd.ollama.image.model"
"""A GGUF file. Models with such a layer are Ollama's own; we read them and write none."""
PROJECTOR: Final = "application/vnd.ollama.image.projector"
ADAPTER: Final = "application/vnd.ollama.image.adapter"
DRAFT: Final = "application/vnd.ollama.image.draft"
GGUF: Final = (MODEL, PROJECTOR, ADAPTER)
"""The layers that are GGUF files; they have no names."""
WEIGHTS: Final = (TENSOR, *GGUF)
"""The layers that hold tensors."""

FILE: Final = "application/vnd.blobstore.file.v1"
"""One file of the source that is not JSON, or too large for it, as it is. Ollama ignores it."""
STACKS: Final = "application/vnd.blobstore.stacks.v1+json"
"""Which source tensors each stacked expert tensor was made of. Ollama ignores it."""
SOURCE: Final = "application/vnd.blobstore.source.v1+json"
"""What the model was imported from. Ollama ignores it."""

LOCAL_MANIFEST: Final = "vnd.blobstore.manifest"
"""The annotation of a remote manifest that names the digest of the local one."""
