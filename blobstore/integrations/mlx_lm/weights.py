"""The tensors of a model as arrays for mlx-lm. Each tensor is copied once out of the maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.core.gc_pause import gc_paused
from blobstore.integrations.mlx_lm.names import Naming, mlx_naming
from blobstore.integrations.source_names import component_prefixes, stacked_names
from blobstore.models.tensors import QPARAMS
from blobstore.quantization import gpt_oss
from blobstore.quantization.formats import FLOAT8_TYPE, SYMMETRIC_TYPES, TILED_TYPES
from blobstore.quantization.mlx_layout import mlx_name
from blobstore.quantization.recipes import SCALE
from blobstore.safetensors.mlx import as_mlx, copied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from blobstore.core.tensor import DType, TensorSpec
    from blobstore.operations.open import Model

DECODED = frozenset({FLOAT8_TYPE, *SYMMETRIC_TYPES, *TILED_TYPES})
"""The types of which mlx-lm has no layers. Their weights are given as plain values."""
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def naming_of(stored: Model, specs: Mapping[str, TensorSpec]) -> Naming:
    """Return how the tensors of a model map to those of mlx-lm.

    Tensors of other components of a pipeline are left out.

    Args:
        stored: the model.
        specs: its tensors.

    Raises:
        BlobDamaged: the model's list of stacked tensors contradicts its tensors.
        BlobstoreError: a weight has a global scale.
    """
    others = component_prefixes(stored)
    with gc_paused():  # a model has thousands of tensors
        stacks = stacked_names(stored)
        quantized = {
            name: known for name, known in stored.quantized.items() if known[0] not in DECODED
        }
        if others:
            specs = {name: spec for name, spec in specs.items() if not name.startswith(others)}
            quantized = {name: known for name, known in quantized.items() if name in specs}
        return mlx_naming(specs, quantized, stacks)


class Weights:
    """The weights of a model, for mlx-lm.

    Args:
        stored: the model, opened for numpy.
        specs: its tensors.
        naming: how they map to tensors of mlx-lm.
        gpt_oss_weights: the tensors that mlx-lm expects in the layout of gpt-oss.
    """

    def __init__(
        self,
        stored: Model,
        specs: Mapping[str, TensorSpec],
        naming: Naming,
        gpt_oss_weights: Collection[str],
    ) -> None:
        self._stored = stored
        self._specs = specs
        self._naming = naming
        self._of_gpt_oss: dict[str, TensorSpec] = {}
        """The tensors that mlx-lm expects, by runtime name."""
        for name in gpt_oss_weights:
            for suffix in ("", SCALE):
                runtime = name + QPARAMS.get(suffix, "")
                renamed = specs[runtime]._replace(name=mlx_name(name, suffix))
                self._of_gpt_oss[runtime] = gpt_oss.folder_spec(renamed)
        hidden = {name + end for name in gpt_oss_weights for end in ("", *QPARAMS.values())}
        self._single = {
            runtime: name for runtime, name in naming.single.items() if runtime not in hidden
        }

    def stand_ins(self) -> dict[str, Any]:
        """Return zeros of the same names, types and shapes, which take no memory yet.

        Raises:
            UnsupportedDType: MLX does not have the type or cannot hold the shape of a tensor.
        """
        specs = self._specs
        known: dict[tuple[DType, tuple[int, ...]], Any] = {}

        def zeros(spec: TensorSpec) -> Any:
            key = spec.dtype, spec.shape
            if key not in known:
                empty = as_mlx(memoryview(b""), 0, spec._replace(shape=(0, *spec.shape)))
                known[key] = mx.zeros(spec.shape, empty.dtype)
            return known[key]

        found = {name: zeros(specs[runtime]) for runtime, name in self._single.items()}
        for runtime, names in self._naming.split.items():
            spec = specs[runtime]
            found |= dict.fromkeys(names, zeros(spec._replace(shape=spec.shape[1:])))
        for name, members in self._naming.joined.items():
            spec = specs[members[0]]
            found[name] = zeros(spec._replace(shape=(len(members), *spec.shape)))
        found |= {spec.name: zeros(spec) for spec in self._of_gpt_oss.values()}
        return found

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield names and arrays.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or damaged.
            UnsupportedDType: MLX does not have the type or cannot hold the shape of a tensor.
        """
        stored, specs = self._stored, self._specs
        is_decoded = any(kind in DECODED for kind, _ in stored.quantized.values())
        # Views of the maps, unless some tensors are decoded: all of these would take too much memory.
        views = stored if is_decoded else stored.tensors()
        if is_decoded:
            stored.read_ahead()
        for runtime, name in self._single.items():
            yield name, copied(views[runtime], specs[runtime])
        for runtime, names in self._naming.split.items():
            yield from zip(names, copied(views[runtime], specs[runtime]), strict=True)
        for name, members in self._naming.joined.items():
            yield name, _joined([views[member] for member in members], specs[members[0]])
        for runtime, spec in self._of_gpt_oss.items():
            array = copied(views[runtime], specs[runtime])
            yield spec.name, array.view(mx.uint8).reshape(spec.shape)


def _joined(parts: Sequence[np.ndarray[Any, Any]], spec: TensorSpec) -> Any:
    """Stack arrays of the type and shape of ``spec``, which need not be contiguous."""
    kind = copied(np.empty((0, *spec.shape), parts[0].dtype), spec).dtype
    # numpy writes into MLX's own memory. MLX's stack() would first wait for other threads to copy
    # each part, and then copy it again.
    words = _WORDS[parts[0].itemsize]
    array = mx.array(np.empty((len(parts), *spec.shape), words))
    np.stack([part.view(words) for part in parts], out=np.array(array, copy=False))
    return array.view(kind)
