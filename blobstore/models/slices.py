"""Slices of a model's tensors, and how little is read for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic

from blobstore.core.escape import quote
from blobstore.core.slicing import select
from blobstore.errors import (
    TensorNotFound,
    UsageError,
)
from blobstore.models.slice_bytes import read_slice, slice_ranges, view_slice
from blobstore.models.small_files import faults_located

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import TypeVar

    from blobstore.core.slicing import Index, Selection
    from blobstore.core.tensor import TensorSpec
    from blobstore.models.frameworks import ArrayTarget
    from blobstore.models.header_index import TensorIndex
    from blobstore.models.memory import ModelMemory
    from blobstore.models.quantized import QuantizedWeights
    from blobstore.store.blob_ranges import BlobRange, LoadedRanges

    Array = TypeVar("Array", default=Any)
else:
    from typing import TypeVar

    Array = TypeVar("Array")

Plan = Mapping[str, "Index"] | Callable[[str], "Index | None"]
"""Which part to take of each tensor, by name; None or no entry means all of it."""


_BATCH = 512 << 20
"""Bytes of tensors that are read from a remote at once."""


class TensorSlice(Generic[Array]):
    """A tensor that can be read in parts, like the result of ``get_slice()`` in ``safetensors``.

    ``slice[a:b, c:d]`` takes integers, slices of step 1 and ``...``. Bounds are clipped as Python
    does.
    """

    def __init__(self, spec: TensorSpec, read: Callable[[Index], Array]) -> None:
        self.spec = spec
        """Name, element type and shape of the whole tensor."""
        self._read = read

    def __repr__(self) -> str:
        name, dtype, shape = self.spec
        return f"<TensorSlice of {quote(name)}: {dtype.value} {list(shape)}>"

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.spec.shape)

    def get_dtype(self) -> str:
        """Return the element type by its name in safetensors files."""
        name: str = self.spec.dtype.value
        return name

    def __getitem__(self, index: Index) -> Array:
        """Return a part of the tensor.

        Raises:
            UsageError: the index is out of range, or does not select a part. Otherwise as
                :meth:`Model.__getitem__`.
        """
        return self._read(index)

    __iter__ = None  # otherwise Python would iterate over slice[0], slice[1] and so on


class SliceReader:
    """Reads parts of a model's tensors.

    Args:
        index: the tensors of the model.
        memory: its blobs.
        weights: its quantized weights.
        target: the framework and device of the arrays.
    """

    def __init__(
        self,
        index: TensorIndex,
        memory: ModelMemory,
        weights: QuantizedWeights,
        target: ArrayTarget,
    ) -> None:
        self._index = index
        self._memory = memory
        self._weights = weights
        self._target = target

    def slice(self, name: str, loaded: LoadedRanges | None = None) -> TensorSlice:
        """Return a tensor of the index, to be read in parts; see :meth:`Model.get_slice`.

        ``loaded`` has the bytes that are needed already, if their blobs are remote.
        """
        if name in self._weights.dequantized:

            def read(index: Index) -> Any:
                part = self._weights.part(name, index, widened=True)
                arrays = {
                    one: self.read(one, taken, loaded) for one, taken in part.selections.items()
                }
                return self._weights.dequantize(name, arrays)[(..., *part.requested)]

            return TensorSlice(self._weights.dequantized_spec(name), read)
        spec = self._index.spec(name)
        return TensorSlice(spec, lambda index: self.read(name, select(spec, index), loaded))

    def read_quantized(self, name: str, index: Index) -> dict[str, Any]:
        """Return a part of a quantized weight; see :meth:`Model.quantized_slice`."""
        if name not in self._weights:
            raise TensorNotFound(
                f"model {self._memory.files.reference} has no quantized weight {quote(name)}"
            )
        selections = self._weights.part(name, index).selections
        return {stored: self.read(stored, part) for stored, part in selections.items()}

    def planned(
        self, names: Sequence[str], plan: Plan, whole: Callable[[str], Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield the planned parts of tensors.

        Args:
            names: the tensors.
            plan: which part to take of each tensor.
            whole: reads the tensors that the plan does not restrict.

        Raises:
            TensorNotFound: the plan names a tensor that the model does not have.
            UsageError: the plan names scales or biases, which are sliced with their weight.
        """
        choose = self._chooser(plan)
        stored = self._stored_weights()
        indexes = (choose(stored.get(name, name)) for name in names)
        yield from self.parts(list(zip(names, indexes, strict=True)), whole)

    def parts(
        self, items: Sequence[tuple[str, Index | None]], whole: Callable[[str], Any]
    ) -> Iterator[tuple[str, Any]]:
        """Yield parts of tensors, of which those that are remote are read together.

        Args:
            items: names and indexes; None means all of a tensor.
            whole: reads all of a tensor.

        Raises:
            TensorNotFound, UsageError: as :meth:`slice`.
        """
        stored = self._stored_weights()
        reads_tensors, slot = self._memory.reads_tensors, self._index.slot
        items = [
            (name, ... if index is None and reads_tensors(slot(name)) else index)
            for name, index in items
        ]

        def selections(name: str, index: Index | None) -> Mapping[str, Selection] | None:
            """Return which parts of stored tensors are read for a tensor; None if it is read whole."""
            if index is None:
                return None
            if name in stored:
                return {name: self._weights.part(stored[name], index).selections[name]}
            if name in self._weights.dequantized:
                return self._weights.part(name, index, widened=True).selections
            return {name: select(self._index.spec(name), index)}

        for batch, loaded in self._read_ahead(items, selections):
            for name, index in batch:
                if index is None:
                    yield name, whole(name)
                elif name in stored:
                    part = self._weights.part(stored[name], index).selections[name]
                    yield name, self.read(name, part, loaded)
                else:
                    yield name, self.slice(name, loaded)[index]

    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the stored tensors that a look-up of a tensor reads."""
        weights = self._weights
        return (name, *weights.qparams(name).values()) if name in weights.dequantized else (name,)

    def _stored_weights(self) -> Mapping[str, str]:
        """Return the weight that each stored part of a quantized weight belongs to, the weight itself too."""
        owners = self._weights.owners()
        return {
            part: weight
            for part, weight in (owners | {name: name for name in owners.values()}).items()
            if weight not in self._weights.dequantized
        }

    def _chooser(self, plan: Plan) -> Callable[[str], Index | None]:
        """Return a plan as a function, after checking its names; see :meth:`planned`."""
        if not isinstance(plan, Mapping):
            return plan
        owners, model = self._weights.owners(), self._memory.files.reference
        for name in plan:
            if name not in self._index.entries or owners.get(name) in self._weights.dequantized:
                raise TensorNotFound(f"model {model} has no tensor {quote(name)} to slice")
            if name in owners:
                raise UsageError(
                    f"tensor {quote(name)} of {model} is sliced with {quote(owners[name])}: "
                    "slice that tensor instead"
                )
        return plan.get

    def _read_ahead(
        self,
        items: Sequence[tuple[str, Index | None]],
        selections: Callable[[str, Index | None], Mapping[str, Selection] | None],
    ) -> Iterator[tuple[Sequence[tuple[str, Index | None]], LoadedRanges | None]]:
        """Yield tensors in batches, after reading the bytes of each that are remote.

        A request for each tensor in turn would wait for the network each time.
        """
        memory, slot = self._memory, self._index.slot
        remote = set(filter(memory.needs_remote, {slot(name) for name, _ in items}))
        if not remote:
            yield items, None
            return
        batch: list[tuple[str, Index | None]] = []
        ranges: list[BlobRange] = []
        slots: set[int] = set()
        size = 0
        for name, index in items:
            parts = selections(name, index)
            for stored in (name,) if parts is None else parts:
                location = self._index.location(stored)
                blob = self._index.blobs[location.slot]
                if location.slot not in remote:
                    continue
                if parts is None:
                    size += blob[1] if location.slot not in slots else 0
                    slots.add(location.slot)
                else:
                    found = list(slice_ranges(blob, location, parts[stored]))
                    size += sum(one.end - one.begin for one in found)
                    ranges += found
            batch.append((name, index))
            if size >= _BATCH:
                yield batch, self._loaded(slots, ranges)
                batch, ranges, slots, size = [], [], set(), 0
        yield batch, self._loaded(slots, ranges)

    def _loaded(self, slots: set[int], ranges: list[BlobRange]) -> LoadedRanges:
        self._memory.load(slots)
        return self._memory.files.store.read_ranges(ranges)

    def read(self, name: str, part: Selection, loaded: LoadedRanges | None = None) -> Any:
        """Return a part of a tensor as stored, from memory, from ``loaded`` or from its file."""
        location = self._index.location(name)
        slot, target = location.slot, self._target
        if not self._memory.reads_parts(slot):
            region = self._memory.load((slot,))
            offset = region.offsets[slot] + location.begin
            has_views = target.has_views
            return view_slice(
                target.convert, region.memory, offset, location.spec, part, has_views=has_views
            )
        self._memory.load()  # raises an error if the model is closed
        files = self._memory.files
        with faults_located(files):
            buffer, spec = read_slice(files.store, self._index.blobs[slot], location, part, loaded)
        if not target.is_writable:
            buffer = buffer.toreadonly()
        elif buffer.readonly:
            buffer = memoryview(bytearray(buffer))
        return target.convert(buffer, 0, spec)
