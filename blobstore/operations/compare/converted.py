"""Undoes llama.cpp's conversion of a GGUF model: the names of its tensors, their rows, and the 1 in some norms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from blobstore.core import interrupts
from blobstore.core.escape import quote
from blobstore.errors import BlobDamaged
from blobstore.gguf.names import EMBEDDING, EXPERT, HEAD, origin_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping
    from typing import Final

    import numpy as np

    from blobstore.gguf.header import Value
    from blobstore.gguf.names import Architecture, Origin
    from blobstore.operations.compare.source_tensor import SourceTensor

    Array = np.ndarray[Any, Any]
    Tensors = Mapping[str, SourceTensor]

_EMBEDDING_END: Final = EMBEDDING.removeprefix("model.")
_MAX_EXPERTS: Final = 4096


def pair_names(
    tensors: Tensors, architecture: Architecture, metadata: Mapping[str, Value], others: Tensors
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a GGUF model and those of another model by the names of the other one.

    Tensors that the architecture does not list keep their names. Where one of the models has no output head
    because it shares the embedding, that is paired with the head of the other.

    Raises:
        BlobDamaged: the tensors contradict the metadata, or two of them would have the same name.
        InvalidGguf: the metadata lack what the architecture needs.
    """
    # Models with several parts have their language model under another prefix.
    embedding = _only(others, _EMBEDDING_END, EMBEDDING)
    head = _only(others, HEAD, HEAD)
    prefix = embedding.removesuffix(_EMBEDDING_END)
    found: dict[str, SourceTensor] = {}
    scales = dict(_scales(tensors))
    used = {scale.name for scale in scales.values()}
    for tensor in tensors.values():
        interrupts.check()
        if tensor.name in used:
            continue
        origin = origin_of(tensor.name, architecture, metadata)
        scale = scales.get(tensor.name)
        scaled = tensor if scale is None else tensor._replace(scale=scale.stored)
        for part in [tensor] if origin is None else _parts(scaled, origin):
            name = head if part.name == HEAD else part.name
            if origin is not None and name.startswith("model."):
                name = prefix + name.removeprefix("model.")
            moved = part._replace(name=name)
            if found.setdefault(name, moved) is not moved:
                raise BlobDamaged(f"two tensors would both be called {quote(name)}")
    return _with_head(found, others, embedding, head), _with_head(others, found, embedding, head)


def _scales(tensors: Tensors) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the names of NVFP4 weights, and their scales: a number each, or a number per expert."""
    for tensor in tensors.values():
        scale = tensors.get(tensor.name.removesuffix(".weight") + ".scale")
        if (
            scale is not None
            and tensor.type == "gguf_nvfp4"
            and scale.type == "F32"
            and scale.shape in ((), (1,), tensor.shape[:-2])
            and scale.nbytes
        ):
            yield tensor.name, scale


def _only(names: Collection[str], end: str, default: str) -> str:
    """Return the only name with an end, or the default."""
    found = [name for name in names if name.endswith(end)]
    return found[0] if len(found) == 1 else default


def _with_head(tensors: Tensors, others: Tensors, embedding: str, head: str) -> Tensors:
    if head in tensors or head not in others or embedding not in tensors:
        return tensors
    return {**tensors, head: tensors[embedding]._replace(name=head)}


def _parts(tensor: SourceTensor, origin: Origin) -> Iterator[SourceTensor]:
    """Yield the tensors that a tensor was made of."""
    shape = tensor.shape
    if origin.heads and (not shape or shape[0] % (2 * origin.heads)):
        raise BlobDamaged(
            f"tensor {quote(tensor.name)} has shape {list(shape)}, whose rows cannot be those of "
            f"{origin.heads} attention heads"
        )
    converted = tensor._replace(origin=origin, name=origin.name)
    if EXPERT not in origin.name or not 1 <= shape[0] <= _MAX_EXPERTS:
        yield converted
        return
    for place in range(shape[0]):
        name = origin.name.replace(EXPERT, str(place))
        yield converted._replace(name=name, place=place, parts=shape[0])


def plus_one(values: Array) -> Array:
    """Return the sums with 1 as llama.cpp computes them: in float32, or float16 if that is the type."""
    import numpy as np  # diff reads names alone, and starts faster without it

    sums: Array = (values if values.dtype == np.float16 else values.astype(np.float32)) + 1
    return sums


def row_order(tensor: SourceTensor) -> Array | None:
    """Return the number of each row of the source in the stored tensor; None if they are the same."""
    if tensor.origin is None or not tensor.origin.heads:
        return None
    import numpy as np

    rows = np.arange(tensor.shape[0]).reshape(tensor.origin.heads, -1, 2)
    return rows.swapaxes(1, 2).reshape(-1)
