"""What a model's metadata says about its quantized weights, by their runtime names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.contents import COMPANIONS
from blobstore.errors import UnsupportedDType
from blobstore.frameworks import FLOATS, original_dtype
from blobstore.quantize.metadata import GROUP_SIZE, TYPE, described
from blobstore.quantize.recipes import SCALE
from blobstore.tensor import DTYPES, TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.frameworks import FloatName
    from blobstore.places import Place
    from blobstore.quantize.formats import QuantFormat


class PackedWeights:
    """The quantized weights of the model ``name``: ``quantized`` has their types, as stored."""

    def __init__(
        self,
        name: str,
        places: Mapping[str, Place],
        quantized: Mapping[str, tuple[str, int]],
    ) -> None:
        self._name = name
        self._places = places
        self._quantized = quantized

    def format(self, name: str) -> tuple[QuantFormat, int]:
        """Return the type of a weight, and how many of its elements share a scale.

        Raises:
            UnsupportedDType: its blob does not say.
        """
        quant_type, group_size = self._quantized[name]
        specs = {suffix: self._spec(end) for suffix, end in self.companions(name).items()}
        metadata = {TYPE: quant_type, GROUP_SIZE: str(group_size)}
        known = described(self._spec(name), specs, metadata)
        if known is None:
            message = (
                f"tensor {quoted(name)} of {self._name} is quantized, but its blob does not say "
                "how; read it as it is stored"
            )
            raise UnsupportedDType(message)
        return known

    def companions(self, name: str) -> dict[str, str]:
        """Return the names of a weight's companions by suffix; another blob's are none."""
        places, blob = self._places, self._places[name][2]
        ends = {suffix: name + end for suffix, end in COMPANIONS.items()}
        return {key: end for key, end in ends.items() if end in places and places[end][2] == blob}

    def all_companions(self) -> set[str]:
        """Return the names of the companions of all weights."""
        return {end for name in self._quantized for end in self.companions(name).values()}

    def original_dtype(self, name: str) -> FloatName:
        """Return the element type that a weight had before, as far as its blob tells."""
        item, _ = self.format(name)
        return original_dtype(item, DTYPES[self._places[name + COMPANIONS[SCALE]][0]])

    def plain_spec(self, name: str) -> TensorSpec:
        """Return what a weight is as plain numbers."""
        item, _ = self.format(name)
        shape = self._places[name][1]
        dtype = FLOATS[self.original_dtype(name)]
        return TensorSpec(name, dtype, (*shape[:-1], item.columns(shape[-1])))

    def _spec(self, name: str) -> TensorSpec:
        dtype, shape, _, _ = self._places[name]
        return TensorSpec(name, DTYPES[dtype], tuple(shape))
