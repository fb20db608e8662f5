"""The quantized weights of a model: which tensors belong to each, and how it is dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.escape import quote
from blobstore.core.slicing import select
from blobstore.core.tensor import TensorSpec
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.models.frameworks import FLOATS, dequantizer, original_dtype
from blobstore.models.tensors import COMPANIONS
from blobstore.quantization.metadata import GROUP_SIZE, TYPE, parse_quant_metadata
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.core.slicing import Index, Selection
    from blobstore.models.frameworks import FloatName
    from blobstore.models.index import TensorIndex
    from blobstore.quantization.formats import QuantFormat


class QuantizedPart(NamedTuple):
    """A part of a quantized weight."""

    selections: dict[str, Selection]
    """What to take of the weight and of its companions, as they are stored, by name."""
    columns: int | slice
    """The requested columns, among those of the groups that were selected."""


class QuantizedWeights:
    """The quantized weights of the model ``name``.

    Args:
        name: the model, for messages.
        index: its tensors.
        framework: the framework that dequantizes.
    """

    def __init__(self, name: str, index: TensorIndex, framework: str) -> None:
        self._name = name
        self._index = index
        self._framework = framework

    def __contains__(self, name: str) -> bool:
        return name in self._index.quantized

    def companions(self, name: str) -> dict[str, str]:
        """Return the names of a weight's companions by suffix. They are in the same blob."""
        index, slot = self._index, self._index.slot(name)
        names = {suffix: name + end for suffix, end in COMPANIONS.items()}
        return {
            suffix: companion
            for suffix, companion in names.items()
            if companion in index.entries and index.slot(companion) == slot
        }

    def owners(self) -> dict[str, str]:
        """Return the weight of each companion."""
        weights = self._index.quantized
        return {name: weight for weight in weights for name in self.companions(weight).values()}

    def format(self, name: str) -> tuple[QuantFormat, int]:
        """Return the type of a weight, and how many of its elements share a scale.

        Raises:
            UnsupportedDType: its blob does not say.
        """
        quant_type, group_size = self._index.quantized[name]
        companions = self.companions(name).items()
        specs = {suffix: self._index.spec(companion) for suffix, companion in companions}
        metadata = {TYPE: quant_type, GROUP_SIZE: str(group_size)}
        known = parse_quant_metadata(self._index.spec(name), specs, metadata)
        if known is None:
            raise UnsupportedDType(
                f"tensor {quote(name)} of {self._name} is quantized, but its blob does not say "
                "how; read it as it is stored"
            )
        return known

    def dequantized_spec(self, name: str) -> TensorSpec:
        """Return the spec of a weight after it is dequantized to its original type."""
        item, _ = self.format(name)
        shape = self._index.spec(name).shape
        dtype = original_dtype(item, self._index.spec(name + COMPANIONS[SCALE]).dtype)
        return TensorSpec(name, FLOATS[dtype], (*shape[:-1], item.columns(shape[-1])))

    def dequantize(
        self, name: str, arrays: Mapping[str, Any], dtype: FloatName | None = None
    ) -> Any:
        """Dequantize a weight or a part of it.

        Args:
            name: the weight.
            arrays: the stored parts of the weight and of its companions, by name.
            dtype: the element type to return; by default the one before quantization.

        Raises:
            UnsupportedDType: as :meth:`format`.
        """
        item, group_size = self.format(name)
        names = self.companions(name)
        scale, bias, scalar = (
            arrays.get(names.get(suffix, "")) for suffix in (SCALE, BIAS, GLOBAL_SCALE)
        )
        global_scale = None if scalar is None else scalar.item()
        scale_dtype = self._index.spec(name + COMPANIONS[SCALE]).dtype
        chosen = dtype or original_dtype(item, scale_dtype)
        dequantize = dequantizer(self._framework)
        return dequantize(arrays[name], scale, bias, item, group_size, chosen, global_scale)

    def part(self, name: str, index: Index, *, widened: bool = False) -> QuantizedPart:
        """Return where a part of a weight is stored.

        Args:
            name: the weight.
            index: the part, in elements of the dequantized weight.
            widened: select whole groups if the part begins or ends within one.

        Raises:
            UsageError: the part splits a group and ``widened`` is false, or as :func:`select`.
            UnsupportedDType: as :meth:`format`.
        """
        item, group_size = self.format(name)
        selection = select(self.dequantized_spec(name), index)
        start, stop = selection.ranges[-1]
        first, last = start // group_size, -(-stop // group_size)
        bounds = (first * group_size, last * group_size)
        if bounds != (start, stop) and not widened:
            raise UsageError(
                f"tensor {quote(name)} of {self._name} is quantized in groups of {group_size}; "
                f"columns {start} to {stop} would split one: open the model with dequantize=True "
                "for that"
            )
        kept = selection._replace(is_kept=(*selection.is_kept[:-1], True))
        selections = {name: kept.with_last(item.words(bounds[0]), item.words(bounds[1]))}
        for suffix, companion in self.companions(name).items():
            selections[companion] = (
                select(self._index.spec(companion), ...)
                if suffix == GLOBAL_SCALE
                else kept.with_last(first, last)
            )
        columns = slice(start - bounds[0], stop - bounds[0])
        return QuantizedPart(selections, columns if selection.is_kept[-1] else columns.start)
