"""Dequantizes packed weights to torch tensors, on any device."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import torch

from blobstore.quantization.fp8 import TYPES, decode_stack
from blobstore.quantization.tiles import untiled_tensor

if TYPE_CHECKING:
    from blobstore.quantization.formats import Float8Layout, QuantFormat

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE = {"cpu": 1 << 20}
"""Elements that are computed at once; on a CPU they fit in its cache."""
_DEVICE_PIECE = 1 << 24


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    item: QuantFormat,
    group_size: int,
    dtype: str,
    global_scale: float | None = None,
) -> torch.Tensor:
    """Return packed values as :func:`blobstore.quantization.quantize_numpy.dequantize` does.

    Args:
        weight: uint32 words of shape ``(..., words)``, or the values of an fp8 weight.
        scale: one value per group; a float type for integers and fp8, uint8 otherwise.
        bias: one value per group for affine types, else None.
        item: the quantization type.
        group_size: elements that share a scale.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        global_scale: additional factor of all values of an nvfp4 weight.
    """
    known: torch.dtype = getattr(torch, dtype)
    if item.block_bytes:
        from blobstore.gguf.dequantize import dequantize as dequantize_blocks  # few models

        blocks = weight.cpu().numpy()
        values = torch.from_numpy(dequantize_blocks(item.gguf_name, blocks))
        return values.to(weight.device, known)
    assert scale is not None  # noqa: S101 - only blocks of GGUF have none
    if item.float8 is not None:
        if weight.device.type == "cpu":  # numpy takes half as long
            values = weight.view(torch.uint8).numpy().view(TYPES[item.float8.weight])
            found = decode_stack(values, scale.float().numpy(), item.float8, dtype)
            return torch.from_numpy(found.view(f"u{known.itemsize}")).view(known)
        return decode(weight, scale, item.float8, known)
    *rows, words = weight.shape
    columns = item.columns(words)
    result = torch.empty((*rows, columns), dtype=known, device=weight.device)
    if not result.numel():
        return result
    groups = result.view(-1, group_size)
    # Kernels for uint32 are rare.
    packed = weight.view(torch.int32).contiguous().view(torch.uint8).view(len(groups), -1)
    if item.is_tiled:
        scale = untiled_tensor(scale, rows[0], columns // group_size)
        packed = packed if item.bits == 8 else packed >> 4 | packed << 4  # a byte
    scales = scale.reshape(-1, 1)
    biases = None if bias is None else bias.reshape(-1, 1)
    height = max(_PIECE.get(weight.device.type, _DEVICE_PIECE) // group_size, 1)
    for start in range(0, len(groups), height):
        piece = slice(start, start + height)
        if biases is not None:
            # Each step must round to the type of the scales; a fused operation would not.
            numbers = _codes(packed[piece], item.bits).to(scale.dtype)
            groups[piece] = numbers.mul_(scales[piece]).add_(biases[piece])
            continue
        if item.mode == "symmetric":
            # Codes and their differences are exact in every type of scales.
            numbers = _codes(packed[piece], item.bits).to(scale.dtype)
            groups[piece] = numbers.sub_(item.offset).mul_(scales[piece])
            continue
        factors = _float_scale(item.mode).to(weight.device, non_blocking=True)
        factor = factors[scales[piece].int()]
        if global_scale is None:
            numbers = _float_values(packed[piece], item.bits, known)
            torch.mul(numbers, factor.to(known), out=groups[piece])
        else:
            numbers = _float_values(packed[piece], item.bits, torch.float32)
            groups[piece] = numbers.mul_(factor.mul_(global_scale))
    return result


def decode(
    weight: torch.Tensor, scale: torch.Tensor, layout: Float8Layout, dtype: torch.dtype
) -> torch.Tensor:
    """Return 8-bit floats times their scales, as :func:`blobstore.quantization.fp8.decode_stack` does."""
    result = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if not result.numel():
        return result
    columns = weight.shape[-1]
    (height, width), grid = layout.blocks(weight.shape)
    scales = scale.float().reshape(grid if scale.numel() > 1 else ()).expand(grid)
    flat, rows = weight.reshape(-1, columns), result.view(-1, columns)
    step = max(_DEVICE_PIECE // columns, 1)
    complete = columns - columns % width
    for start in range(0, len(rows), step):
        products = flat[start : start + step].float()
        end = start + len(products)
        factors = scales[torch.arange(start, end, device=weight.device) // height]
        blocks = products[:, :complete].view(len(products), -1, width)
        blocks.mul_(factors[:, : complete // width, None])
        products[:, complete:].mul_(factors[:, complete // width :])
        rows[start:end] = products
        # Conversions may give NaNs of another bit pattern.
        rows[start:end].masked_fill_(products.isnan(), math.nan)
    return result


def _codes(stream: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in rows of bytes; each row is one little-endian stream of bits."""
    if bits == 8:  # a byte
        return stream
    if bits == 4:  # half a byte
        return torch.stack((stream & 15, stream >> 4), dim=-1).flatten(1)
    # Eight codes of n bits take n bytes.
    data = stream.view(-1, bits)
    places = torch.empty((len(data), 8), dtype=torch.uint8, device=stream.device)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = data[:, byte] >> shift
        if shift + bits > 8:  # continues in the next byte
            code |= data[:, byte + 1] << (8 - shift)
        places[:, place] = code
    return places.bitwise_and_((1 << bits) - 1).view(len(stream), -1)


def _float_values(stream: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    table = _table(bits, dtype).to(stream.device, non_blocking=True)
    return table.index_select(0, stream.flatten().int()).view(len(stream), -1).view(dtype)


@functools.cache
def _table(bits: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the E4M3 value of every byte, or its two E2M1 values as one item, lower half first.

    A table is faster than conversion by torch.
    """
    # On the CPU: a table in the memory of another device could be discarded with the memory pool that is
    # in use now, as vLLM does when it sleeps.
    if bits == 8:  # a byte
        codes = torch.arange(256, dtype=torch.uint8, device="cpu")
        return codes.view(torch.float8_e4m3fn).to(dtype)
    single = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device="cpu")
    byte = torch.arange(256, device="cpu")
    pairs = torch.stack((single[byte & 15], single[byte >> 4]), dim=-1)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()  # bytes


@functools.cache
def _float_scale(mode: str) -> torch.Tensor:
    """Return the value of every byte of a scale, in float32."""
    if mode == "nvfp4":
        return _table(8, torch.float32)
    powers = [2.0 ** (exponent - 127) for exponent in range(256)]
    return torch.tensor(powers, dtype=torch.float64, device="cpu").float()
