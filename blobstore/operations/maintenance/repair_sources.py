"""Where the bytes of a blob can be had again: made anew from a model's source, or in another store.

How a model was made from its source is in no manifest. So it is planned in every way that
``create`` has, and what would have the name and the size of a wanted blob is a candidate. Plans cost
next to nothing; the bytes of a candidate do, but few have name and size of a blob and are another.
Nothing here is believed: whoever takes the bytes compares their digest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import quote
from blobstore.errors import BlobstoreError, UnsupportedSource, UsageError
from blobstore.operations.create.blobs import EXPERT_FORMS
from blobstore.operations.create.convert import Converter
from blobstore.operations.create.files import config_json, file_layers, stacks_layer
from blobstore.operations.create.plan import QuantizeOptions, plan_source
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.policy import POLICIES
from blobstore.sources.open import open_source
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.core.progress import Progress
    from blobstore.manifests.descriptor import Descriptor
    from blobstore.operations.create.blobs import BlobPlan
    from blobstore.operations.create.plan import ModelPlan
    from blobstore.sources.base import SourceOptions, TensorSource

Wanted = Mapping["BlobId", "Descriptor"]


class Candidate(NamedTuple):
    """Bytes that may be a blob's."""

    blob: Descriptor
    buffers: Callable[[], Iterable[Buffer]]
    """Gives them; raises :class:`BlobstoreError` where they cannot be read."""


class BlobProvider(Protocol):
    """What blobs can be had from again."""

    def rounds(
        self, wanted: Wanted, lists: Collection[Digest] = ()
    ) -> Iterator[Sequence[Candidate]]:
        """Yield candidates for what is wanted; who takes a round takes off ``wanted`` what it had.

        Args:
            wanted: the blobs.
            lists: the digests of the lists of layers of the models whose configs are wanted.

        Raises:
            BlobstoreError: there can be no candidates at all.
        """

    def close(self) -> None:
        """Close its files."""


class StoreOrigin:
    """Another store, which may have the same blobs."""

    def __init__(self, store: LocalStore) -> None:
        self.store = store

    def rounds(
        self, wanted: Wanted, lists: Collection[Digest] = ()
    ) -> Iterator[Sequence[Candidate]]:
        """Yield what the store has of all; see :class:`BlobProvider`."""
        del lists
        yield [self._candidate(blob) for blob in wanted.values() if self._has(blob)]

    def close(self) -> None:
        """Do nothing."""

    def _has(self, blob: Descriptor) -> bool:
        try:
            return self.store.exists(blob.digest, blob.size)
        except BlobstoreError:  # not whole there either
            return False

    def _candidate(self, blob: Descriptor) -> Candidate:
        return Candidate(blob, lambda: self.store.read_pieces(blob.digest, blob.size))


class OwnOrigin:
    """The other forms of the store's own blobs, for those that are damaged in one form only."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def rounds(
        self, wanted: Wanted, lists: Collection[Digest] = ()
    ) -> Iterator[Sequence[Candidate]]:
        """Yield what there is of all; see :class:`BlobProvider`."""
        del lists
        store = self._store
        for has, pieces in (
            (store.has_cold, self._decoded),
            (store.has_base_link, store.read_base_link),
        ):
            there = [blob for blob in wanted.values() if has(blob.digest)]
            yield [Candidate(blob, partial(pieces, blob.digest, blob.size)) for blob in there]

    def has_any(self, wanted: Wanted) -> bool:
        """Tell whether there is another form of any."""
        return any(
            self._store.has_cold(blob.digest) or self._store.has_base_link(blob.digest)
            for blob in wanted.values()
        )

    def close(self) -> None:
        """Do nothing."""

    def _decoded(self, digest: Digest, size: int) -> Iterator[Buffer]:
        return self._store.open_cold(digest, size).pieces()


class SourceOrigin:
    """The source that a model was created from, or one with the same tensors."""

    def __init__(self, source: TensorSource, overrides: Sequence[str] = ()) -> None:
        """Take an open source; ``overrides`` are those that the model was quantized with."""
        self._source = source
        self._overrides = tuple(overrides)
        self._converter = Converter(source.read)

    def rounds(
        self, wanted: Wanted, lists: Collection[Digest] = ()
    ) -> Iterator[Sequence[Candidate]]:
        """Yield what each way of creating a model makes that is new; see :class:`BlobProvider`.

        Raises:
            UnsupportedSource: a model can be made of the source in no way.
            UsageError: an override fits no tensor, or cannot be.
        """
        tried: set[tuple[str, Digest]] = set()
        files = [layer.data for layer in file_layers(self._source)]
        for planned in self._plans():
            made = [layer.data for layer in stacks_layer(planned.blobs)]
            made += [
                config_json(self._source, planned.quant_type, layers) for layers in (*lists, None)
            ]
            yield [*_small((*files, *made), wanted), *self._large(planned, wanted, tried)]
            files = []
            if not wanted:
                return

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def _plans(self) -> Iterator[ModelPlan]:
        """Yield the plans there are, the likeliest first."""
        yield from self._planned([QuantizeOptions()], must_be=True)
        # Without overrides, what is quantized already or too odd is simply not to be quantized.
        yield from self._planned(_quantizing(self._overrides), must_be=bool(self._overrides))

    def _planned(
        self, requests: Iterable[QuantizeOptions], *, must_be: bool
    ) -> Iterator[ModelPlan]:
        failure: BlobstoreError | None = None
        for request, experts in product(requests, EXPERT_FORMS):
            try:
                planned = plan_source(self._source, experts=experts, quantize=request)
            except (UnsupportedSource, UsageError) as error:
                failure = failure or error
            else:
                must_be = False
                yield planned
        if must_be and failure is not None:
            raise failure

    def _large(
        self,
        planned: ModelPlan,
        wanted: Wanted,
        tried: set[tuple[str, Digest]],
    ) -> Iterator[Candidate]:
        by_name: dict[str, list[Descriptor]] = defaultdict(list)
        for blob in wanted.values():
            by_name[blob.name].append(blob)
        for made in planned.blobs:
            for blob in by_name.get(made.name, ()):
                # The header tells types and group sizes, so it tells how the bytes are made.
                attempt = (str(blob.digest), Digest.of(made.header))
                if blob.size == made.size and attempt not in tried:
                    tried.add(attempt)
                    yield Candidate(blob, self._making(made))

    def _making(self, made: BlobPlan) -> Callable[[], Iterator[Buffer]]:
        return lambda: made.buffers(self._converter.convert)


def open_origin(
    source: str | os.PathLike[str],
    store: LocalStore,
    overrides: Sequence[str],
    options: SourceOptions,
    progress: Progress | None,
) -> tuple[BlobProvider, Sequence[str]]:
    """Return what blobs are to be had from, and what a person should know of it.

    Raises:
        SourceError, DamagedSource, SourceNotFound: the source cannot be read at all.
        UsageError: it is the store itself.
    """
    path = Path(source)
    if all((path / part).is_dir() for part in ("blobs", "manifests")):
        if store.root.exists() and path.samefile(store.root):
            raise UsageError(
                f"{quote(source)} is the store itself, which cannot be repaired from itself"
            )
        return StoreOrigin(LocalStore(path)), ()
    opened = open_source(source, options, progress=progress)
    return SourceOrigin(opened, overrides), opened.notices


def _small(contents: Iterable[bytes], wanted: Wanted) -> Iterator[Candidate]:
    for data in contents:
        blob = wanted.get(BlobId(Digest.of(data), len(data)))
        if blob is not None:
            yield Candidate(blob, lambda data=data: [data])  # type: ignore[misc]


def _quantizing(overrides: Sequence[str]) -> tuple[QuantizeOptions, ...]:
    """Return all ways to quantize."""
    return tuple(
        QuantizeOptions(quant_type=item.name, group_size=size, policy=policy, overrides=overrides)
        for policy in POLICIES
        for item in FORMATS.values()
        if item.is_target
        for size in sorted(item.group_sizes, key=lambda size: size != item.group_size)
    )
