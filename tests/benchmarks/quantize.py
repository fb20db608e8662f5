"""Quantization on import compared with mlx-lm and the machine's limit, and the engines compared.

The model is a Llama of 300 tensors, 2 GiB of bf16. The limit is two threads that read the same tensors,
quantize them with MLX, hash and write the result, and sync it at the end. mlx-lm loads, quantizes
and saves the same model with the same settings; it does not sync.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch

import blobstore
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.planning.plan import QuantizeOptions
from blobstore.quantization import dequantize_torch as torch_engine
from blobstore.quantization import quantize_numpy as reference
from blobstore.quantization.formats import FORMATS, QuantFormat
from blobstore.safetensors.numpy import BF16, as_bytes
from tests.benchmarks import common
from tests.support.safetensors_file import SafetensorsFile

_THREADS = 2
_LAYERS, _HIDDEN, _INTERMEDIATE, _VOCABULARY = 33, 1536, 4096, 32_000
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": _VOCABULARY,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SIZES = {"int4": 64, "mxfp8": 32}
_LIMIT = "mx.quantize + sha256 + write + sync"
_CREATE = """
import blobstore, blobstore.operations.create.create
begin()
blobstore.create(sys.argv[1], 'm', store=blobstore.LocalStore(sys.argv[2]), jobs=2,
                 quantize=sys.argv[3], group_size=int(sys.argv[4]), policy='uniform')
"""
_MLX_LM = """
from mlx_lm.utils import load_model, quantize_model, save_model
begin()
import pathlib
bits, group_size, mode = sys.argv[3:]
model, config = load_model(pathlib.Path(sys.argv[1]), lazy=True)
model, config = quantize_model(model, config, int(group_size), int(bits), mode)
save_model(sys.argv[2], model)
"""


def make_model(folder: Path, layers: int) -> Path:
    """Write a Llama of random bf16 weights."""
    block = {
        **{f"self_attn.{part}_proj": (_HIDDEN, _HIDDEN) for part in "qkvo"},
        **{f"mlp.{part}_proj": (_INTERMEDIATE, _HIDDEN) for part in ("gate", "up")},
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{part}.weight": shape
        for layer in range(layers)
        for part, shape in block.items()
    }
    shapes |= dict.fromkeys(("lm_head.weight", "model.embed_tokens.weight"), (_VOCABULARY, _HIDDEN))
    shapes["model.norm.weight"] = (_HIDDEN,)
    random = np.random.default_rng(0)

    def values(name: str) -> list[bytes]:
        numbers = random.standard_normal(shapes[name], np.float32) * np.float32(0.02)
        return [numbers.astype(BF16).tobytes()]

    specs = [TensorSpec(name, DTYPES["BF16"], shape) for name, shape in shapes.items()]
    return common.write_model(folder, specs, values, _CONFIG | {"num_hidden_layers": layers})


def limit(source: Path, target: Path, item: QuantFormat, group_size: int) -> None:
    """Quantize, hash and write every matrix of the file in two threads, half each."""
    with SafetensorsFile.open(source) as file:
        names = sorted(file, key=lambda name: -file.view(name).spec.nbytes)

        def half(number: int) -> None:
            stream = mx.new_stream(mx.cpu)
            digest = hashlib.sha256()
            writing = os.open(f"{target}{number}", os.O_WRONLY | os.O_CREAT)
            for name in names[number::_THREADS]:
                view = file.view(name)
                parts: list[Any] = [view.data]
                if len(view.spec.shape) > 1 and "embed" not in name:
                    bits = np.frombuffer(view.data, np.uint16).reshape(view.spec.shape)
                    with mx.stream(stream):
                        parts = list(
                            mx.quantize(
                                mx.array(bits).view(mx.bfloat16),
                                group_size=group_size,
                                bits=item.bits,
                                mode=item.mode,
                            )
                        )
                        parts = [part.view(mx.uint8) for part in parts]
                        mx.eval(*parts)
                    parts = [as_bytes(np.array(part, copy=False)) for part in parts]
                for part in parts:
                    digest.update(part)
                    os.write(writing, part)
            os.fsync(writing)
            os.close(writing)

        threads = [threading.Thread(target=half, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def mlx_lm(source: Path, target: Path, item: QuantFormat, group_size: int) -> None:
    """Quantize the model with mlx-lm: the matrices that we do, and no others."""
    from mlx_lm.utils import load_model, quantize_model, save_model

    model, config = load_model(source, lazy=True)
    model, config = quantize_model(
        model,
        config,
        group_size,
        item.bits,
        item.mode,
        quant_predicate=lambda path, _: "embed" not in path,
    )
    save_model(target, model)


def imports(folder: Path, source: Path, name: str, count: int) -> None:
    """Print the tables of a whole model and one type."""
    weights = source / "model.safetensors"
    nbytes = weights.stat().st_size
    item, group_size = FORMATS[name], _SIZES[name]
    out = folder / "out"

    def once(work: Callable[[], object]) -> float:
        taken = common.timed(work)
        for path in folder.glob(f"{out.name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return taken

    def create() -> object:
        return blobstore.create(
            source,
            "m",
            store=blobstore.LocalStore(out),
            jobs=_THREADS,
            quantize=QuantizeOptions(name, group_size=group_size, policy="uniform"),
        )

    def prepare() -> None:
        os.sync()
        common.warm(weights)

    cases: dict[str, Callable[[], float]] = {
        _LIMIT: lambda: once(lambda: limit(weights, out, item, group_size)),
        "create": lambda: once(create),
        "mlx-lm": lambda: once(lambda: mlx_lm(source, out, item, group_size)),
    }
    print(f"{nbytes / common.GIB:.2f} GiB bf16 to {name}, groups of {group_size}\n")
    common.table(common.rounds(cases, count, prepare), _LIMIT, nbytes)
    size = str(group_size)
    ours = common.private_memory(_CREATE, str(source), f"{out}-ours", name, size)
    theirs = common.private_memory(
        _MLX_LM, str(source), f"{out}-theirs", str(item.bits), size, item.mode
    )
    for path in folder.glob(f"{out.name}-*"):
        shutil.rmtree(path)
    print(f"private memory: create {ours / 2**20:.0f} MiB, mlx-lm {theirs / 2**20:.0f} MiB\n")


def engines(item: QuantFormat, count: int) -> None:
    """Print the tables of one matrix and one type."""
    random = np.random.default_rng(0)
    numbers = (random.standard_normal((4096, 4096), np.float32) * np.float32(0.02)).astype(BF16)
    of_mlx = _as_mlx(numbers)
    size = item.group_size
    packed = reference.quantize(numbers, item, size)
    weight, scale, bias = (None if part is None else _as_torch(part) for part in packed)
    arrays: Any = [None if part is None else _as_mlx(part) for part in packed]
    options: dict[str, Any] = {"group_size": size, "bits": item.bits, "mode": item.mode}

    def dequantize() -> object:
        assert weight is not None
        assert scale is not None
        return torch_engine.dequantize(weight, scale, bias, item, size, "bfloat16")

    print(f"4096 x 4096 bf16 and {item.name}, one thread of Python\n")
    to_packed = {
        "mx.quantize": lambda: common.timed(lambda: mx.eval(*mx.quantize(of_mlx, **options))),
        "numpy": lambda: common.timed(lambda: reference.quantize(numbers, item, size)),
    }
    common.table(common.rounds(to_packed, count), "mx.quantize", numbers.nbytes)
    to_plain = {
        "mx.dequantize": lambda: common.timed(lambda: mx.eval(mx.dequantize(*arrays, **options))),
        "numpy": lambda: common.timed(
            lambda: reference.dequantize(*packed, item, size, "bfloat16")
        ),
        "torch": lambda: common.timed(dequantize),
    }
    common.table(common.rounds(to_plain, count), "mx.dequantize", numbers.nbytes)


def gpu(item: QuantFormat, count: int) -> None:
    """Print the common.table of one matrix on a GPU, with a copy of as many bytes as it reads and writes."""
    numbers = np.random.default_rng(0).standard_normal((8192, 8192), np.float32).astype(BF16)
    packed = reference.quantize(numbers, item, item.group_size)
    weight, scale, bias = (None if part is None else _as_torch(part).to("cuda") for part in packed)
    moved = numbers.nbytes + sum(part.nbytes for part in packed if part is not None)
    source = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")

    def finished(work: Callable[[], object]) -> float:
        def run() -> None:
            work()
            torch.cuda.synchronize()

        return common.timed(run)

    def dequantize() -> object:
        assert weight is not None
        assert scale is not None
        return torch_engine.dequantize(weight, scale, bias, item, item.group_size, "bfloat16")

    print(f"8192 x 8192 bf16 and {item.name} on {torch.cuda.get_device_name()}\n")
    cases = {
        "copy of the same bytes": lambda: finished(source.clone),
        "torch": lambda: finished(dequantize),
    }
    common.table(common.rounds(cases, count), "copy of the same bytes", moved)


def _as_torch(array: Any) -> torch.Tensor:
    if array.dtype == BF16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _as_mlx(array: Any) -> Any:
    return (
        mx.array(array.view(np.uint16)).view(mx.bfloat16)
        if array.dtype == BF16
        else mx.array(array)
    )


def main() -> None:
    """Print the tables."""
    options = common.arguments(__doc__)
    with common.workspace(options.folder) as folder:
        source = make_model(folder / "model", max(int(_LAYERS * options.scale), 1))
        for name in _SIZES:
            imports(folder, source, name, options.rounds)
    for item in FORMATS.values():
        if item.is_target:
            engines(item, options.rounds)
            if torch.cuda.is_available():
                gpu(item, options.rounds)


if __name__ == "__main__":
    main()
