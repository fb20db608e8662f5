"""The quantized weights of a model: which tensors belong to each, and how it is dequantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from blobstore.core.arguments import one_or_more
from blobstore.core.escape import quote
from blobstore.core.slicing import Selection, select
from blobstore.core.tensor import TensorSpec
from blobstore.errors import UnsupportedDType, UsageError
from blobstore.models.frameworks import FLOATS, dequantizer, original_dtype
from blobstore.models.tensors import QPARAMS
from blobstore.quantization.formats import FLOAT8_TYPE, FORMATS, GGUF_FORMATS, SCALE_SUFFIXES
from blobstore.quantization.metadata import KEYS, parse_quant_metadata
from blobstore.quantization.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.quantization.tiles import TILE_ROWS

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from blobstore.core.slicing import Index
    from blobstore.models.frameworks import FloatName
    from blobstore.models.header_index import TensorIndex
    from blobstore.quantization.formats import Float8Layout, QuantFormat


class QuantizedPart(NamedTuple):
    """A part of a quantized weight."""

    selections: dict[str, Selection]
    """What to take of the weight and of its quantization parameters, as they are stored, by name."""
    requested: tuple[int | slice, ...]
    """The index of the requested part in what was selected, in the last dimensions."""


class QuantizedWeights:
    """The quantized weights of the model ``name``.

    Args:
        name: the model, for messages.
        index: its tensors.
        framework: the framework that dequantizes.
        dequantize: whether look-ups dequantize weights, or the types for which they do.
    """

    def __init__(
        self,
        name: str,
        index: TensorIndex,
        framework: str,
        dequantize: bool | str | Collection[str],
    ) -> None:
        self._name = name
        self._index = index
        self._framework = framework
        if not isinstance(dequantize, bool):
            dequantize = one_or_more(dequantize)
            known = (*FORMATS, *GGUF_FORMATS)
            if unknown := set(dequantize).difference(known):
                raise UsageError(
                    f"there is no quantization type {quote(min(unknown))}; expected one of {', '.join(known)}"
                )
        self.dequantized: Collection[str] = frozenset(
            name
            for name, (kind, *_) in index.quantized.items()
            if (dequantize if isinstance(dequantize, bool) else kind in dequantize)
        )
        """The weights that look-ups dequantize."""

    def __contains__(self, name: str) -> bool:
        return name in self._index.quantized

    def qparams(self, name: str) -> dict[str, str]:
        """Return the names of a weight's quantization parameters by suffix. They are in the same blob."""
        index, slot = self._index, self._index.slot(name)
        if index.quantized[name][0] in GGUF_FORMATS:
            return {}
        ends = list(QPARAMS.items())
        if index.quantized[name][0] == FLOAT8_TYPE:
            ends = [(SCALE, end) for end in SCALE_SUFFIXES]
        names = ((suffix, name + end) for suffix, end in ends)
        return {
            suffix: qparam
            for suffix, qparam in names
            if qparam in index.entries and index.slot(qparam) == slot
        }

    def owners(self, weights: Collection[str] | None = None) -> dict[str, str]:
        """Return the weight of each quantization parameter of some weights, or of all."""
        weights = self._index.quantized if weights is None else weights
        return {name: weight for weight in weights for name in self.qparams(weight).values()}

    def format(self, name: str) -> tuple[QuantFormat, int]:
        """Return the type of a weight, and how many of its elements share a scale.

        Raises:
            UnsupportedDType: its blob does not say.
        """
        qparams = self.qparams(name).items()
        specs = {suffix: self._index.spec(qparam) for suffix, qparam in qparams}
        metadata = dict(zip(KEYS, map(str, self._index.quantized[name]), strict=False))
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
        dtype = self._original_dtype(name, item)
        return TensorSpec(name, FLOATS[dtype], (*shape[:-1], item.columns(shape[-1])))

    def dequantize(
        self, name: str, arrays: Mapping[str, Any], dtype: FloatName | None = None
    ) -> Any:
        """Dequantize a weight or a part of it.

        Args:
            name: the weight.
            arrays: the stored parts of the weight and of its quantization parameters, by name.
            dtype: the element type to return; by default the one before quantization.

        Raises:
            UnsupportedDType: as :meth:`format`.
        """
        item, group_size = self.format(name)
        names = self.qparams(name)
        scale, bias, scalar = (
            arrays.get(names.get(suffix, "")) for suffix in (SCALE, BIAS, GLOBAL_SCALE)
        )
        global_scale = None if scalar is None else scalar.item()
        chosen = dtype or self._original_dtype(name, item)
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
        if item.float8 is not None:
            return self._part_of_blocks(name, item.float8, selection, widened=widened)
        if item.is_tiled:
            return self._part_of_tiles(name, selection, widened=widened)
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
        for suffix, qparam in self.qparams(name).items():
            selections[qparam] = (
                select(self._index.spec(qparam), ...)
                if suffix == GLOBAL_SCALE
                else kept.with_last(first, last)
            )
        return QuantizedPart(selections, _within(selection, [bounds]))

    def _part_of_blocks(
        self, name: str, layout: Float8Layout, selection: Selection, *, widened: bool
    ) -> QuantizedPart:
        """Return where a part of an fp8 weight is stored; see :meth:`part`."""
        shape = self._index.spec(name).shape
        scale = self._index.spec(self.qparams(name)[SCALE])
        rows, columns = selection.ranges[-2:]
        bounds, blocks = [], []
        sizes = (1, *layout.block)[-len(shape) :]
        for (start, stop), size, count in zip(selection.ranges, sizes, shape, strict=True):
            first, last = start // size, -(-stop // size)
            is_whole = count <= size  # one scale for any part of it
            blocks.append((0, 1) if is_whole else (first, last))
            bounds.append((start, stop) if is_whole else (first * size, min(last * size, count)))
        if tuple(bounds) != selection.ranges and not widened:
            height, width = layout.block
            raise UsageError(
                f"tensor {quote(name)} of {self._name} is quantized in blocks of {height} x {width}; "
                f"rows {rows[0]} to {rows[1]} and columns {columns[0]} to {columns[1]} would split "
                "one: open the model with dequantize=True for that"
            )
        is_kept = (*selection.is_kept[:-2], True, True)
        part = Selection(tuple(bounds), is_kept)
        if len(scale.shape) > len(shape):  # [rows, blocks, 1]
            blocks.append((0, 1))
            is_kept = (*is_kept, True)
        scales = Selection(tuple(blocks[: len(scale.shape)]), is_kept[: len(scale.shape)])
        if scale.elements == 1:
            scales = select(scale, ...)
        selections = {name: part, scale.name: scales}
        return QuantizedPart(selections, _within(selection, bounds[-2:]))

    def _part_of_tiles(self, name: str, selection: Selection, *, widened: bool) -> QuantizedPart:
        """Return where a part of a weight with tiled scales is stored; see :meth:`part`."""
        rows, columns = self.dequantized_spec(name).shape
        start, stop = selection.ranges[0]
        first, last = start // TILE_ROWS * TILE_ROWS, -(-stop // TILE_ROWS) * TILE_ROWS
        bounds = ((first, min(last, rows)), (0, columns))
        if bounds != selection.ranges and not widened:
            raise UsageError(
                f"tensor {quote(name)} of {self._name} has scales in tiles of {TILE_ROWS} rows; the part "
                "would split one, or a row: open the model with dequantize=True for that"
            )
        selections = {name: select(self._index.spec(name), slice(*bounds[0]))}
        for suffix, qparam in self.qparams(name).items():
            part = ... if suffix == GLOBAL_SCALE else slice(first, last)
            selections[qparam] = select(self._index.spec(qparam), part)
        return QuantizedPart(selections, _within(selection, bounds))

    def _original_dtype(self, name: str, item: QuantFormat) -> FloatName:
        scale = self.qparams(name).get(SCALE)
        return original_dtype(item, None if scale is None else self._index.spec(scale).dtype)


def _within(selection: Selection, bounds: Sequence[tuple[int, int]]) -> tuple[int | slice, ...]:
    """Return the index of a selection within the bounds of its last dimensions."""
    wanted = selection.ranges[-len(bounds) :], bounds, selection.is_kept[-len(bounds) :]
    return tuple(
        slice(start - first, stop - first) if is_kept else start - first
        for (start, stop), (first, _), is_kept in zip(*wanted, strict=True)
    )
