"""The places from which ``repair`` gets blobs: the model's source, another store, a remote, or other files of the blob.

The source layer of a manifest says with which options its model was created. If a model has none, the
source is planned in every way that ``create`` supports. A planned blob with the name and size of a wanted
blob is a candidate. Candidates are not trusted: the caller compares the digest of their bytes.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blobstore.core.arguments import local_path
from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import quote
from blobstore.core.schemes import scheme_of
from blobstore.errors import BlobstoreError, Damaged, NotFound, UnsupportedSource, UsageError
from blobstore.operations.create.files import config_json, file_layers, stacks_layer
from blobstore.planning.grouping import EXPERT_FORMS
from blobstore.planning.import_options import ImportOptions, source_record
from blobstore.planning.plan import QuantizeOptions, plan_source
from blobstore.quantization.choose_format import POLICIES
from blobstore.quantization.formats import FORMATS
from blobstore.quantization.tensor_bytes import Converter
from blobstore.remotes.addresses import find_model, is_address, is_in_objects
from blobstore.remotes.catalog import find_store, has_many_models, read_remote_catalog
from blobstore.remotes.fetch_attached import attached
from blobstore.remotes.model_reader import RemoteReader
from blobstore.sources.base import DEFAULT_OPTIONS
from blobstore.sources.hub import is_hub_url
from blobstore.store.local import LocalStore

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from typing_extensions import Buffer

    from blobstore.manifests.descriptor import Descriptor
    from blobstore.manifests.reference import Reference
    from blobstore.objects.source import ObjectSource
    from blobstore.planning.plan import ModelPlan
    from blobstore.registry.store import RemoteSource
    from blobstore.sources.base import SourceOptions, TensorSource

Wanted = Mapping["BlobId", "Descriptor"]


class Candidate(NamedTuple):
    """Bytes that may be those of a blob."""

    blob: Descriptor
    buffers: Callable[[], Iterable[Buffer]]
    """Returns the bytes; raises :class:`BlobstoreError` if they cannot be read."""


class BlobProvider(Protocol):
    """Finds candidates for blobs."""

    def rounds(self, wanted: Wanted) -> Iterator[Sequence[Candidate]]:
        """Yield candidates in rounds. The caller removes repaired blobs from ``wanted`` in between.

        Raises:
            BlobstoreError: the provider can have no candidates at all.
        """


class RemoteModels(RemoteReader):
    """Models of a remote, with their signatures."""

    def __init__(self, sources: Mapping[Reference, RemoteSource | ObjectSource]) -> None:
        super().__init__(sources)
        self._models = sources.values()

    def signatures(self, manifest: Digest) -> Iterator[bytes]:
        """Yield the signatures that the remote has of a manifest; those that cannot be fetched are left out."""
        source = next((one for one in self._models if Digest.of(one.data) == manifest), None)
        if source is not None:
            yield from attached(source, manifest, lambda _: None).signatures


OtherModels = LocalStore | RemoteModels
"""Another store, or models of a remote, which may have the same manifests and blobs."""


class OtherBlobs:
    """The blobs of another store, or of a remote."""

    def __init__(self, other: OtherModels) -> None:
        self._other = other

    def rounds(self, wanted: Wanted) -> Iterator[Sequence[Candidate]]:
        """Yield one round with the blobs that the other place has; see :class:`BlobProvider`."""
        found = []
        for blob in wanted.values():
            with contextlib.suppress(BlobstoreError):  # damaged there too
                if self._other.exists(blob.digest, blob.size):
                    pieces = partial(self._other.read_pieces, blob.digest, blob.size)
                    found.append(Candidate(blob, pieces))
        yield found


class OtherFiles:
    """The other files of the store's own blobs, for blobs of which one file is damaged."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store

    def rounds(self, wanted: Wanted) -> Iterator[Sequence[Candidate]]:
        """Yield first the cold blobs, then the linked bases; see :class:`BlobProvider`."""
        store = self._store
        for has, pieces in (
            (store.has_cold, lambda digest, size: store.open_cold(digest, size).pieces()),
            (store.has_base_link, store.read_base_link),
        ):
            there = [blob for blob in wanted.values() if has(blob.digest)]
            yield [Candidate(blob, partial(pieces, blob.digest, blob.size)) for blob in there]

    def has_any(self, wanted: Wanted) -> bool:
        """Return whether any of the blobs has another file."""
        return any(
            self._store.has_cold(blob.digest) or self._store.has_base_link(blob.digest)
            for blob in wanted.values()
        )


class RebuiltBlobs:
    """Blobs built again from the source that a model was created from, or one with equal tensors."""

    def __init__(
        self,
        source: TensorSource,
        options: SourceOptions = DEFAULT_OPTIONS,
        overrides: Sequence[str] = (),
        lists: Collection[Digest] = (),
        recorded: Sequence[ImportOptions] | None = None,
    ) -> None:
        """Store the arguments.

        Args:
            source: an open source.
            options: the options that it was opened with.
            overrides: the overrides that the model was quantized with.
            lists: the digests of the layer lists of models whose config blobs are wanted.
            recorded: the options that the models were created with, each once; None if a model does
                not say.
        """
        self._source = source
        self._options = options
        self._recorded = recorded
        self._lists = lists
        self._overrides = tuple(overrides)
        self._converter = Converter(source.read)

    def rounds(self, wanted: Wanted) -> Iterator[Sequence[Candidate]]:
        """Yield one round per way to create a model, without repeats; see :class:`BlobProvider`.

        Raises:
            UnsupportedSource: no model can be created from the source.
            UsageError: an override is invalid or fits no tensor.
        """
        tried: set[tuple[str, Digest]] = set()
        files = list(file_layers(self._source))
        for planned, options in self._plans():
            made = [layer.data for layer in stacks_layer(planned.blobs)]
            made.append(source_record(self._source, planned.blobs, options)[0].to_bytes())
            made += [config_json(self._source, planned, layers) for layers in (*self._lists, None)]
            found = [
                Candidate(blob, file.buffers)
                for file in files
                if file.is_large()
                for blob in wanted.values()
                if (blob.name, blob.size) == (file.name, file.size)
            ]
            made += [b"".join(file.buffers()) for file in files if not file.is_large()]
            for data in made:
                blob = wanted.get(BlobId(Digest.of(data), len(data)))
                if blob is not None:
                    found.append(Candidate(blob, partial(list, [data])))
            by_name: dict[str, list[Descriptor]] = defaultdict(list)
            for blob in wanted.values():
                by_name[blob.name].append(blob)
            for new in planned.blobs:
                for blob in by_name.get(new.name, ()):
                    # Equal headers mean equal types and group sizes, and so equal bytes.
                    attempt = (str(blob.digest), Digest.of(new.header))
                    if blob.size == new.size and attempt not in tried:
                        tried.add(attempt)
                        found.append(Candidate(blob, partial(new.buffers, self._converter.convert)))
            yield found
            # Files do not depend on the plan, so the first round has tried them all.
            files = []
            if not wanted:
                return

    def _plans(self) -> Iterator[tuple[ModelPlan, ImportOptions]]:
        """Yield all plans with their options, the most likely first."""
        for recorded in self._recorded or ():
            with contextlib.suppress(UnsupportedSource, UsageError):  # another form of the model
                plan = plan_source(
                    self._source,
                    experts=recorded.experts,
                    quantize=recorded.quantize,
                    decode=recorded.decode,
                    as_is=recorded.as_is,
                )
                yield plan, recorded._replace(source=self._options)
        quantizing = [
            QuantizeOptions(
                quant_type=item.name, group_size=size, policy=policy, overrides=self._overrides
            )
            for policy in POLICIES
            for item in FORMATS.values()
            if item.is_target
            for size in sorted(item.group_sizes, key=lambda size: size != item.group_size)
        ]
        # Without overrides, a source that cannot be quantized is not an error.
        plain = ([QuantizeOptions()], True)
        every = [plain, (quantizing, bool(self._overrides))]
        for requests, must_be in every if self._recorded is None or self._overrides else [plain]:
            failure: BlobstoreError | None = None
            planned = None
            ways = ((False, False), (True, False), (False, True))
            for request, experts, (decode, as_is) in product(requests, EXPERT_FORMS, ways):
                if (decode or as_is) and request.quant_type is not None:
                    continue  # quantizing decodes in any case
                try:
                    planned = plan_source(
                        self._source,
                        experts=experts,
                        quantize=request,
                        decode=decode,
                        as_is=as_is,
                    )
                except (UnsupportedSource, UsageError) as error:
                    failure = failure or error
                else:
                    yield planned, ImportOptions(self._options, request, experts, decode, as_is)
            if must_be and planned is None and failure is not None:
                raise failure


@contextlib.contextmanager
def open_other(
    source: str | os.PathLike[str] | None,
    store: LocalStore,
    names: Sequence[Reference],
    plain_http: bool | None,
) -> Iterator[OtherModels | None]:
    """Yield the models of the store, or at the address, ``source``; None if it is neither.

    Models of a remote have the names that ``pull`` gives them, and those of ``names`` that differ in the host alone.
    A single model has the name in ``names`` instead, if that is one.

    Raises:
        BlobstoreError: the remote cannot be read.
        UsageError: ``source`` is ``store`` itself.
    """
    if source is None or is_hub_url(str(source)) or not is_address(source):
        yield None if source is None else _other_store(source, store)
        return
    with contextlib.ExitStack() as stack:
        if not _has_many(source, plain_http):
            found = stack.enter_context(find_model(source, plain_http=plain_http))
            name = names[0] if len(names) == 1 else found.address.name()
            yield RemoteModels({name: found})
            return
        models: dict[Reference, RemoteSource | ObjectSource] = {}
        for entry in read_remote_catalog(source, plain_http=plain_http):
            with contextlib.suppress(Damaged, NotFound, UnsupportedSource):  # others may be of use
                found = stack.enter_context(find_model(entry.address, plain_http=plain_http))
                models[found.address.name()] = found
        for name in names:  # names in a server's store do not begin with its host
            alike = [one for one in models if one.parts[1:] == name.parts[1:]]
            if len(alike) == 1:
                models.setdefault(name, models[alike[0]])
        yield RemoteModels(models)


def _has_many(address: str, plain_http: bool | None) -> bool:
    if is_in_objects(address):
        return find_store(address) is not None
    return has_many_models(address, plain_http=plain_http)


def _other_store(source: str | os.PathLike[str], store: LocalStore) -> LocalStore | None:
    if scheme_of(source) is not None:  # such as hf://
        return None
    path = local_path(source)
    if not all((path / part).is_dir() for part in ("blobs", "manifests")):
        return None
    if store.root.exists() and path.samefile(store.root):
        raise UsageError(
            f"{quote(source)} is the store itself, which cannot be repaired from itself"
        )
    return LocalStore(path)
