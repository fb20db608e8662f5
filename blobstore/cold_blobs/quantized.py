"""Finds how the quantized weights of a blob follow from the weights of a base."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.cold_blobs.gguf_blocks import Blocks
from blobstore.cold_blobs.scaled_weights import ScaledWeight
from blobstore.cold_blobs.tensor_index import MIN_PIECE
from blobstore.cold_blobs.weight_search import WeightSearch
from blobstore.errors import BlobDamaged
from blobstore.quantization.metadata import is_blocks, parse_quant_metadata, qparam_names
from blobstore.quantization.recipes import BIAS, SCALE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from blobstore.cold_blobs.tensor_index import Read
    from blobstore.cold_blobs.weight_search import Match, Weight
    from blobstore.compression.base import BaseBlob
    from blobstore.compression.spans import Span
    from blobstore.safetensors.header import Header


def weights_in(header: Header) -> Iterator[Weight]:
    """Yield the weights of a blob that may follow from others."""
    for entry in header.tensors.values():
        known = {
            suffix: header.tensors[name]
            for suffix, name in qparam_names(entry.spec, header.metadata)
            if name in header.tensors
        }
        has_blocks = is_blocks(entry.spec, header.metadata)
        if entry.end - entry.begin < MIN_PIECE or not (has_blocks or SCALE in known):
            continue
        specs = {suffix: other.spec for suffix, other in known.items()}
        try:
            found = parse_quant_metadata(entry.spec, specs, header.metadata)
        except BlobDamaged:  # reported when the tensor is read
            continue
        if found is None:
            continue
        weight: Weight | None
        if has_blocks:
            weight = Blocks.of(entry, found[0], header.data_start)
        else:
            tensors = [entry, *(known[suffix] for suffix in (SCALE, BIAS) if suffix in known)]
            weight = ScaledWeight.of(tensors, *found, header.data_start)
        if weight is not None:
            yield weight


def find_rules(
    header: Header, read: Read, base: BaseBlob, base_header: Header
) -> dict[str, list[Match]]:
    """Find what the weights of a blob follow from.

    Returns:
        the rows of tensors that follow, by the names of the tensors.

    Raises what reading the blobs raises.
    """
    rules: dict[str, list[Match]] = {}
    for weight in weights_in(header):
        matches = WeightSearch(read, base, base_header).matches(weight)
        if not any(match.found for match in matches):
            continue
        for number, name in enumerate(weight.tensors):
            rules[name] = [
                match._replace(found=match.found and match.found.of_tensor(number))
                for match in matches
            ]
    return rules


def divided(span: Span, matches: list[Match]) -> Iterator[Span]:
    """Yield the spans of the rows of a tensor, as they follow from a base."""
    rows = sum(match.weight.rows for match in matches)
    for weight, found in matches:
        size = span.size // rows * weight.rows
        part = span._replace(size=size, shape=(weight.rows, *span.shape[-1:]))
        if len(matches) == 1:
            part = span
        yield part if found is None else found.applied_to(part)
