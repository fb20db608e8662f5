"""An open model: its tensors by name, mapped and not copied.

Each blob is mapped once, by default when the model is opened, and no file descriptor is kept. A
model that was mapped stays intact whatever happens to its name in the store. No byte is read before
it is used. Arrays that were handed out keep the memory alive, even after :meth:`Model.close`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from blobstore.core import pictures
from blobstore.core.escape import MAX_SHOWN, did_you_mean, escape, quote
from blobstore.core.gc_pause import gc_paused
from blobstore.core.globs import MAX_GLOB, glob_matches
from blobstore.core.public_calls import no_attribute
from blobstore.core.slicing import select
from blobstore.core.tensor import DTYPES, TensorSpec, TensorView
from blobstore.errors import BlobstoreError, Damaged, StoreError, TensorNotFound, TooManyMaps
from blobstore.models.checks import check_blobs, check_level
from blobstore.models.device import upload_tensors
from blobstore.models.frameworks import ArrayTarget, Framework, checked_dtype
from blobstore.models.header_index import load_cached_index, read_index, write_index
from blobstore.models.memory import ModelMemory, reserve
from blobstore.models.prefetch import Following, groups
from blobstore.models.quantized import QuantizedWeights
from blobstore.models.rank_share import rank_share
from blobstore.models.read_strategy import ReadChooser
from blobstore.models.slices import Array, SliceReader
from blobstore.models.small_files import ModelFiles
from blobstore.safetensors.prefetch_loader import IN_FLIGHT, THREADS, PrefetchLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Sequence
    from typing import Self

    from blobstore.core.digest import Digest
    from blobstore.core.mmap import MappedRegion
    from blobstore.core.progress import Progress
    from blobstore.core.slicing import Index
    from blobstore.manifests.reference import Reference
    from blobstore.models.frameworks import DeviceStream
    from blobstore.models.header_index import Entry
    from blobstore.models.read_strategy import ReadStrategy
    from blobstore.models.slices import Plan, TensorSlice
    from blobstore.signatures.policy import Verdict
    from blobstore.store.protocols import BlobAccess

_INTERNAL = frozenset(
    [
        "at_end",
        "data",
        "file_path",
        "hashed",
        "is_resident",
        "map_hot",
        "of",
        "read_ahead",
        "read_json",
        "verdict",
    ]
)
"""Names that other packages use and docs/reference/python.md does not describe, so :func:`dir` omits them."""


class Model(ModelFiles, Mapping[str, Array]):
    """The tensors of a stored model by their runtime names.

    A quantized weight ``X`` has its scales under ``X_scale``, or for fp8 under the name that they had
    in the source, and its affine offsets under ``X_qbias``. Every look-up returns a new view of the same memory.
    """

    def __init__(
        self,
        reference: Reference | str,
        manifest: bytes,
        store: BlobAccess,
        *,
        framework: Framework = "numpy",
        device: str = "cpu",
        dequantize: bool | str | Collection[str] = False,
        use_index: bool = True,
        read: str = "mmap",
        progress: Progress | None = None,
    ) -> None:
        super().__init__(reference, manifest, store)
        self._options: dict[str, Any] = {
            "framework": framework,
            "device": device,
            "dequantize": dequantize,
            "use_index": use_index,
            "read": read,
        }
        self._target = target = ArrayTarget.of(framework, device)
        self._progress = progress
        self.hashed = 0
        """How many blobs :meth:`check` has hashed, or lets the threads hash that read them."""
        self.verdict: Verdict | None = None
        """What the policy of the store says, if it has one."""
        self._endings: list[weakref.finalize[Any, Any]] = []
        index = load_cached_index(store, manifest) if use_index else None
        region = None
        self._chooser = chooser = ReadChooser(store, read)

        def region_of(sizes: Sequence[int]) -> MappedRegion | None:
            if chooser.first(sizes).how == "pread":
                return None
            return reserve(sizes, writable=target.is_writable)

        if index is None:
            try:
                index, region = read_index(store, manifest, region_of)
            except TooManyMaps:
                pass
            except (Damaged, StoreError) as error:
                raise error.at(str(reference)) from None
        if index is None:  # here, because the error keeps all maps alive
            index, region = read_index(store, manifest)
        self._index = index
        self.reading = chooser.first(size for _, size in index.blobs)
        """How blobs are read, and why."""
        self._memory = ModelMemory(
            ModelFiles(reference, manifest, store),
            index.blobs,
            region=region,
            is_writable=target.is_writable,
            read=self.reading.how,
            is_shared=chooser.is_auto,
            progress=progress,
        )
        self._following = Following([size for _, size in index.blobs])
        self._weights = weights = QuantizedWeights(
            str(reference), index, target.framework, dequantize
        )
        self._slices = SliceReader(index, self._memory, weights, target)
        self._entries: Mapping[str, Entry] = index.entries
        if weights.dequantized:
            hidden = weights.owners(weights.dequantized)
            self._entries = {
                name: entry for name, entry in index.entries.items() if name not in hidden
            }
        if not index.is_cached:  # written when the model is closed, so that a server starts sooner
            self.at_end(write_index, store, manifest, index)

    def __dir__(self) -> Iterable[str]:
        return [name for name in super().__dir__() if name not in _INTERNAL]

    if not TYPE_CHECKING:  # or no attribute would be wrong

        def __getattr__(self, name: str) -> Any:
            raise no_attribute(self, name)

    def __repr__(self) -> str:
        closed = ", closed" if self.is_closed else ""
        return f"<Model {self.reference}: {len(self)} tensor{'s' * (len(self) != 1)}{closed}>"

    def _repr_html_(self) -> str:
        """Return a table and a picture of the tensors, which notebooks show."""
        from html import escape as escape_html

        rows = {"model": str(self.reference)}
        with contextlib.suppress(BlobstoreError):  # the config is damaged, or its blob is missing
            rows["architecture"] = self.architecture
        rows["tensors"] = f"{len(self):,}"
        with contextlib.suppress(BlobstoreError):  # a quantized blob does not say how
            rows |= {"parameters": f"{self.parameters:,}", "size": f"{self.nbytes / 1e6:,.1f} MB"}
        rows["framework"] = f"{self.framework} on {self.device}"
        rows["store"] = str(self.store.root)
        rows["state"] = "closed" if self.is_closed else "open"
        cells = "".join(
            f"<tr><th>{name}</th><td>{escape_html(escape(text, MAX_SHOWN))}</td></tr>"
            for name, text in rows.items()
            if text
        )
        return f"<table>{cells}</table>{pictures.draw('model', self._index)}"

    def __reduce__(self) -> Any:
        # A worker process opens the same manifest again, and shares the page cache.
        reopen = functools.partial(Model, **self._options)
        return reopen, (self.reference, self._manifest, self.store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # A mapping would be compared by its items, for which all tensors would be read.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def keys(self) -> KeysView[str]:
        """Return the names of the tensors that look-ups return."""
        return self._entries.keys()

    def __getitem__(self, name: str) -> Array:
        """Return a tensor by its runtime name.

        Raises:
            TensorNotFound: the model has no tensor of that name. It is a ``KeyError``.
            BlobMissing, BlobDamaged: its blob is missing or damaged.
            UnsupportedDType: the framework has no such type.
        """
        self._check_name(name)
        if name in self._weights.dequantized:
            return self.dequantized(name)
        return self._array(name)

    get_tensor = __getitem__
    """As in ``safetensors``."""

    @property
    def framework(self) -> str:
        """The framework of the tensors: ``numpy``, ``torch`` or ``mlx``."""
        return self._target.framework

    @property
    def device(self) -> str:
        """The device of the tensors."""
        return self._target.device

    @property
    def is_closed(self) -> bool:
        """Whether no more tensors can be read."""
        return self._memory.is_closed

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors that look-ups return. Raises as :attr:`specs`."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def parameters(self) -> int:
        """The number of elements of all tensors, before quantization and without scales.

        Raises:
            UnsupportedDType: a blob does not say how its weight is quantized.
        """
        qparams = self._weights.owners()
        return sum(
            self._weights.dequantized_spec(name).elements
            if name in self._weights
            else self._index.spec(name).elements
            for name in self._entries
            if name not in qparams
        )

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name, element type and shape of every tensor that look-ups return. Nothing is mapped.

        Raises:
            UnsupportedDType: if look-ups dequantize, as :meth:`dequantized`.
        """
        return {
            name: self._weights.dequantized_spec(name)
            if name in self._weights.dequantized
            else self._index.spec(name)
            for name in self._entries
        }

    @property
    def quantized(self) -> Mapping[str, tuple[str, int]]:
        """Type and group size of the quantized weights by name, as their blobs state them.

        The group size of fp8 is the width of a block, or 0 if a row or the whole weight shares a scale.
        An empty type and 0 if a blob does not say. The types are the keys of
        :data:`blobstore.quantization.formats.FORMATS`. Whether a weight's shape agrees with its
        type is checked when the weight is dequantized.
        """
        return {
            name: (kind, group_size or 0)
            for name, (kind, group_size, *_) in self._index.quantized.items()
        }

    def view(self, name: str) -> TensorView:
        """Return the ``spec`` of the tensor ``name`` and its bytes as stored, read-only, for any framework.

        The bytes are little-endian and in C order; quantized weights are packed.
        Raises as :meth:`__getitem__`.
        """
        # Scales and biases of dequantized weights have bytes too.
        if name not in self._index.entries:
            self._check_name(name)
        spec, slot, begin = self._index.location(name)
        region = self._load(slot)
        start = region.offsets[slot] + begin
        return TensorView(spec, memoryview(region.memory).toreadonly()[start : start + spec.nbytes])

    def dequantized(self, name: str, dtype: str | None = None) -> Array:
        """Return a quantized weight dequantized, and any other tensor unchanged.

        The values equal those that MLX computes, bit for bit. Each call computes them again.

        Args:
            name: runtime name of the weight.
            dtype: ``bfloat16``, ``float16`` or ``float32``. The default is the type of affine
                scales, which is that of the original weight, and bfloat16 for float types.

        Raises:
            UnsupportedDType: the blob does not say how the weight is quantized.
            UsageError: ``dtype`` is not one of these. Otherwise as :meth:`__getitem__`.
        """
        self._check_name(name)
        if name not in self._weights:
            return self._array(name)
        chosen = None if dtype is None else checked_dtype(dtype)
        stored = (name, *self._weights.qparams(name).values())
        arrays = {part: self._array(part) for part in stored}
        found: Array = self._weights.dequantize(name, arrays, chosen)
        return found

    def get_slice(self, name: str) -> TensorSlice[Array]:
        """Return a tensor that can be read in parts, as in ``safetensors``. Nothing is read yet.

        ``model.get_slice(name)[a:b, c:d]`` equals ``model[name][a:b, c:d]``, for integers and
        slices of step 1, but reads only that part. If the blob is mapped, the part is a view where
        the framework has views. With ``read="pread"`` and a blob that is not loaded, every call
        reads the part's bytes into new memory.

        Raises:
            TensorNotFound: the model has no tensor of that name.
            UnsupportedDType: as :attr:`specs`.
        """
        self._check_name(name)
        return self._slices.slice(name)

    def quantized_slice(self, name: str, index: Index) -> dict[str, Array]:
        """Return a part of a quantized weight and of its scales and biases, as stored, by name.

        Args:
            name: runtime name of the weight.
            index: the part, in elements of the dequantized weight. In the last dimension it begins
                and ends at group boundaries.

        Raises:
            TensorNotFound: the model has no quantized weight of that name.
            UsageError: the part would split a group. Otherwise as :meth:`dequantized`.
        """
        return self._slices.read_quantized(name, index)

    def tensors(self, prefix: str = "") -> dict[str, Array]:
        """Return the tensors whose names begin with ``prefix``. Raises as :meth:`__getitem__`."""
        entries = {name: entry for name, entry in self._entries.items() if name.startswith(prefix)}
        if (stream := self._target.stream()) is not None:
            return dict(self._upload(entries, stream))
        slots = [slot for _, _, slot, _ in entries.values()]
        self.read_ahead(slots)
        if self._weights.dequantized:
            return {name: self[name] for name in entries}
        region = self._memory.load(slots)
        memory, offsets, convert = region.memory, region.offsets, self._target.convert
        with gc_paused():  # inlined, since a model has thousands of tensors
            return {
                name: convert(
                    memory, offsets[slot] + begin, TensorSpec(name, DTYPES[dtype], tuple(shape))
                )
                for name, (dtype, shape, slot, begin) in entries.items()
            }

    def read_ahead(self, slots: Collection[int] | None = None) -> ReadStrategy:
        """Begin to bring blobs into memory of which all tensors are wanted, by default all blobs; return how.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or damaged.
        """
        blobs = self._index.blobs
        slots = set(range(len(blobs)) if slots is None else slots)
        strategy = self._chooser.for_all([blobs[slot] for slot in sorted(slots)])
        if strategy.how == "populate" and self._chooser.is_auto:
            self._memory.load(slots)
            self._memory.populate_ahead(slots)
        return strategy

    def iter_tensors(
        self,
        prefix: str = "",
        *,
        order: Literal["file", "name"] = "file",
        shard: tuple[int, int] = (0, 1),
        parts: Plan | None = None,
    ) -> Iterator[tuple[str, Array]]:
        """Yield names and tensors one at a time, as inference servers load weights.

        On a GPU, a tensor can be used at once on the current stream, which must be the same one for all
        tensors of an iteration.

        Args:
            prefix: the beginning of the names to yield.
            order: ``file`` for the order of the bytes in the blobs, ``name`` to sort by name.
            shard: rank and number of ranks. The tensors are split into runs of about equal bytes,
                so that each tensor belongs to one rank. A rank reads nothing else.
            parts: which part to take of each tensor: indexes by name, or a function from a name to
                an index. None and names that are left out mean all of the tensor. An index is that
                of :meth:`get_slice`. For packed weights it is that of :meth:`quantized_slice`, and
                their scales and biases are sliced along.

        Raises:
            TensorNotFound: ``parts`` names a tensor that the model does not have.
            UsageError: an unknown order, a rank out of range, or an index that selects no part.
                Otherwise as :meth:`__getitem__`.
        """
        names = [name for name in self._entries if name.startswith(prefix)]
        mine = rank_share(self._index, names, order, shard)
        if parts is None and (stream := self._target.stream()) is not None:
            yield from self._upload(mine, stream)
            return
        if parts is None:
            self.read_ahead([self._index.slot(name) for name in mine])
        if parts is None and not self.is_resident:
            parts = {}  # reads many remote blobs at once, and none that is not asked for
        if parts is None:
            for name in mine:
                yield name, self[name]
        else:
            yield from self._slices.planned(mine, parts, self.__getitem__)

    def read_parts(self, parts: Iterable[tuple[str, Index]]) -> Iterator[Array]:
        """Yield parts of tensors, by names and indexes of :meth:`get_slice`.

        Parts of blobs that are remote are read with many concurrent requests.

        Raises as :meth:`get_slice` and :meth:`__getitem__`.
        """
        items = list(parts)
        for name, _ in items:
            self._check_name(name)
        for _, array in self._slices.parts(items, self.__getitem__):
            yield array

    def prefetch(
        self,
        plan: Mapping[str, Index | None] | None = None,
        *,
        threads: int = THREADS,
        bytes_in_flight: int = IN_FLIGHT,
    ) -> PrefetchLoader:
        """Start to load tensors in the background.

        Args:
            plan: for each name the index of a part, as for :meth:`get_slice`, or None for all of the
                tensor. Without a plan, all tensors are loaded.
            threads: how many threads load.
            bytes_in_flight: bytes that are loaded, or being loaded, and were not taken yet.

        Returns:
            The loader. Iterate over it, or take tensors from it by name.

        Raises:
            TensorNotFound: the model has no tensor of the plan.
            UsageError: an index does not select a part.
            SafetensorError: ``threads`` or ``bytes_in_flight`` is below 1.
        """
        items = list((dict.fromkeys(self) if plan is None else plan).items())
        for name, _ in items:
            self._check_name(name)
        stream = self._target.caller_stream()
        found = groups(self._index, self._memory, self._slices, items, self.__getitem__, stream)
        return PrefetchLoader(found, threads=threads, bytes_in_flight=bytes_in_flight)

    def state_dict(self) -> dict[str, Array]:
        """Return all tensors. Raises as :meth:`__getitem__`."""
        return self.tensors()

    def check(self, verify: str) -> None:
        """Check the blobs; see ``verify`` of :func:`blobstore.open`.

        Raises:
            BlobMissing, BlobDamaged: a blob is missing or damaged.
            UsageError: an unknown level.
        """
        check_level(verify)
        if verify == "size":
            if self.reading.how == "pread" and (self._chooser.is_auto or self._target.has_stream):
                # What is not asked for is not read; the host needs no copy of what goes to a device.
                self._memory.check_sizes()
            else:
                # Loading checks the sizes, and later changes of the store have no effect.
                self._memory.load(range(len(self._index.blobs)))
            return
        deferred: Collection[Digest] = ()
        has_digests = not isinstance(self.reference, str)  # a file has none
        if verify in ("digest", "rehash") and has_digests and not self._target.has_stream:
            # Hashed by the threads that read it; what is in memory is hashed faster without a map.
            is_populated = self._chooser.for_all(self._index.blobs).how == "populate"
            again = verify == "rehash"
            deferred = self._memory.verify_loads(again=again, is_populated=is_populated)
        try:
            hashed = check_blobs(
                self.store, self._manifest, self._index, verify, self._progress, deferred
            )
        except BlobstoreError as error:
            raise error.at(str(self.reference)) from None
        self.hashed = hashed + self._memory.unverified
        if deferred and not (self._chooser.is_auto and self.reading.how == "pread"):
            self._memory.load(range(len(self._index.blobs)))

    def map_hot(self) -> bool:
        """Map all blobs that are not cold. Returns whether these are all blobs.

        Raises:
            BlobDamaged: a blob is damaged.
        """
        return self._memory.map_hot()

    @property
    def is_resident(self) -> bool:
        """Whether all blobs are in memory, so that their files are no longer needed."""
        return self._memory.is_complete

    def at_end(self, work: Callable[..., object], *arguments: object) -> None:
        """Call ``work`` when the model is closed or its memory is released, or at exit."""
        self._endings.append(weakref.finalize(self._memory, work, *arguments))

    def close(self) -> None:
        """Release the memory. Tensors that were handed out stay valid; no more can be read."""
        self._memory.close()
        for end in self._endings:
            end()

    def _check_name(self, name: str) -> None:
        if name not in self._entries:
            raise TensorNotFound(
                f"model {self.reference} has no tensor {quote(name)}",
                # Only computed for a person: Mapping.get raises this error too.
                advice=functools.partial(_name_advice, str(name), self._entries),
            )

    def _array(self, name: str) -> Array:
        spec, slot, begin = self._index.location(name)
        if not self.is_resident and self._memory.reads_alone(slot, spec.nbytes):
            part: Array = self._slices.read(name, select(spec, ...))
            return part
        region = self._load(slot)
        found: Array = self._target.convert(region.memory, region.offsets[slot] + begin, spec)
        return found

    def _load(self, slot: int) -> MappedRegion:
        """Load a blob, and read ahead of a program that asks for tensors in order."""
        region = self._memory.load((slot,), is_in_order=True)
        if following := self._following.after(slot):
            self.read_ahead(following)
        return region

    def _upload(self, names: Iterable[str], stream: DeviceStream) -> Iterator[tuple[str, Array]]:
        self._memory.load()  # raises an error if the model is closed
        return upload_tensors(
            names,
            self._index,
            self._weights,
            stream,
            self._memory.read_into,
            progress=self._progress,
        )


def _name_advice(text: str, names: Collection[str]) -> str:
    """Return advice about a text that is not the name of a tensor: a pattern, or a mistyped name."""
    if len(text) <= MAX_GLOB and any(glob_matches(name, text) for name in names):
        return f"it is a pattern; fnmatch.filter(model, {quote(text)}) returns the names that match"
    return did_you_mean(text, names)
