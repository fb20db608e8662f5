"""What a model's metadata says about its quantized weights, by their runtime names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.slicing import select
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.models.frameworks import FLOATS, original_dtype
from blobstore.models.tensors import COMPANIONS
from blobstore.quantization.metadata import GROUP_SIZE, TYPE, described
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.core.slicing import Index, Selection
    from blobstore.models.frameworks import Dequantize, FloatName
    from blobstore.models.index import Place
    from blobstore.quantization.formats import QuantFormat


class PackedPart(NamedTuple):
    """A part of a quantized weight."""

    cuts: dict[str, Selection]
    """What is taken of the weight and of its companions, as they are stored, by name."""
    inner: int | slice
    """The columns that were asked for, of those that these groups hold."""


class QuantizedWeights:
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

    def __contains__(self, name: str) -> bool:
        return name in self._quantized

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
            raise UnsupportedDType(
                f"tensor {quote(name)} of {self._name} is quantized, but its blob does not say "
                "how; read it as it is stored"
            )
        return known

    def companions(self, name: str) -> dict[str, str]:
        """Return the names of a weight's companions by suffix; another blob's are none."""
        places, blob = self._places, self._places[name][2]
        ends = {suffix: name + end for suffix, end in COMPANIONS.items()}
        return {key: end for key, end in ends.items() if end in places and places[end][2] == blob}

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

    def numbers(
        self,
        name: str,
        arrays: Mapping[str, Any],
        dequantize: Dequantize,
        dtype: FloatName | None = None,
    ) -> Any:
        """Return a weight, or a part of it, as plain numbers.

        Args:
            name: of the weight.
            arrays: what is stored of it, by name.
            dequantize: the arithmetic of their framework.
            dtype: by default what the weight had before.

        Raises:
            UnsupportedDType: as :meth:`format`.
        """
        item, group_size = self.format(name)
        names = self.companions(name)
        scale, bias, scalar = (
            arrays.get(names.get(key, "")) for key in (SCALE, BIAS, GLOBAL_SCALE)
        )
        factor = None if scalar is None else scalar.item()
        chosen = dtype or self.original_dtype(name)
        return dequantize(arrays[name], scale, bias, item, group_size, chosen, factor)

    def owners(self) -> dict[str, str]:
        """Return the weight of each companion."""
        return {end: name for name in self._quantized for end in self.companions(name).values()}

    def part(self, name: str, index: Index, *, widened: bool = False) -> PackedPart:
        """Return what is stored of a part of a weight, which ``index`` asks for in plain numbers.

        Args:
            name: of the weight.
            index: what is asked for.
            widened: take whole groups if the part begins or ends inside of one.

        Raises:
            UsageError: it does, and is not to be widened; or as :func:`select`.
            UnsupportedDType: as :meth:`format`.
        """
        item, group_size = self.format(name)
        spec = self.plain_spec(name)
        whole = select(spec, index)
        start, stop = whole.ranges[-1]
        first, last = start // group_size, -(-stop // group_size)
        bounds = (first * group_size, last * group_size)
        if bounds != (start, stop) and not widened:
            raise UsageError(
                f"tensor {quote(name)} of {self._name} is quantized in groups of {group_size}; columns "
                f"{start} to {stop} would cut one apart: open the model with dequantize=True for that"
            )
        kept = whole._replace(is_kept=(*whole.is_kept[:-1], True))
        cuts = {name: kept.with_last(item.words(bounds[0]), item.words(bounds[1]))}
        for suffix, end in self.companions(name).items():
            cuts[end] = (
                select(self._spec(end), ...)
                if suffix == GLOBAL_SCALE
                else kept.with_last(first, last)
            )
        inner = slice(start - bounds[0], stop - bounds[0])
        return PackedPart(cuts, inner if whole.is_kept[-1] else inner.start)

    def _spec(self, name: str) -> TensorSpec:
        dtype, shape, _, _ = self._places[name]
        return TensorSpec(name, DTYPES[dtype], tuple(shape))
