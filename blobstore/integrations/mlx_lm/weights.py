"""The tensors of a model as the arrays that mlx-lm takes, each copied once out of the maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np

from blobstore.core.gc_pause import gc_paused
from blobstore.integrations.mlx_lm.names import Naming, mlx_naming
from blobstore.integrations.source_names import component_prefixes, stacked_names
from blobstore.models.tensors import COMPANIONS
from blobstore.quantization import gpt_oss
from blobstore.quantization.mlx_layout import mlx_name
from blobstore.quantization.recipes import SCALE
from blobstore.safetensors.mlx import as_mlx, copied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from blobstore.core.tensor import DType, TensorSpec
    from blobstore.operations.open import Model
    from blobstore.store.local import LocalStore

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def naming_of(store: LocalStore, stored: Model, specs: Mapping[str, TensorSpec]) -> Naming:
    """Return how the tensors of a model become those that mlx-lm takes.

    Those of a pipeline's other components do not.

    Args:
        store: that of the model.
        stored: the model.
        specs: its tensors.

    Raises:
        BlobDamaged: what is said of stacked tensors contradicts them.
        BlobstoreError: a weight has a global scale.
    """
    others = component_prefixes(stored)
    with gc_paused():  # a model has thousands of tensors
        stacks, quantized = stacked_names(store, stored), stored.quantized
        if others:
            specs = {name: spec for name, spec in specs.items() if not name.startswith(others)}
            quantized = {name: known for name, known in quantized.items() if name in specs}
        return mlx_naming(specs, quantized, stacks)


class Weights:
    """The weights of a model as mlx-lm takes them.

    Args:
        stored: the model, opened for numpy.
        specs: its tensors.
        naming: what they become.
        gpt_oss_weights: those that mlx-lm expects in the form of gpt-oss.
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
        self._of_gpt_oss = {
            name + COMPANIONS.get(suffix, ""): mlx_name(name, suffix)
            for name in gpt_oss_weights
            for suffix in ("", SCALE)
        }
        hidden = {name + end for name in gpt_oss_weights for end in ("", *COMPANIONS.values())}
        self._single = {
            runtime: name for runtime, name in naming.single.items() if runtime not in hidden
        }

    def stand_ins(self) -> dict[str, Any]:
        """Return arrays of the same names, types and shapes, of zeros that take no memory yet.

        Raises:
            UnsupportedDType: MLX has no type for a tensor, or cannot hold it.
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
        for runtime in self._of_gpt_oss:
            spec = self._gpt_oss_spec(runtime)
            found[spec.name] = zeros(spec)
        return found

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield names and arrays.

        Raises:
            BlobMissing, BlobDamaged: a blob is not whole.
            UnsupportedDType: MLX has no type for a tensor, or cannot hold it.
        """
        views, specs = self._stored.tensors(), self._specs  # parts of the maps
        for runtime, name in self._single.items():
            yield name, copied(views[runtime], specs[runtime])
        for runtime, names in self._naming.split.items():
            yield from zip(names, copied(views[runtime], specs[runtime]), strict=True)
        for name, members in self._naming.joined.items():
            yield name, _joined([views[member] for member in members], specs[members[0]])
        for runtime in self._of_gpt_oss:
            spec = self._gpt_oss_spec(runtime)
            array = copied(views[runtime], specs[runtime])
            yield spec.name, array.view(mx.uint8).reshape(spec.shape)

    def _gpt_oss_spec(self, runtime: str) -> TensorSpec:
        return gpt_oss.folder_spec(self._specs[runtime]._replace(name=self._of_gpt_oss[runtime]))


def _joined(parts: Sequence[np.ndarray[Any, Any]], spec: TensorSpec) -> Any:
    """Return one array of several of the one type and shape of ``spec``, which lie anywhere.

    Raises:
        UnsupportedDType: MLX cannot hold it.
    """
    kind = copied(np.empty((0, *spec.shape), parts[0].dtype), spec).dtype
    # Written into MLX's own memory, as which numpy sees it: its stack() would copy what it first
    # waits for other threads to copy.
    words = _WORDS[parts[0].itemsize]
    array = mx.array(np.empty((len(parts), *spec.shape), words))
    np.stack([part.view(words) for part in parts], out=np.array(array, copy=False))
    return array.view(kind)
