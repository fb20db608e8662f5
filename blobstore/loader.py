"""Workflow: a stored model opened inside a program, its tensors mapped and not copied.

Every blob is mapped once, by default when the model is opened, and no descriptor is kept: a model
that is open stays whole whatever becomes of the store's names. No byte is read before it is used.
Tensors that were handed out keep the model's memory mapped, also beyond :meth:`Model.close`.
"""

from __future__ import annotations

import functools
import json
import struct
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from blobstore.dealing import dealt
from blobstore.errors import (
    BlobDamaged,
    BlobstoreError,
    Damaged,
    TensorNotFound,
    UsageError,
)
from blobstore.frameworks import checked_dtype, converter, dequantizer
from blobstore.manifests import media_types
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import Reference
from blobstore.mapping import Region
from blobstore.memory import collector_paused
from blobstore.packed_weights import PackedWeights
from blobstore.places import find_places, write_index
from blobstore.quantize.recipes import BIAS, GLOBAL_SCALE, SCALE
from blobstore.residence import Residence
from blobstore.store.check import damaged_blobs
from blobstore.store.local import LocalStore
from blobstore.tensor import DTYPES, TensorSpec, TensorView
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Self

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.places import Place
    from blobstore.progress import Progress
    from blobstore.residence import Prefetch, Read

Framework = Literal["numpy", "torch", "mlx"]
Verify = Literal["none", "size", "digest"]


def open_model(
    reference: str | Reference,
    *,
    store: LocalStore | None = None,
    framework: Framework = "numpy",
    device: str = "cpu",
    verify: Verify = "size",
    dequantize: bool = False,
    read: Read = "mmap",
    prefetch: Prefetch | None = None,
    progress: Progress | None = None,
) -> Model:
    """Open a model for loading.

    Args:
        reference: the name, ``[host/][namespace/]model[:tag]``.
        store: by default the store of ``$BLOBSTORE_HOME`` or ``~/.blobstore``.
        framework: what tensors become: ``numpy`` arrays (read-only views), ``torch`` tensors
            (views of private memory: writing to them never reaches the store) or ``mlx`` arrays
            (copies; MLX cannot adopt memory).
        device: where torch tensors are put; anything but ``cpu`` is a copy.
        verify: ``size`` maps every blob and so checks that it is there with its size, ``digest``
            reads and hashes them all and takes nothing from the header index, ``none`` leaves
            mapping to the first use of each blob.
        dequantize: give quantized weights as plain numbers, under their names alone; see
            :meth:`Model.dequantized`. They are computed at every look-up.
        read: ``mmap`` maps the blobs; ``pread`` reads them, with several requests at a time, into
            memory of this process, for network file systems and stores that may be damaged later.
        prefetch: of mapped blobs: ``read`` brings all into memory before it returns, ``willneed``
            asks for that and does not wait; by default they are read when they are touched.
        progress: told of the bytes that are waited for.

    Raises:
        ModelNotFound: the store has no such name.
        BlobMissing, BlobDamaged, InvalidManifest: the model is not whole.
        UsageError: an unknown framework or level, or a device that the framework has not.
    """
    if isinstance(reference, str):
        reference = Reference.parse(reference)
    store = store or LocalStore()
    data = store.read_manifest(reference)
    model = Model(
        reference,
        data,
        store,
        framework=framework,
        device=device,
        dequantize=dequantize,
        use_index=verify != "digest",
        read=read,
        prefetch=prefetch,
        progress=progress,
    )
    model.check(verify)
    return model


class Model(Mapping[str, Any]):
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
        self.reference = reference
        self._options: dict[str, Any] = {"framework": framework, "device": device}
        self._options |= {"dequantize": dequantize, "use_index": use_index}
        self._options |= {"read": read, "prefetch": prefetch}
        self._leave_index: weakref.finalize[Any, Model] | None = None
        self._manifest = manifest
        self._store = store
        self._convert = converter(framework, device)
        self._framework = framework
        self._is_plain = dequantize
        self._is_writable = framework == "torch"
        reserve = functools.partial(Region, writable=self._is_writable)
        try:
            maps = reserve if read == "mmap" else None
            places = find_places(store, manifest, reserve=maps, use_index=use_index)
        except Damaged as error:
            raise error.at(str(reference)) from None
        self._places, self._blobs, self._quantized, is_indexed, region = places
        self._names: Mapping[str, Place] = self._places
        self._packed = PackedWeights(str(reference), self._places, self._quantized)
        if dequantize:
            hidden = self._packed.all_companions()
            self._names = {name: at for name, at in self._places.items() if name not in hidden}
        if not is_indexed:  # written at the end of the model or program: a server starts sooner
            found = places._replace(region=None)
            self._leave_index = weakref.finalize(self, write_index, store, manifest, found)
        self._residence = Residence(
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
        item, group_size = self._packed.format(name)
        chosen = self._packed.original_dtype(name) if dtype is None else checked_dtype(dtype)
        names = self._packed.companions(name)
        scale, bias = (
            self._array(names[suffix], self._places[names[suffix]]) if suffix in names else None
            for suffix in (SCALE, BIAS)
        )
        global_scale = None
        if GLOBAL_SCALE in names:
            (global_scale,) = struct.unpack("<f", self.view(names[GLOBAL_SCALE]).data)
        weight = self._array(name, place)
        dequantize = dequantizer(self._framework)
        return dequantize(weight, scale, bias, item, group_size, chosen, global_scale)

    @functools.cached_property
    def manifest(self) -> Manifest:
        """The model's manifest."""
        return Manifest.from_bytes(self._manifest)

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
        if self._is_plain and self._quantized:
            return {name: self[name] for name in places}
        region = self._mapped([blob for _, _, blob, _ in places.values()])
        memory, offsets, convert = region.memory, region.offsets, self._convert
        with collector_paused():
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
    ) -> Iterator[tuple[str, Any]]:
        """Yield names and tensors, one at a time, as servers take their weights.

        Args:
            prefix: what their names begin with.
            order: ``file`` is that of the bytes in the blobs, ``name`` that of the alphabet.
            shard: rank and world: the tensors are dealt out in runs of about equal bytes, so that
                all ranks together have each once. What a rank does not ask for is not read.

        Raises:
            UsageError: an unknown order, or no such rank. Otherwise as :meth:`__getitem__`.
        """
        names = [name for name in self._names if name.startswith(prefix)]
        for name in dealt(names, self._places, order, shard):
            yield name, self[name]

    def state_dict(self) -> dict[str, Any]:
        """Return all tensors. Raises as :meth:`__getitem__`."""
        return self.tensors()

    @property
    def config(self) -> dict[str, Any]:
        """The decoded ``config.json``, empty if the model has none.

        Raises:
            BlobMissing, BlobDamaged: it is not whole, or not a JSON object.
        """
        if "config.json" not in self.files:
            return {}
        try:
            value = json.loads(self.read_file("config.json"))
        except (ValueError, RecursionError) as error:  # it is kept as the source had it
            message = f"config.json of {self.reference} is not JSON: {error}"
            raise BlobDamaged(message) from None
        if not isinstance(value, dict):
            message = f"config.json of {self.reference} is not a JSON object"
            raise BlobDamaged(message)
        return value

    @property
    def files(self) -> Mapping[str, Descriptor]:
        """The small files of the model by name."""
        kinds = (media_types.JSON, media_types.FILE)
        return {
            layer.name: layer
            for layer in self.manifest.layers
            if layer.media_type in kinds and layer.name
        }

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file, its digest checked.

        Raises:
            TensorNotFound: the model has no such file.
            BlobMissing, BlobDamaged: it is not whole.
        """
        layer = self.files.get(name)
        if layer is None:
            message = f"model {self.reference} has no file {quoted(name)}"
            raise TensorNotFound(message)
        return self._store.read_blob(layer.digest, layer.size)

    def check(self, verify: str) -> None:
        """Check the blobs; see ``verify`` of :func:`open_model`.

        Raises:
            BlobMissing, BlobDamaged: a blob is not whole.
            UsageError: an unknown level.
        """
        if verify == "size":
            # Mapping checks them; and what is mapped, no later change of the store takes away.
            self._mapped(range(len(self._blobs)))
        elif verify == "digest":
            for blob, error in damaged_blobs(self._store, self.manifest.blobs):
                where = f"{self.reference}, layer {quoted(blob.name)}"
                raise error.at(where)
        elif verify != "none":
            message = f"verify must be none, size or digest, got {quoted(verify)}"
            raise UsageError(message)

    def close(self) -> None:
        """Let go of the maps. Tensors that were handed out stay valid; no new ones can be had."""
        self._residence.close()
        if self._leave_index is not None:
            self._leave_index()

    def _array(self, name: str, place: Place) -> Any:
        dtype, shape, blob, begin = place
        region = self._mapped([blob])
        spec = TensorSpec(name, DTYPES[dtype], tuple(shape))
        return self._convert(region.memory, region.offsets[blob] + begin, spec)

    def _place(self, name: str) -> Place:
        place = self._names.get(name)
        if place is None:
            message = f"model {self.reference} has no tensor {quoted(name)}"
            raise TensorNotFound(message)
        return place

    def _mapped(self, blobs: Iterable[int]) -> Region:
        """Return the memory of the model, in which at least ``blobs`` are."""
        try:
            return self._residence.bring(blobs)
        except Damaged as error:
            raise self._located(error) from None

    def _located(self, error: Damaged) -> BlobstoreError:
        """Return the error with the model and the damaged blob's layer in front of its message."""
        for layer in self.manifest.layers_of(media_types.TENSOR):
            try:
                self._store.check_size(layer.digest, layer.size)
            except Damaged as found:
                return found.at(f"{self.reference}: layer {quoted(layer.name)}")
        return error.at(str(self.reference))
