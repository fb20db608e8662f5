"""Dequantizes packed weights to torch tensors, on any device."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from blobstore.quantization.formats import QuantFormat

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PIECE = {"cpu": 1 << 20}
"""Elements that are computed at once; on a CPU they fit in its cache."""
_DEVICE_PIECE = 1 << 24


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    item: QuantFormat,
    group_size: int,
    dtype: str,
    global_scale: float | None = None,
) -> torch.Tensor:
    """Return packed values as :func:`blobstore.quantization.numpy.dequantize` does.

    Args:
        weight: uint32 words of shape ``(..., words)``.
        scale: one value per group; a float type for affine types, uint8 otherwise.
        bias: one value per group for affine types, else None.
        item: the quantization type.
        group_size: elements that share a scale.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        global_scale: additional factor of all values of an nvfp4 weight.
    """
    known: torch.dtype = getattr(torch, dtype)
    *rows, words = weight.shape
    columns = item.columns(words)
    result = torch.empty((*rows, columns), dtype=known, device=weight.device)
    if not result.numel():
        return result
    groups = result.view(-1, group_size)
    packed = weight.contiguous().view(torch.uint8).view(len(groups), -1)
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
        factor = _float_scale(item.mode, weight.device)[scales[piece].int()]
        if global_scale is None:
            numbers = _float_values(packed[piece], item.bits, known)
            torch.mul(numbers, factor.to(known), out=groups[piece])
        else:
            numbers = _float_values(packed[piece], item.bits, torch.float32)
            groups[piece] = numbers.mul_(factor.mul_(global_scale))
    return result


def _codes(stream: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes in rows of bytes; each row is one little-endian stream of bits."""
    if bits == 8:  # noqa: PLR2004 - a byte
        return stream
    if bits == 4:  # noqa: PLR2004 - half a byte
        return torch.stack((stream & 15, stream >> 4), dim=-1).flatten(1)
    # Eight codes of n bits take n bytes.
    data = stream.view(-1, bits)
    places = torch.empty((len(data), 8), dtype=torch.uint8, device=stream.device)
    for place in range(8):
        byte, shift = divmod(place * bits, 8)
        code = data[:, byte] >> shift
        if shift + bits > 8:  # noqa: PLR2004 - continues in the next byte
            code |= data[:, byte + 1] << (8 - shift)
        places[:, place] = code
    return places.bitwise_and_((1 << bits) - 1).view(len(stream), -1)


def _float_values(stream: torch.Tensor, bits: int, dtype: torch.dtype) -> torch.Tensor:
    table = _table(bits, dtype, stream.device)
    return table.index_select(0, stream.flatten().int()).view(len(stream), -1).view(dtype)


@functools.cache
def _table(bits: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the E4M3 value of every byte, or its two E2M1 values as one item, lower half first.

    A table is faster than conversion by torch.
    """
    if bits == 8:  # noqa: PLR2004 - a byte
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        return codes.view(torch.float8_e4m3fn).to(dtype)
    single = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=dtype, device=device)
    byte = torch.arange(256, device=device)
    pairs = torch.stack((single[byte & 15], single[byte >> 4]), dim=-1)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).flatten()  # noqa: PLR2004 - bytes


@functools.cache
def _float_scale(mode: str, device: torch.device) -> torch.Tensor:
    """Return the value of every byte of a scale, in float32."""
    if mode == "nvfp4":
        return _table(8, torch.float32, device)
    powers = [2.0 ** (exponent - 127) for exponent in range(256)]
    return torch.tensor(powers, dtype=torch.float64).float().to(device)
