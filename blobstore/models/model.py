"""A stored model that is open: its tensors by name, mapped and not copied.

Every blob is mapped once, by default when the model is opened, and no descriptor is kept: a model
that is open stays whole whatever becomes of the store's names. No byte is read before it is used.
Tensors that were handed out keep that memory, also beyond :meth:`Model.close`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from blobstore.core.escape import quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.mmap import MappedRegion
from blobstore.core.tensor import DTYPES, TensorSpec, TensorView
from blobstore.errors import (
    BlobstoreError,
    Damaged,
    TensorNotFound,
)
from blobstore.manifests import media_types
from blobstore.models.checks import check_blobs, check_level
from blobstore.models.device import upload_tensors
from blobstore.models.files import ModelFiles
from blobstore.models.frameworks import checked_dtype, converter, dequantizer, has_lane, lane_to
from blobstore.models.index import load_index, write_index
from blobstore.models.memory import ModelMemory
from blobstore.models.quantized import QuantizedWeights
from blobstore.models.sharding import shard_names
from blobstore.models.slices import SliceReader, Stored, read_part, view_part
from blobstore.models.tensors import at_layer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from blobstore.core.progress import Progress
    from blobstore.core.slicing import Index, Selection
    from blobstore.manifests.reference import Reference
    from blobstore.models.frameworks import DeviceStream
    from blobstore.models.index import Place
    from blobstore.models.slices import Plan, TensorSlice
    from blobstore.store.local import LocalStore

Framework = Literal["numpy", "torch", "mlx"]


class Model(ModelFiles, Mapping[str, Any]):
    """The tensors of a stored model by their runtime names.

    A quantized weight ``X`` has its scales under ``X_scale`` and its affine offsets under ``X_qbias``.
    Every look-up gives a new view of the same memory.
    """

    def __init__(
        self,
        reference: Reference,
        manifest: bytes,
        store: LocalStore,
        *,
        framework: Framework = "numpy",
        device: str = "cpu",
        dequantize: bool = False,
        use_index: bool = True,
        read: str = "mmap",
        prefetch: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        super().__init__(reference, manifest, store)
        self._options: dict[str, Any] = {"framework": framework, "device": device}
        self._options |= {"dequantize": dequantize, "use_index": use_index}
        self._options |= {"read": read, "prefetch": prefetch}
        self._endings: list[weakref.finalize[Any, Model]] = []
        self._progress = progress
        self._convert = converter(framework, device)
        self._framework = framework
        self._device = device
        self._is_plain = dequantize
        self._is_read = read == "pread"
        self._has_views = framework != "mlx" and device == "cpu"
        self._is_writable = framework == "torch"
        reserve = functools.partial(MappedRegion, writable=self._is_writable)
        try:
            maps = reserve if read == "mmap" else None
            places = load_index(store, manifest, reserve=maps, use_index=use_index)
        except Damaged as error:
            raise error.at(str(reference)) from None
        self._places, self._blobs, self._quantized, is_indexed, region, _ = places
        self._found = places._replace(region=None)
        self._names: Mapping[str, Place] = self._places
        self._packed = QuantizedWeights(str(reference), self._places, self._quantized)
        if dequantize:
            hidden = self._packed.owners()
            self._names = {name: at for name, at in self._places.items() if name not in hidden}
        if not is_indexed:  # written at the end of the model or program: a server starts sooner
            self.at_end(write_index, store, manifest, self._found)
        self._residence = ModelMemory(
            str(reference),
            store,
            self._blobs,
            region=region,
            is_writable=self._is_writable,
            read=read,
            prefetch=prefetch,
            progress=progress,
        )

    def __repr__(self) -> str:
        return f"<Model {self.reference}: {len(self)} tensors>"

    def __reduce__(self) -> Any:
        # A worker process opens the very manifest again, and shares the page cache.
        again = functools.partial(Model, **self._options)
        return again, (self.reference, self._manifest, self._store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """Return a tensor by its runtime name.

        Raises:
            TensorNotFound: the model has no tensor of that name. It is a ``KeyError``.
            BlobMissing, BlobDamaged: its blob is not whole.
            UnsupportedDType: the framework has no type for it.
        """
        place = self._place(name)
        if self._is_plain and name in self._quantized:
            return self.dequantized(name)
        return self._array(name, place)

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name, element type and shape of every tensor that look-ups give; nothing is mapped.

        Raises:
            UnsupportedDType: see :meth:`dequantized`; only if that is what look-ups give.
        """
        return {
            name: self._packed.plain_spec(name)
            if self._is_plain and name in self._quantized
            else TensorSpec(name, DTYPES[dtype], tuple(shape))
            for name, (dtype, shape, _, _) in self._names.items()
        }

    def dequantized(self, name: str, dtype: str | None = None) -> Any:
        """Return a quantized weight as plain numbers of the model's framework; others as they are.

        The numbers are those that MLX computes, bit for bit, and new memory at every call.

        Args:
            name: runtime name of the weight.
            dtype: ``bfloat16``, ``float16`` or ``float32``; by default the type of affine scales,
                which is that of the original weight, and bfloat16 for the types of floats.

        Raises:
            UnsupportedDType: the blob does not say how the weight is quantized.
            UsageError: ``dtype`` is another. Otherwise as :meth:`__getitem__`.
        """
        place = self._place(name)
        if name not in self._quantized:
            return self._array(name, place)
        chosen = None if dtype is None else checked_dtype(dtype)
        names = (name, *self._packed.companions(name).values())
        arrays = {end: self._array(end, self._places[end]) for end in names}
        return self._packed.numbers(name, arrays, dequantizer(self._framework), chosen)

    def get_slice(self, name: str) -> TensorSlice:
        """Return a tensor of which parts can be taken, as ``safetensors`` does; nothing is read yet.

        ``model.get_slice(name)[a:b, c:d]`` is ``model[name][a:b, c:d]``, for whole numbers and slices
        of step 1, but reads no more than that part: of a mapped blob it is a view where the framework
        has such, and of a blob that is to be read (``read="pread"`` and a level of ``verify`` other
        than ``size``) the bytes of the part are read into memory of their own, at every call.

        Raises:
            TensorNotFound: the model has no tensor of that name.
            UnsupportedDType: as :attr:`specs`.
        """
        self._place(name)
        return self._parts.slice_of(name)

    def quantized_slice(self, name: str, index: Index) -> dict[str, Any]:
        """Return a part of a quantized weight as it is stored, with what belongs to it, by name.

        Args:
            name: runtime name of the weight.
            index: the part, in elements of the weight and not in packed words. In the last
                dimension it begins and ends at groups.

        Raises:
            TensorNotFound: the model has no quantized weight of that name.
            UsageError: a group would be cut apart. Otherwise as :meth:`dequantized`.
        """
        return self._parts.quantized(name, index)

    @property
    def quantized(self) -> Mapping[str, tuple[str, int]]:
        """Type and group size of the quantized weights by name, as their blobs say.

        An empty type and 0 where a blob does not say. The types are those of
        :data:`blobstore.quantization.formats.FORMATS`; whether a weight's shapes agree with its type is
        checked when it is dequantized.
        """
        return {name: (kind, group_size) for name, (kind, group_size) in self._quantized.items()}

    def view(self, name: str) -> TensorView:
        """Return a tensor's bytes as stored, read-only, whatever the framework.

        Raises as :meth:`__getitem__`.
        """
        dtype, shape, blob, begin = self._places.get(name) or self._place(name)
        region = self._mapped([blob])
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        start = region.offsets[blob] + begin
        return TensorView(spec, memoryview(region.memory).toreadonly()[start : start + spec.nbytes])

    def tensors(self, prefix: str = "") -> dict[str, Any]:
        """Return the tensors whose names begin with ``prefix``. Raises as :meth:`__getitem__`."""
        places = {name: place for name, place in self._names.items() if name.startswith(prefix)}
        if (lane := lane_to(self._framework, self._device)) is not None:
            return dict(self._uploaded(places, lane))
        if self._is_plain and self._quantized:
            return {name: self[name] for name in places}
        region = self._mapped([blob for _, _, blob, _ in places.values()])
        memory, offsets, convert = region.memory, region.offsets, self._convert
        with gc_paused():
            return {
                name: convert(
                    memory, offsets[blob] + begin, TensorSpec(name, DTYPES[dtype], tuple(shape))
                )
                for name, (dtype, shape, blob, begin) in places.items()
            }

    def iter_tensors(
        self,
        prefix: str = "",
        *,
        order: Literal["file", "name"] = "file",
        shard: tuple[int, int] = (0, 1),
        parts: Plan | None = None,
    ) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors, one at a time, as servers take their weights.

        Args:
            prefix: what their names begin with.
            order: ``file`` is that of the bytes in the blobs, ``name`` that of the alphabet.
            shard: rank and world: the tensors are dealt out in runs of about equal bytes, so that
                all ranks together have each once. What a rank does not ask for is not read.
            parts: what is taken of each tensor: indexes by name, or a function that gives the index
                for a name; None and names that are left out mean all of it. An index is that of
                :meth:`get_slice`; for packed weights that of :meth:`quantized_slice`, and what
                belongs to them is cut alike.

        Raises:
            TensorNotFound: ``parts`` has a name that is none of the model's.
            UsageError: an unknown order, no such rank, or an index that means no part. Otherwise as
                :meth:`__getitem__`.
        """
        names = [name for name in self._names if name.startswith(prefix)]
        mine = shard_names(names, self._places, order, shard)
        lane = lane_to(self._framework, self._device) if parts is None else None
        if lane is not None:
            yield from self._uploaded(mine, lane)
            return
        take = self.__getitem__ if parts is None else self._parts.planned(parts, self.__getitem__)
        for name in mine:
            yield name, take(name)

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors. Raises as :meth:`__getitem__`."""
        return self.tensors()

    def check(self, verify: str) -> None:
        """Check the blobs; see ``verify`` of :func:`open_model`.

        Raises:
            BlobMissing, BlobDamaged: a blob is not whole.
            UsageError: an unknown level.
        """
        check_level(verify)
        if verify == "size" and self._is_read and has_lane(self._framework, self._device):
            self._check_sizes()  # the host needs no copy of what goes on to a device
            return
        if verify == "size":
            # Mapping checks them; and what is mapped, no later change of the store takes away.
            self._mapped(range(len(self._blobs)))
            return
        try:
            check_blobs(self._store, self._manifest, self._found, verify, self._progress)
        except BlobstoreError as error:
            raise error.at(str(self.reference)) from None

    def map_hot(self) -> bool:
        """Map all blobs that are not cold; tell whether that is all. Raises BlobDamaged."""
        try:
            return self._residence.map_hot()
        except Damaged as error:
            raise self._located(error) from None

    def _check_sizes(self) -> None:
        try:
            for digest, size in self._blobs:
                self._store.check_size(digest, size)
        except Damaged as error:
            raise self._located(error) from None

    def close(self) -> None:
        """Let go of the maps. Tensors that were handed out stay valid; no new ones can be had."""
        self._residence.close()
        for end in self._endings:
            end()

    @property
    def is_resident(self) -> bool:
        """Whether all blobs are in memory, so that their files are not needed any more."""
        return all(map(self._residence.holds, range(len(self._blobs))))

    def at_end(self, work: Callable[..., object], *arguments: object) -> None:
        """Have something done when the model is closed or let go of, or the program ends."""
        self._endings.append(weakref.finalize(self, work, *arguments))

    def _array(self, name: str, place: Place) -> Any:
        dtype, shape, blob, begin = place
        region = self._mapped([blob])
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        return self._convert(region.memory, region.offsets[blob] + begin, spec)

    @property
    def _parts(self) -> SliceReader:
        # Made when it is wanted: a model in a cycle would keep its memory until it is collected.
        dequantize = functools.partial(dequantizer, self._framework)
        plain = dequantize if self._is_plain else None
        return SliceReader(str(self.reference), self._places, self._packed, self._part, plain)

    def _part(self, name: str, part: Selection) -> Any:
        """Return a part of what is stored, read from the file if it is not to be mapped."""
        dtype, shape, blob, begin = self._places[name]
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        if self._is_read and not self._residence.holds(blob):
            self._mapped(())  # a closed model gives no more
            try:
                stored = Stored(spec, self._blobs[blob], begin)
                buffer, spec = read_part(self._store, stored, part)
            except Damaged as error:
                layer = self.manifest.layers_of(media_types.TENSOR)[blob]
                raise at_layer(error, layer).at(str(self.reference)) from None
            return self._convert(buffer if self._is_writable else buffer.toreadonly(), 0, spec)
        region = self._mapped((blob,))
        offset = region.offsets[blob] + begin
        has_views = self._has_views
        return view_part(self._convert, region.memory, offset, spec, part, has_views=has_views)

    def _uploaded(self, names: Iterable[str], lane: DeviceStream) -> Iterator[tuple[str, Any]]:
        self._mapped(())  # a closed model gives no more
        return upload_tensors(
            names,
            self._places,
            self._packed,
            lane,
            self._read_into,
            dequantize=dequantizer(self._framework) if self._is_plain else None,
            progress=self._progress,
        )

    def _read_into(self, blob: int, begin: int, buffer: memoryview) -> None:
        try:
            self._residence.read_into(blob, begin, buffer)
        except Damaged as error:
            raise self._located(error) from None

    def _place(self, name: str) -> Place:
        place = self._names.get(name)
        if place is None:
            raise TensorNotFound(f"model {self.reference} has no tensor {quote(name)}")
        return place

    def _mapped(self, blobs: Iterable[int]) -> MappedRegion:
        """Return the memory of the model, in which at least ``blobs`` are."""
        try:
            return self._residence.bring(blobs)
        except Damaged as error:
            raise self._located(error) from None
