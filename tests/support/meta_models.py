"""Tiny Llamas in Meta's form, whose shards are in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from blobstore.core.files import FileVersion
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.sources.base import SourceOptions
from blobstore.sources.meta.source import MetaFolder

Tensors = dict[str, torch.Tensor]


Params = dict[str, Any]


CODES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
}


PARAMS: Params = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": 48,
    "multiple_of": 8,
    "norm_eps": 1e-05,
    "rope_theta": 500000.0,
}


WIDTH = 96
"""Of the feed-forward: 8 shards divide it, and it is more than Meta's rounding would give."""


class MemoryShard:
    """A shard that gives its bytes in pieces smaller than the buffer, and counts what it does."""

    def __init__(self, tensors: Tensors, *, piece: int = 1000) -> None:
        self.specs = {
            name: TensorSpec(name, DTYPES[CODES[tensor.dtype]], tuple(tensor.shape))
            for name, tensor in tensors.items()
        }
        self.path = Path("memory")
        self.notices: Sequence[str] = ["a notice"]
        self.values: Any = None
        self.is_open = False
        self.longest_read = 0
        self._data = {name: raw(tensor) for name, tensor in tensors.items()}
        self._piece = piece

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        return self.read_range(name, 0, len(self._data[name]), buffer)

    def header(self) -> bytes:
        return b""

    def read_range(
        self, name: str, begin: int, end: int, buffer: memoryview
    ) -> Iterator[memoryview]:
        assert 0 <= begin < end <= len(self._data[name])
        self.longest_read = max(self.longest_read, end - begin)
        while begin < end:
            count = min(len(buffer), self._piece, end - begin)
            buffer[:count] = self._data[name][begin : begin + count]
            yield buffer[:count]
            buffer[:count] = b"\xee" * count  # fails tests that keep a piece
            begin += count

    def version(self) -> FileVersion:
        return FileVersion(0, id(self), 0, 0, 0)

    def close(self) -> None:
        self.is_open = False


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def hf_model(params: Params, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Tensors:
    """Return the state dict of a random Llama, as transformers has it."""
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=params["dim"],
            intermediate_size=WIDTH,
            num_attention_heads=params["n_heads"],
            num_key_value_heads=params.get("n_kv_heads") or params["n_heads"],
            num_hidden_layers=params["n_layers"],
            vocab_size=48,
            **config,
        )
    )
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.normal_()
    return tensors


NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "tok_embeddings",
    "lm_head": "output",
}


def to_meta(tensors: Tensors, params: Params) -> Tensors:
    """Return a state dict of transformers in Meta's form: pairs of rows side by side again."""
    size = params["dim"] // params["n_heads"]
    found = {}
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = tensor.unflatten(0, (-1, size))
            halves = heads[:, : size // 2], heads[:, size // 2 :]
            tensor = torch.stack(halves, dim=2).flatten(0, 2)  # noqa: PLW2901 - another form of it
        for ours, meta in NAMES.items():
            name = name.replace(ours, meta)  # noqa: PLW2901 - as above
        found[name.removeprefix("model.")] = tensor.clone()
    return found


def split(tensors: Tensors, shards: int, *, embedding: int = 0) -> list[Tensors]:
    """Return what each of Meta's processors holds."""
    result: list[Tensors] = [{} for _ in range(shards)]
    for name, tensor in tensors.items():
        part = name.split(".")[-2]
        if "norm" in part or "rope" in part:
            parts: Any = [tensor] * shards
        else:
            dim = embedding if part == "tok_embeddings" else int(part in ("wo", "w2"))
            parts = tensor.chunk(shards, dim=dim)
        assert len(parts) == shards
        for shard, piece in zip(result, parts, strict=True):
            shard[name] = piece.clone()
    return result


class Maker:
    """Writes Meta folders whose shards are in memory, and opens them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shards: dict[str, MemoryShard] = {}
        self.piece = 1000

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            assert not {name for name, shard in self.shards.items() if shard.is_open}

    def write(self, shards: list[Tensors], params: object = PARAMS) -> Maker:
        for number, tensors in enumerate(shards):
            name = f"consolidated.{number:02}.pth"
            (self.folder / name).touch()
            self.shards[name] = MemoryShard(tensors, piece=self.piece)
        content = params if isinstance(params, str) else json.dumps(params)
        (self.folder / "params.json").write_text(content)
        return self

    def open(self, *, keep_names: bool = False) -> MetaFolder:
        return MetaFolder(self.folder, self.open_shard, SourceOptions(keep_names=keep_names))

    def open_shard(self, path: Path, _: object = None) -> MemoryShard:
        shard = self.shards[path.name]
        shard.is_open = True
        return shard


def contents(source: MetaFolder, size: int = 1 << 16) -> dict[str, tuple[Any, bytes]]:
    """Return type, shape and bytes of all tensors."""
    buffer = memoryview(bytearray(size))
    return {
        name: (
            (spec.dtype.value, spec.shape),
            b"".join(bytes(piece) for piece in source.read(name, buffer)),
        )
        for name, spec in source.specs.items()
    }


def expected(tensors: Tensors) -> dict[str, tuple[Any, bytes]]:
    return {
        name: ((CODES[tensor.dtype], tuple(tensor.shape)), raw(tensor))
        for name, tensor in tensors.items()
    }


def closing(source: MetaFolder) -> MetaFolder:
    source.close()
    return source
