"""The models of a store, as a server needs them repeatedly.

A look costs one status of a manifest's file. Other work is done once per model and takes milliseconds to minutes.
It is raised as :class:`NotPrepared`: the caller runs it on a thread, and asks again. Fetching a model from elsewhere
is such work, too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from blobstore.core import limits
from blobstore.core.capacity import HASH
from blobstore.core.digest import Digest
from blobstore.errors import BlobstoreError, Damaged
from blobstore.manifests.media_types import SOURCE
from blobstore.manifests.model import Manifest
from blobstore.manifests.reference import DEFAULT_TAG, Reference, name_matches
from blobstore.models.small_files import ModelFiles
from blobstore.serve.artifacts import Artifact, make_artifact, make_image
from blobstore.serve.cold_files import cold_version, find_cold_files, owners_of
from blobstore.serve.commits import Commits, served_commit
from blobstore.serve.description import Description, describe
from blobstore.serve.expiring import bounded, narrowed
from blobstore.serve.made_digests import signed_at
from blobstore.serve.model_files import file_digests, model_files
from blobstore.serve.names import DERIVED, HEAD, IMAGE, MAIN, any_tag
from blobstore.serve.ownership import Ownership, Ownerships
from blobstore.serve.protection import Protection
from blobstore.serve.pulled import PulledModels
from blobstore.serve.tags import Tags
from blobstore.serve.unprepared import NotPrepared, prepared

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from blobstore.core.files import FileVersion
    from blobstore.manifests.lock_file import LockedModel
    from blobstore.serve.commits import Version
    from blobstore.serve.messages import Content
    from blobstore.serve.protection import Use
    from blobstore.serve.pulled import Origin
    from blobstore.sources.hub_listing import ListedFile
    from blobstore.store.local import LocalStore

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
MAX_MODELS = 64
"""Models whose files are kept in memory."""
MAX_MANIFESTS = 8 << 20
"""Bytes of their manifests, each of which takes up to ten times as much. The last two models are kept whatever they have."""
LEASE_SECONDS = 600.0
"""Seconds that the blobs of a model are kept from gc after it was last asked for."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """A version of a model."""

    key: Digest
    """The digest of its manifest."""
    manifest: Manifest | None
    """None while it is being fetched."""
    files: Mapping[str, Content] = field(repr=False)
    digests: Mapping[str, Digest] | None = field(default=None, repr=False)
    """The sha256 of each file; None until they are needed."""
    origin: Origin | None = None
    """The commit of the upstream that it was fetched from; its files are named by that."""
    description: Description = field(default_factory=Description)
    absent: Mapping[str, ListedFile] = field(default_factory=dict, repr=False)
    """The files that the store lacks."""
    completed: ServedModel | None = field(default=None, repr=False)
    """The same model with the absent files, for clients that can get them."""

    @property
    def commit(self) -> str:
        """The commit that it is served as."""
        return served_commit(self.origin, self.key)

    @property
    def plain(self) -> Mapping[str, str]:
        """The names in git of the files that are not listed as large ones."""
        return self.origin.all_plain if self.origin else {}


class Library:
    """The models of a store that are served to somebody. Threads may share it.

    It knows no client: :class:`~blobstore.serve.visible.Visible` has the models that one client may see.
    """

    def __init__(
        self,
        store: LocalStore,
        allow: Sequence[str] = (),
        note: Callable[..., object] | None = None,
    ) -> None:
        """Serve the models that match at least one of the patterns; without patterns, all.

        ``note`` is for a store of others; see :class:`PulledModels`.

        Raises:
            UsageError: a pattern is too long.
        """
        self.store = store
        self.pulled = PulledModels(store, note)
        self.arriving: dict[Reference, ServedModel] = {}
        """Models that are being fetched, by the names that they will have."""
        self.awaited: Sequence[LockedModel] = ()
        """Models without which the server is not ready."""
        self.limits: Callable[[], Collection[tuple[str, ...]]] = lambda: ()
        """Returns the patterns of each token that opens some models only."""
        self.damaged: dict[Reference, float] = {}
        """The names whose artifacts could not be made, because something is missing or damaged, and since when."""
        self._distrusted: dict[tuple[str, str], None] = {}
        self._allow = (tuple(allow),) if allow else ()
        """Groups of patterns, of each of which a name matches one."""
        self._narrowed: dict[tuple[str, ...], Library] = {}
        self._names: dict[Reference, tuple[FileVersion, Digest]] = {}
        self._descriptions: dict[Reference, tuple[FileVersion, Description]] = {}
        self._models: _Kept[Digest, ServedModel] = _Kept(MAX_MODELS)
        self._artifacts: _Kept[object, Artifact] = _Kept(MAX_MODELS)
        self._large, self._hashing = threading.RLock(), threading.RLock()
        """Held by threads that take a large manifest apart, and that hash the files of a model with one."""
        self._protection = Protection(store)
        self.tags = Tags(store, self._described)
        self._commits = Commits(store, self.pulled, self.tags)
        self._ownerships = Ownerships(store, self.tags, self.pulled, self._commits.origins)
        self.is_allowed(Reference.parse("model"))  # refuses patterns before a request does

    def is_allowed(self, reference: Reference) -> bool:
        """Return whether a model may be served."""
        return all(any(name_matches(reference, one) for one in group) for group in self._allow)

    def only(self, patterns: tuple[str, ...]) -> Library:
        """Return the same library for clients that may read models which match one of the patterns; without them, itself."""
        if not patterns:
            return self
        return narrowed(self._narrowed, patterns, self, _allow=(*self._allow, patterns))

    def may_have(self, repository: Reference) -> bool:
        """Return whether models of a repository may be served, if there are any."""
        several = [(*group, *(one.rpartition(":")[0] for one in group)) for group in self._allow]
        return all(
            any(name_matches(any_tag(repository), one) for one in group) for group in several
        ) or bool(self.stored_tags(repository))

    def model(self, reference: Reference, *, with_digests: bool = False) -> ServedModel | None:
        """Return the model of a name; None if the name does not exist.

        Raises:
            NotPrepared: it was not asked for since it changed.
        """
        version = self.store.manifest_version(reference)
        if version is None:
            return None
        known = self._names.get(reference)
        found = self._models.get(known[1]) if known and known[0] == version else None
        if found is None or not self._protection.touch(found.key):
            raise NotPrepared(self._read, reference, version)
        return self._used(found, with_digests=with_digests)

    def descriptions(self, references: Iterable[Reference]) -> Mapping[Reference, Description]:
        """Return the descriptions of any number of stored models, none of which is prepared. Raises as :meth:`model`."""
        found: dict[Reference, Description] = {}
        changed = []
        for reference in references:
            version, known = (
                self.store.manifest_version(reference),
                self._descriptions.get(reference),
            )
            if known is not None and known[0] == version:
                found[reference] = known[1]
            elif version is not None:
                changed.append((reference, version))
        if changed:
            raise NotPrepared(self._describe, tuple(changed))
        return found

    def is_own(self, reference: Reference) -> bool:
        """Return whether a name is the operator's: it has a model, perhaps a damaged or lost one, that no fetch has given it.

        The source of the model does not count: the operator may have imported what clients make the server fetch.
        """
        is_taken = self.store.manifest_version(reference) or self.store.is_gone(reference)
        return bool(is_taken) and not self.pulled.names.has_given(reference)

    def ownership(self, name: Reference, *, is_one: bool = False) -> Ownership:
        """Return whose the names of a repository are that are served to somebody, or whose one is. Raises NotPrepared."""
        found = self._ownerships.of_name(name) if is_one else self._ownerships.of(name)
        if not self._allow:
            return found
        tags, fetched = (list(filter(self.is_allowed, names)) for names in found[:2])
        copies = {name: one for name, one in found.copies.items() if self.is_allowed(name)}
        return Ownership(tags, fetched, copies)

    def arriving_in(self, repository: Reference) -> Mapping[Reference, ServedModel]:
        """Return the models of a repository that are being fetched, by names that are not the operator's by now."""
        # A copy, because other threads add and remove models.
        several = [
            one for one in list(self.arriving.items()) if any_tag(one[0]) == any_tag(repository)
        ]
        return {
            one: model for one, model in several if self.is_allowed(one) and not self.is_own(one)
        }

    def at_commit(self, repository: Reference, commit: str) -> Sequence[Version]:
        """Return the versions of a repository that are served as a commit, also those that had their name before.

        Raises as :meth:`model`.
        """
        several = self._commits.having(repository, commit)
        allowed = (one for one in several if self.is_allowed(one.reference))
        # What the upstream has given comes before what a peer has, whatever their tags are.
        return sorted(allowed, key=lambda one: one.origin is not None and one.origin.is_of_peer)

    def version(self, version: Version, *, with_digests: bool = False) -> ServedModel:
        """Return a version that :meth:`at_commit` has found. Raises as :meth:`model`."""
        found = self._models.get(version.key)
        if found is None or not self._protection.touch(found.key):
            raise NotPrepared(self._read_version, version.reference, version.key, version.commit)
        return self._used(found, with_digests=with_digests)

    def named_by(self, tag: Reference) -> Reference:
        """Return the name of the model that a registry has under a tag, which may be that of an image.

        Raises:
            InvalidReference: no model has such a name.
        """
        is_there = self.is_allowed(tag) and self.store.manifest_version(tag) is not None
        if tag.tag.endswith(IMAGE) and not is_there:
            return Reference(*tag.parts[:3], tag.tag.removesuffix(IMAGE))
        return tag

    def artifact(self, tag: Reference) -> Artifact | None:
        """Return the artifact of a tag, or None if there is no such model.

        Raises as :meth:`model` and :meth:`named_by`.
        """
        reference = self.named_by(tag)
        version = self.store.manifest_version(reference)
        if version is None:
            return None
        if reference != tag:
            found = self._artifacts.get((tag, version))
            if found is None or not self._protection.touch(found.model):
                raise NotPrepared(self._make_image, tag, reference, version, threads=HASH)
            return found
        known, found = self._names.get(reference), None
        if known and known[0] == version:
            found = self._artifacts.get((reference, version, signed_at(self.store, known[1])))
        if found is None or not self._protection.touch(found.model):
            raise NotPrepared(self._make_artifact, reference, version)
        return found

    def watch(self, reference: Reference) -> Callable[[], bool] | None:
        """Return a function that says whether a name has changed since :meth:`artifact` returned it; None for others."""
        known = self._names.get(reference)
        return None if known is None else _Watch(self.store, reference, known[0])

    def prepared_artifacts(self, repository: Reference) -> list[Artifact]:
        """Return the artifacts of a repository that were asked for lately."""
        return [
            one
            for one in self._artifacts.values()
            if one.reference.parts[:3] == repository.parts[:3]
            and self.is_allowed(one.reference)
            and self._protection.touch(one.model)
        ]

    def keys(self, repository: Reference) -> Mapping[Reference, Digest]:
        """Return the digests of the manifests of a repository that are served, by their tags. Raises as :meth:`model`."""
        keys = self.tags.keys(repository)
        return (
            {one: key for one, key in keys.items() if self.is_allowed(one)} if self._allow else keys
        )

    def list_cold_files(self, artifact: Artifact) -> None:
        """Check that an artifact lists the compressed forms that its blobs have now.

        Raises:
            NotPrepared: blobs of the store were frozen or thawed since it was asked for.
        """
        if artifact.layers and artifact.cold_version != cold_version(self.store):
            raise NotPrepared(self._list_cold, artifact, threads=HASH)

    def spelled(self, repository: Reference) -> Reference:
        """Return the repository whose name differs from this one in case only, or else this one.

        Names of the Hub have no case, and those of registries have small letters. Raises NotPrepared.
        """
        found = self.tags.spelled(repository)
        if found is not None:
            return found
        several = (one for one in list(self.arriving) if _folded(one) == _folded(repository))
        return next((any_tag(one) for one in several), repository)

    def placed(self, repository: Reference) -> Reference:
        """Return the repository in which a fetch gives names: the operator's, if that differs in case only.

        Otherwise it is this one, spelled as at the upstream. Raises NotPrepared.
        """
        found = self.spelled(repository)
        return found if self._ownerships.of(found).has_own else repository

    def is_other_case(self, reference: Reference) -> bool:
        """Return whether a name that is not there differs from one that is in case only. Raises NotPrepared."""
        arriving = self.arriving_in(reference)
        if reference in arriving or self.store.manifest_version(reference) is not None:
            return False
        tag = reference.tag.lower()
        several = {*self.tags.of(reference), *arriving} - {reference}  # it may be a broken link
        return any(one.tag.lower() == tag for one in several)

    def is_reserved(self, reference: Reference) -> bool:
        """Return whether a name that is not there would take the place of something else.

        That is an image or a signature, whose tags are derived from others, or a model of the operator's that is the
        branch ``main`` as long as there is no ``latest``.
        """
        if self.store.manifest_version(reference) is not None:
            return False
        if reference.tag != DEFAULT_TAG:
            return reference.tag.endswith(IMAGE) or reference.tag.startswith(DERIVED)
        return any(self.is_own(Reference(*reference.parts[:3], one)) for one in (MAIN, HEAD))

    def stored_tags(self, repository: Reference) -> Sequence[Reference]:
        """Return the tags of a repository in the store that are served to somebody. Raises NotPrepared."""
        tags = self.tags.of(repository)
        return list(filter(self.is_allowed, tags)) if self._allow else tags

    def stores(self, repository: Reference) -> bool:
        """Return whether a repository, in any case of letters, has a tag in the store. Raises NotPrepared."""
        return bool(self.stored_tags(self.spelled(repository)))

    def listed_tags(self, repository: Reference) -> Sequence[Reference]:
        """Return the same after listing them here, on a thread."""
        return prepared(lambda: self.stored_tags(repository))

    def names(self) -> Iterable[Reference]:
        """Return the names of all models that are served to somebody. Call it on a thread. Raises StoreError."""
        return filter(self.is_allowed, self.tags.all())

    def origins(self, references: Iterable[Reference]) -> Mapping[Reference, Origin | None]:
        """Return the commits that names in the store were fetched from; empty if none was. Raises as :meth:`model`."""
        return self._commits.origins(references)

    def distrust(self, repository: str, etags: Sequence[str]) -> None:
        """Note that wrong bytes of files of a repository with these validators were sent, before that was known."""
        for etag in etags:
            bounded(self._distrusted)[repository, etag] = None

    def is_distrusted(self, model: ServedModel, etag: str) -> bool:
        """Return whether clients may have the beginning of a file wrong, so that they must not go on after it."""
        return model.origin is not None and (model.origin.repository, etag) in self._distrusted

    def use(self, served: ServedModel | Artifact) -> Use:
        """Return a use that keeps the blobs of a model while it is sent, and a while longer. Call it for each piece."""
        return self._protection.use(served.key if isinstance(served, ServedModel) else served.model)

    def forget(self, key: Digest) -> None:
        """Forget a model by the digest of its manifest, because the facts about it have changed."""
        self._models.forget(key)

    def forget_all(self, *keys: Digest) -> None:
        """Forget models by the digests of their manifests, and their artifacts: they are gone, or not in use."""
        for key in keys:
            self.forget(key)
        for artifact in self._artifacts.values():
            if artifact.model in keys:
                self._artifacts.forget(artifact.key)

    def is_idle(self, key: Digest, seconds: float) -> bool:
        """Forget a model, and return True, unless it is being sent, or was asked for that lately."""
        if not self._protection.is_idle(key, seconds):
            return False
        self._protection.end_idle(seconds, [key])
        self.forget_all(key)
        return True

    def release_idle(self, seconds: float = LEASE_SECONDS) -> None:
        """Forget models that were not asked for lately, so that gc may remove their blobs, and names that are gone."""
        self.forget_all(*self._protection.end_idle(seconds))
        self.tags.tidy()
        self._commits.forget_absent()
        for known in (self._names, self._descriptions):
            for reference in list(known):
                if self.store.manifest_version(reference) is None:
                    known.pop(reference, None)

    # Work on threads

    def _used(self, model: ServedModel, *, with_digests: bool) -> ServedModel:
        if with_digests and model.digests is None:
            raise NotPrepared(self._hash, model, threads=HASH)
        return model

    def _describe(self, names: Iterable[tuple[Reference, FileVersion]]) -> None:
        for reference, version in names:
            found = Description()
            with contextlib.suppress(BlobstoreError):  # it is damaged
                found = describe(self.store, self.store.resolve(reference))
            self._descriptions[reference] = version, found

    def _read(self, reference: Reference, version: FileVersion) -> None:
        with self._turn(self._large, version.size) as is_next:
            if is_next:
                model = ModelFiles.of(reference, self.store)
                # If it was replaced since, its version is another one, and it will be read again.
                self._names[reference] = version, self._add(model.data, model.manifest)

    def _add(self, data: bytes, manifest: Manifest) -> Digest:
        """Prepare a model, and return its key. Raises as :func:`model_files`."""
        # Before its blobs are read, so that gc keeps what is found.
        key = self._protected(data, manifest)
        with self._turn(self._large, len(data)) as is_next:
            if key in self._models or not is_next:
                return key
            with limits.Held() as held:
                size = _PER_BYTE * sum(layer.size for layer in manifest.layers_of(SOURCE))
                # Half is left for documents that others hold for as long as a fetch takes.
                held.add(min(size, limits.DOCUMENTS.most // 2), "the headers of the model")
                files = model_files(self.store, manifest)
                description = describe(self.store, manifest, files)
            origin = self.pulled.origin(manifest)
            origin = origin and self.pulled.with_others(origin)
            made = ServedModel(key, manifest, files, None, origin, description)
            self._models.add(key, made, len(data))
        return key

    def _protected(self, data: bytes, manifest: Manifest) -> Digest:
        """Keep the blobs of a model from gc, and return its key."""
        key = Digest.of(data)
        self._protection.add(key, (blob.digest for blob in manifest.blobs))
        return key

    def _make_artifact(self, reference: Reference, version: FileVersion) -> None:
        with self._turn(self._large, version.size) as is_next, self._noting_damage(reference):
            if not is_next:
                return
            model = ModelFiles.of(reference, self.store)
            key = self._protected(model.data, model.manifest)
            # Before signatures are read: one that is added in between makes another key.
            kept_as = reference, version, signed_at(self.store, key)
            if kept_as not in self._artifacts:
                made = make_artifact(self.store, reference, model)
                self._keep(made, kept_as, model.manifest, len(model.data))
                self.tags.note(reference, key, made.digests())
            self._names[reference] = version, key

    def _keep(self, made: Artifact, kept_as: object, manifest: Manifest, size: int) -> None:
        made.key, made.origin = kept_as, self.pulled.origin(manifest)
        self._artifacts.add(kept_as, made, size)

    @contextlib.contextmanager
    def _turn(self, lock: threading.RLock, size: int) -> Iterator[bool]:
        """Yield whether a manifest of this size is next: of large ones, which take 20 times as much, one is at a time.

        If it is not, the block does nothing, and the client asks again: a thread that waited would be none for others.
        """
        is_large = size > _LARGE
        is_next = not is_large or lock.acquire(blocking=False)
        try:
            yield is_next
        finally:
            if is_large and is_next:
                lock.release()

    def _described(self, reference: Reference) -> Iterable[Digest]:
        """Return the digests of all manifests and blobs of a tag."""
        with self._noting_damage(reference):
            model = ModelFiles.of(reference, self.store)
            return make_artifact(self.store, reference, model).digests()

    @contextlib.contextmanager
    def _noting_damage(self, reference: Reference) -> Iterator[None]:
        """Note that the model of a name cannot be read if the block finds it damaged."""
        try:
            yield
        except Damaged:
            bounded(self.damaged)[reference] = time.monotonic()
            raise
        self.damaged.pop(reference, None)

    def _list_cold(self, artifact: Artifact) -> None:
        key = artifact.roots[0].digest
        files = find_cold_files(self.store, artifact.layers.values(), key)
        others = {one.base.digest for one in files.layers if one.base} - artifact.layers.keys()
        owners = owners_of(self.store, others) if others else {}
        bases = {base: prepared(partial(self.origins, names)) for base, names in owners.items()}
        artifact.list_cold(files, bases)
        self.tags.note(artifact.reference, artifact.model, artifact.digests())

    def _make_image(self, tag: Reference, reference: Reference, version: FileVersion) -> None:
        with self._turn(self._large, version.size) as is_next:
            if not is_next:
                return
            data, manifest = self.store.parse(reference)
            key = self._protected(data, manifest)
            if (tag, version) not in self._artifacts:
                made = make_image(self.store, reference, key)
                self._keep(made, (tag, version), manifest, len(data))
                self.tags.note(reference, key, made.digests(), IMAGE)

    def _hash(self, model: ServedModel) -> None:
        if model.manifest is None:
            return
        with self._turn(self._hashing, _PER_LAYER * len(model.manifest.layers)) as is_next:
            if is_next and model.digests is None:
                model.digests = file_digests(self.store, model.manifest, model.key)

    def _read_version(self, reference: Reference, key: Digest, commit: str) -> None:
        data = self._commits.read(reference, key, commit)
        if data is not None:
            self._add(data, Manifest.from_bytes(data))


class _Kept(Generic[_Key, _Value]):
    """A cache that forgets the values that were not asked for for the longest time. Threads may share it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._values: dict[_Key, tuple[_Value, int]] = {}
        """With their sizes. The one that was asked for last is the last one."""

    def __contains__(self, key: _Key) -> bool:
        return key in self._values

    def get(self, key: _Key) -> _Value | None:
        with self._lock:
            found = self._values.pop(key, None)
            if found is None:
                return None
            self._values[key] = found
            return found[0]

    def values(self) -> list[_Value]:
        with self._lock:
            return [value for value, _ in self._values.values()]

    def add(self, key: _Key, value: _Value, size: int) -> None:
        with self._lock:
            self._values[key] = value, size
            total = sum(size for _, size in self._values.values())
            while (count := len(self._values)) > self._limit or (
                total > MAX_MANIFESTS and count > 2
            ):
                total -= self._values.pop(next(iter(self._values)))[1]

    def forget(self, key: _Key) -> None:
        with self._lock:
            self._values.pop(key, None)


@dataclass(frozen=True, slots=True)
class _Watch:
    """Returns whether a name has another manifest than that of a version. Equal instances answer alike."""

    store: LocalStore
    reference: Reference
    version: FileVersion

    def __call__(self) -> bool:
        return self.store.manifest_version(self.reference) != self.version


_LARGE = 1 << 20
"""Bytes of a manifest whose model is large."""
_PER_LAYER = 200
"""Bytes of a manifest per layer."""
_PER_BYTE = 16
"""Bytes of memory per byte of headers and indexes while a model is prepared: a third more than those of real models."""


def _folded(repository: Reference) -> list[str]:
    return [part.casefold() for part in repository.parts[:3]]
