"""Models as Ollama itself leaves them in a store."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

from blobstore.core.digest import Digest
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.store.local import LocalStore
from tests.support.gguf_files import TEXT, gguf_file, text

_CONFIG = (
    b'{"model_format":"gguf","model_family":"llama","model_families":["llama"],'
    b'"model_type":"8.0B","file_type":"Q4_0"}'
)


F32, Q8_0 = 0, 8


def q8_0(rows: int, columns: int, seed: int = 0) -> bytes:
    """Return rows of blocks: a scale as float16 and 32 integers of 8 bits each."""
    count = rows * columns // 32
    blocks = np.empty((count, 34), np.uint8)
    random = np.random.default_rng(seed)
    blocks[:, :2] = random.uniform(0.001, 0.01, (count, 1)).astype(np.float16).view(np.uint8)
    blocks[:, 2:] = random.integers(0, 256, (count, 32), np.uint8)
    return blocks.tobytes()


GGUF_FILE = gguf_file(
    [("general.architecture", TEXT, text("llama"))],
    [
        ("token_embd.weight", Q8_0, (64, 5), q8_0(5, 64)),
        ("output_norm.weight", F32, (64,), np.linspace(0, 1, 64, dtype=np.float32).tobytes()),
        ("blk.0.ffn_gate_exps.weight", Q8_0, (32, 3, 2), q8_0(6, 32, seed=1)),
    ],
)
"""A small file with plain tensors, and quantized ones of two and three dimensions."""
PROJECTOR = gguf_file(
    [("general.architecture", TEXT, text("clip"))], [("v.weight", F32, (2,), bytes(8))]
)
ADAPTER = gguf_file(
    [
        ("general.architecture", TEXT, text("llama")),
        ("general.type", TEXT, text("adapter")),
    ],
    [("token_embd.weight.lora_a", F32, (2,), bytes(8))],
)


def add_gguf_model(
    store: LocalStore,
    name: str,
    content: bytes = GGUF_FILE,
    *,
    projector: bytes | None = None,
    others: Mapping[str, bytes] = MappingProxyType({}),
    params: bytes = b'{"stop":["<|end|>"]}\n',
) -> Manifest:
    """Write a model of Ollama's own: one GGUF layer, or two, and layers without names, ``others`` by type."""
    layers = [
        _add_blob(store, media_types.MODEL, content),
        *([] if projector is None else [_add_blob(store, media_types.PROJECTOR, projector)]),
        _add_blob(store, media_types.TEMPLATE, b"{{ .Prompt }}"),
        _add_blob(store, media_types.LICENSE, b"first license"),
        _add_blob(store, media_types.LICENSE, b"second license"),
        *(_add_blob(store, media_type, data) for media_type, data in others.items()),
        _add_blob(store, media_types.PARAMS, params),
    ]
    manifest = Manifest(config=_add_blob(store, media_types.CONFIG, _CONFIG), layers=tuple(layers))
    path = store.manifest_path(Reference.parse(name))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.to_bytes())
    return manifest


def _add_blob(store: LocalStore, media_type: str, data: bytes) -> Descriptor:
    digest = Digest.of(data)
    store.folder("blobs").mkdir(parents=True, exist_ok=True)
    (store.folder("blobs") / digest.file_name).write_bytes(data)
    return Descriptor(media_type=media_type, digest=digest, size=len(data))
