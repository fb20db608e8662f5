"""Parts of the tensors of an opened model: slices, and plans of which rank takes what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from blobstore.core.escape import quoted
from blobstore.core.slicing import cut
from blobstore.core.tensor import DTYPES, TensorSpec
from blobstore.errors import TensorNotFound, UsageError

if TYPE_CHECKING:
    from blobstore.core.slicing import Cut, Index
    from blobstore.frameworks import Dequantize
    from blobstore.packed_weights import PackedWeights
    from blobstore.places import Place

Plan = Mapping[str, "Index"] | Callable[[str], "Index | None"]
"""What is taken of each tensor, by name; None or nothing means all of it."""


class TensorSlice:
    """A tensor of which parts are taken, as ``get_slice()`` of ``safetensors`` gives it.

    ``slice[a:b, c:d]`` takes whole numbers, slices of step 1 and ``...``; bounds are clipped as
    Python does.
    """

    def __init__(self, spec: TensorSpec, take: Callable[[Index], Any]) -> None:
        self.spec = spec
        """Name, element type and shape of the whole tensor."""
        self._take = take

    def __repr__(self) -> str:
        name, dtype, shape = self.spec
        return f"<TensorSlice of {quoted(name)}: {dtype.value} {list(shape)}>"

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self.spec.shape)

    def get_dtype(self) -> str:
        """Return the element type by its name in safetensors files."""
        name: str = self.spec.dtype.value
        return name

    def __getitem__(self, index: Index) -> Any:
        """Return a part of the tensor.

        Raises:
            UsageError: the index means no part, or one that is not there. Otherwise as
                :meth:`Model.__getitem__`.
        """
        return self._take(index)

    __iter__ = None  # else Python would look for the parts 0, 1, 2 and so on


class Parts:
    """Takes parts of a model's tensors.

    Args:
        name: the model's, for messages.
        places: where its tensors are.
        packed: its quantized weights.
        take: gives a part of what is stored under a name.
        dequantize: gives the arithmetic of the arrays' framework, if weights are given as plain
            numbers.
    """

    def __init__(
        self,
        name: str,
        places: Mapping[str, Place],
        packed: PackedWeights,
        take: Callable[[str, Cut], Any],
        dequantize: Callable[[], Dequantize] | None,
    ) -> None:
        self._name = name
        self._places = places
        self._packed = packed
        self._take = take
        self._dequantize = dequantize

    def slice_of(self, name: str) -> TensorSlice:
        """Return a tensor that is there, to take parts of; see :meth:`Model.get_slice`."""
        if (dequantize := self._dequantize) and name in self._packed:
            spec = self._packed.plain_spec(name)
            return TensorSlice(spec, lambda index: self._plain(name, index, dequantize()))
        dtype, shape, _, _ = self._places[name]
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        return TensorSlice(spec, lambda index: self._take(name, cut(spec, index)))

    def quantized(self, name: str, index: Index) -> dict[str, Any]:
        """Return a part of a packed weight; see :meth:`Model.quantized_slice`."""
        if name not in self._packed:
            message = f"model {self._name} has no quantized weight {quoted(name)}"
            raise TensorNotFound(message)
        cuts = self._packed.part(name, index).cuts
        return {end: self._take(end, part) for end, part in cuts.items()}

    def planned(self, plan: Plan, whole: Callable[[str], Any]) -> Callable[[str], Any]:
        """Return what gives the part of each tensor, and by ``whole`` those that are not cut.

        Raises:
            TensorNotFound: the plan has a name that is none of the model's.
            UsageError: it has the name of what is cut with its weight.
        """
        owners = self._packed.owners()
        if isinstance(plan, Mapping):
            self._check(plan, owners)
            plan = plan.get
        chosen = plan
        packed = {} if self._dequantize else owners | {name: name for name in owners.values()}

        def take(name: str) -> Any:
            weight = packed.get(name, name)
            index = chosen(weight)
            if index is None:
                return whole(name)
            if name in packed:
                return self._take(name, self._packed.part(weight, index).cuts[name])
            return self.slice_of(name)[index]

        return take

    def _check(self, plan: Mapping[str, Index], owners: Mapping[str, str]) -> None:
        for name in plan:
            if name not in self._places or (self._dequantize and name in owners):
                message = f"model {self._name} has no tensor {quoted(name)} to take a part of"
                raise TensorNotFound(message)
            if name in owners:
                message = (
                    f"tensor {quoted(name)} of {self._name} is cut with {quoted(owners[name])}: "
                    "take a part of that"
                )
                raise UsageError(message)

    def _plain(self, name: str, index: Index, dequantize: Dequantize) -> Any:
        part = self._packed.part(name, index, widened=True)
        arrays = {end: self._take(end, taken) for end, taken in part.cuts.items()}
        return self._packed.numbers(name, arrays, dequantize)[..., part.inner]
