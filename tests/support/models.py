"""Tiny model folders of every layout, made without any machine learning library."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from typing_extensions import Buffer

from blobstore.core.digest import BlobId, Digest
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.manifests import media_types
from blobstore.manifests.descriptor import Descriptor
from blobstore.manifests.layers_digest import layers_digest
from blobstore.manifests.model import Manifest, ModelConfig
from blobstore.safetensors.header import encode_header, in_file_order
from blobstore.store.local import LocalStore
from blobstore.store.names import replace_any

Arrays = dict[str, np.ndarray[Any, Any]]


def dense_tensors() -> Arrays:
    """Return tensors of several types: plain weights, a scalar, an empty one, odd names."""
    random = np.random.default_rng(1)
    return {
        "model.embed_tokens.weight": random.standard_normal((8, 4), dtype=np.float32),
        "model.layers.0.mlp.up_proj.weight": random.standard_normal((16, 4)).astype(np.float16),
        "model.layers.0.mlp.up_proj.bias": random.standard_normal(16),
        "model.layers.0.norm.weight": random.standard_normal(4, dtype=np.float32),
        "position_ids": np.arange(5, dtype=np.int64),
        "mask": np.array([True, False, True]),
        "scalar": np.array(7, dtype=np.uint8),
        "empty": np.zeros((0, 3), dtype=np.float32),
        "path/to/é<&>": np.arange(3, dtype=np.int16),
    }


def moe_tensors(experts: int = 12) -> Arrays:
    """Return one layer of experts and shared experts: enough that name order is not their order."""
    random = np.random.default_rng(2)
    layer = "model.layers.0.mlp"
    shapes = {"gate_proj": (6, 4), "up_proj": (6, 4), "down_proj": (4, 6)}
    members = [f"{layer}.experts.{number}" for number in range(experts)]
    tensors = {
        f"{member}.{projection}.weight": random.standard_normal(shape, dtype=np.float32)
        for member in (*members, f"{layer}.shared_experts")
        for projection, shape in shapes.items()
    }
    return tensors | {f"{layer}.gate.weight": random.standard_normal((experts, 4))}


def write_folder(
    folder: Path,
    tensors: Arrays,
    *,
    shards: int = 1,
    stem: str = "model",
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a Hugging Face folder of one component; with ``shards`` above 1, an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"config.json": b'{"model_type": "tiny"}\n', **(files or {})}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    if shards == 1:
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return folder
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"{stem}-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_safetensors(
    path: Path,
    specs: Iterable[TensorSpec],
    read: Callable[[str], Iterable[Buffer]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a file whose tensors have the bytes that ``read`` returns by name."""
    ordered = in_file_order(specs)
    with path.open("wb") as file:
        file.write(encode_header(ordered, metadata))
        for spec in ordered:
            file.writelines(read(spec.name))


def add_blobs(store: LocalStore, name: str, blobs: Mapping[str, bytes]) -> None:
    """Give a store a model of tensor blobs of any bytes, by the names of their layers.

    Its config is that of all such models, and says nothing of the layers, as older versions wrote it.
    """
    config = ModelConfig().to_bytes()
    layers = []
    with store.ingest() as ingest:
        for layer, data in blobs.items():
            added = ingest.add(len(data), lambda data=data: [data])  # type: ignore[misc]
            layers.append(Descriptor(media_types.TENSOR, added.digest, added.size, layer))
        ingest.add(len(config), lambda: [config])
        ingest.publish()
        described = Descriptor(media_types.CONFIG, Digest.of(config), len(config))
        store.names.publish(replace_any(name), Manifest(config=described, layers=tuple(layers)))


def add_blob(store: LocalStore, data: bytes) -> BlobId:
    """Add a blob that no model references yet."""
    with store.ingest() as ingest:
        added = ingest.add(len(data), lambda: [data])
        ingest.publish()
    return BlobId(added.digest, added.size)


def with_layers(store: LocalStore, manifest: Manifest, layers: Iterable[Descriptor]) -> Manifest:
    """Return a manifest with other layers, and a config in the store that knows them."""
    layers = tuple(layers)
    config = ModelConfig(layers_digest=layers_digest(layers)).to_bytes()
    digest, size = add_blob(store, config)
    described = manifest.config._replace(digest=digest, size=size)
    return replace(manifest, config=described, layers=layers)


def replace_file(store: LocalStore, name: str, file: str, content: bytes) -> None:
    """Replace a small file of a model, for example by one that no import accepts."""
    digest, size = add_blob(store, content)
    manifest = store.resolve(name)
    layers = [
        layer._replace(digest=digest, size=size) if layer.name == file else layer
        for layer in manifest.layers
    ]
    store.names.publish(replace_any(name), with_layers(store, manifest, layers))


def blob(*tensors: tuple[str, str, tuple[int, ...], bytes], **metadata: str) -> bytes:
    """Return the bytes of a canonical blob; ``__`` in a key of the metadata is a dot."""
    specs = [TensorSpec(name, DTYPES[code], shape) for name, code, shape, _ in tensors]
    keys = {key.replace("__", "."): value for key, value in metadata.items()}
    return encode_header(specs, keys) + b"".join(data for *_, data in tensors)


def quantizable_tensors() -> Arrays:
    """Return bf16 tensors that the recommended policy treats in every way, experts among them."""
    random = np.random.default_rng(3)
    layer = "model.layers.0"
    shapes = {
        "lm_head.weight": (64, 128),
        "model.embed_tokens.weight": (64, 128),
        f"{layer}.input_layernorm.weight": (128,),
        f"{layer}.self_attn.q_proj.weight": (128, 128),
        f"{layer}.self_attn.q_proj.bias": (128,),
        f"{layer}.self_attn.v_proj.weight": (64, 128),
        f"{layer}.mlp.gate.weight": (12, 128),
    } | {
        f"{layer}.mlp.experts.{number}.{projection}.weight": shape
        for number in range(12)
        for projection, shape in (("up_proj", (64, 128)), ("down_proj", (128, 64)))
    }
    return {
        name: random.normal(size=shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()
    }
