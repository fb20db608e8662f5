"""Follows the folder that a trainer writes: a model becomes each of its versions.

The changes apply to the model of the name. A note says which version that is; without the note, the checksums of
the versions show it. If the trainer is restarted and the folder begins again, the changes apply to the model that
the name had before the first version, as long as the store has it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from blobstore.core import interrupts
from blobstore.core.arguments import local_path
from blobstore.core.digest import Digest
from blobstore.core.escape import quote
from blobstore.core.workers import WorkerPool
from blobstore.errors import BlobDamaged, BlobstoreError, DamagedSource, ModelNotFound
from blobstore.manifests.model import Manifest
from blobstore.operations.create.create import import_source
from blobstore.operations.follow.patched_model import PatchedModel, TrainedModel
from blobstore.operations.follow.places import ClosedPlace, Installed, Look
from blobstore.planning.import_options import ImportOptions
from blobstore.sources.file_tree import FileTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.sources.weight_deltas import new_checksum
from blobstore.sources.weight_versions import SINGLE, OpenChanges, WeightVersions, version_name
from blobstore.store.names import NameUpdate, Old
from blobstore.store.notes import NoteKind, read_own, write_own

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from blobstore.manifests.reference import Reference
    from blobstore.operations.follow.places import Target
    from blobstore.sources.weight_versions import WeightVersion
    from blobstore.store.local import LocalStore

SCHEMES: Final = ("slime:", "sglang:", "modelexpress:")
"""The schemes of the text. All three mean the same form of folder."""
_BUFFER: Final = 2**20
_OPEN_FILES: Final = 256
"""Files of changes that are open at once: a process may not open many more."""

_NOTE: Final = NoteKind("followed 1")


class TrainerFolder(ClosedPlace):
    """The folder in which a trainer writes versions."""

    def __init__(self, target: Target, text: str) -> None:
        """Ask nothing yet. Raises UsageError."""
        self._target = target
        self._source = text
        self._versions = WeightVersions(local_path(text.partition(":")[2], "source"))

    def known(self) -> str | None:
        """See :class:`~blobstore.operations.follow.places.Place`."""
        note = self._note()
        return None if note is None else note.version

    def look(self, known: str | None, wait: int) -> Look:
        """See :class:`~blobstore.operations.follow.places.Place`."""
        del wait
        newest = self._versions.newest()
        if newest is None and known is not None:
            return Look(known)  # the trainer has begun again, and written nothing yet
        number = _text(self._complete(newest).number)
        note = self._note() if known == number else None
        is_rewritten = note is not None and note.state not in ("", self._complete(newest).state)
        return Look(f"{number}, rewritten" if is_rewritten else number)

    def install(self, update: NameUpdate) -> Installed:
        """See :class:`~blobstore.operations.follow.places.Place`."""
        target, newest = self._target, self._complete(self._versions.newest())
        note = self._note()
        known = int(note.version) if note is not None else None
        begins_again = note is not None and self._begins_again(note, newest)
        fetched = 0
        chain = self._versions.chain(newest, None if begins_again else known)
        if not chain and note is not None:
            base, first = note.manifest, note.first
        elif chain[0].base is None:
            full, chain = chain[0], chain[1:]
            base, first = self._import_full(full, update), None
            update = NameUpdate(update.reference, base)
            fetched = full.nbytes
            # Another process can go on there.
            self._write_note(full, base, None)
        else:
            base, first = self._base(note, chain, update.old, begins_again=begins_again)
            if known is None:
                chain = chain[current_version(target.store, _manifest(target, base), chain) :]
        if chain:
            fetched += sum(version.nbytes for version in chain)
        for part in _parts(chain):
            base = self._apply(base, part, update)
            update = NameUpdate(update.reference, base)
            # After each part: a step that fails later continues from there.
            self._write_note(part[-1], base, first)
        number = _text(newest.number)
        with interrupts.deferred():  # all is done
            self._write_note(newest, base, first)
        return Installed(number, fetched, label=f"v{number}")

    def _note(self) -> _Note | None:
        note = _Note.read(self._target)
        return note if note is not None and note.source == self._source else None

    def _write_note(self, version: WeightVersion, manifest: Digest, first: Digest | None) -> None:
        note = _Note(self._source, _text(version.number), manifest, first, version.state)
        note.write(self._target)

    def _begins_again(self, note: _Note, newest: WeightVersion) -> bool:
        """Return whether the folder no longer has the version of the name, but an earlier or another one.

        Raises:
            DamagedSource: that version is malformed.
        """
        known = int(note.version)
        if newest.number < known:
            return True
        current = newest if newest.number == known else self._versions.find(known)
        if current is None or note.state in ("", current.state):
            return False
        # It may only have been copied or touched.
        return current.base is None or (
            bool(current.files)
            and not current_version(
                self._target.store, _manifest(self._target, note.manifest), [current]
            )
        )

    def _complete(self, newest: WeightVersion | None) -> WeightVersion:
        if newest is None:
            raise ModelNotFound(f"{quote(self._versions.folder)} has no complete version yet")
        return newest

    def _base(
        self,
        note: _Note | None,
        chain: Sequence[WeightVersion],
        current: Digest | Old,
        *,
        begins_again: bool,
    ) -> tuple[Digest, Digest | None]:
        """Return the model that the first change applies to, and the one that the trainer started from."""
        target = self._target
        if isinstance(current, Old):
            raise ModelNotFound(
                f"no model {quote(target.reference)}, which the changes of {quote(chain[0].folder)} apply to",
                advice="import the folder that the trainer started from under this name",
            )
        if note is None or not begins_again:
            return current, current if note is None else note.first
        if note.first is None or find_manifest(target.store, target.reference, note.first) is None:
            raise ModelNotFound(
                f"{quote(self._versions.folder)} begins again with version {chain[-1].number}, and the model "
                "that its trainer started from is not in the store any more",
                advice=f"import it under the name {target.reference}",
            )
        return note.first, note.first

    def _apply(self, base: Digest, chain: Sequence[WeightVersion], update: NameUpdate) -> Digest:
        """Import the model with the changes of all versions, and return its manifest."""
        target = self._target
        store = target.store
        manifest = _manifest(target, base)
        with store.lease_if_writable(blob.digest for blob in manifest.blobs):
            check_blobs(store, manifest, target.jobs)
            with contextlib.ExitStack() as stack:
                opened = [
                    stack.enter_context(contextlib.closing(OpenChanges(version)))
                    for version in chain
                ]
                source = PatchedModel(TrainedModel(store, manifest), opened)
                created = import_source(
                    source,
                    update,
                    store,
                    source.options,
                    jobs=target.jobs,
                    progress=target.progress,
                )
        return created.digest

    def _import_full(self, version: WeightVersion, update: NameUpdate) -> Digest:
        """Import a full version, and return its manifest."""
        target = self._target
        with contextlib.ExitStack() as stack:
            tree = FileTree(version.folder, opened=stack.enter_context(version.opened()))
            source = HuggingFaceFolder(version.folder, tree=tree)
            stack.enter_context(contextlib.closing(source))
            if not version.has_index:
                self._check_same_model(version, source)
            created = import_source(
                source,
                update,
                target.store,
                ImportOptions(),
                jobs=target.jobs,
                progress=target.progress,
            )
        return created.digest

    def _check_same_model(self, version: WeightVersion, source: HuggingFaceFolder) -> None:
        """Check that a file without an index has the tensors of the name's model. Raises DamagedSource."""
        target = self._target
        try:
            model = TrainedModel(target.store, target.store.resolve(target.reference))
        except BlobstoreError:  # no model to compare with
            return
        specs = {name: tensor.spec for name, tensor in model.tensors.items()}
        for name in sorted(specs.keys() | source.specs.keys()):
            if specs.get(name) != source.specs.get(name):
                raise DamagedSource(
                    f"{quote(version.folder)} has no index, and tensor {quote(name)} is not in both "
                    f"{SINGLE} and {target.reference} with one type and shape",
                    advice="write an index last, or follow it under another name",
                )


class _Note:
    """Which version a name has. If the note is missing, the checksums of the versions show it."""

    def __init__(
        self, source: str, version: str, manifest: Digest, first: Digest | None, state: str
    ) -> None:
        self.source = source
        self.version = version
        self.manifest = manifest
        self.first = first
        """The manifest that the trainer started from; None if that is not known."""
        self.state = state
        """The state of the version when it was installed; empty in notes of earlier programs."""

    @classmethod
    def read(cls, target: Target) -> _Note | None:
        """Return the note; None if there is no note, or if the name has another model by now."""
        match read_own(_path(target), _NOTE):
            case {
                "source": str(source),
                "version": str(version),
                "manifest": str(manifest),
                "first": str(first),
                **rest,
            } if version.isascii() and version.isdigit():
                with contextlib.suppress(ValueError):  # of a digest
                    note = cls(
                        source,
                        version,
                        Digest.parse(manifest),
                        Digest.parse(first) if first else None,
                        str(rest.get("state", "")),
                    )
                    return note if note.manifest == target.manifest() else None
        return None

    def write(self, target: Target) -> None:
        value = {
            "source": self.source,
            "version": self.version,
            "manifest": str(self.manifest),
            "first": "" if self.first is None else str(self.first),
            "state": self.state,
        }
        write_own(_path(target), target.store.root, _NOTE, value)


def _path(target: Target) -> Path:
    key = Digest.of(str(target.reference).encode()).hex
    return target.store.folder("remotes") / f"followed-{key}"


def find_manifest(store: LocalStore, reference: Reference, digest: Digest) -> bytes | None:
    """Return a manifest that a name has or had, or that another name has, if its blobs are there.

    Raises:
        StoreError: the store cannot be read.
    """

    def candidates() -> Iterator[bytes]:
        with contextlib.suppress(ModelNotFound):
            yield store.read_manifest(reference)
        for former in store.names.former(reference):
            yield former.data
        for other in store.references():
            with contextlib.suppress(BlobstoreError):  # if it cannot be read, it is another one
                yield store.read_manifest(other)

    for data in candidates():
        if Digest.of(data) == digest and store.has_blobs(Manifest.from_bytes(data).blobs):
            return data
    return None


def current_version(store: LocalStore, manifest: Manifest, chain: Sequence[WeightVersion]) -> int:
    """Return how many versions of a chain of changes a model has already, by their checksums.

    Raises:
        DamagedSource: a version is malformed, or changes tensors that the model does not have.
    """
    model = TrainedModel(store, manifest)
    found: dict[tuple[str, str], str] = {}
    buffer = memoryview(bytearray(_BUFFER))

    def checksum_of(name: str, kind: str) -> str:
        if (name, kind) not in found:
            checksum = new_checksum(kind)
            for piece in model.pieces(name, buffer):
                checksum.update(piece)
            found[name, kind] = checksum.hexdigest()
        return found[name, kind]

    different: set[str] = set()
    count = 0
    for number, version in enumerate(chain, 1):
        with contextlib.closing(OpenChanges(version)) as opened:
            model.check(opened)
            for name, checksum in opened.checksums.items():
                is_same = checksum_of(name, version.checksums) == checksum
                (different.discard if is_same else different.add)(name)
            if opened.checksums and not different:
                count = number
    return count


def _parts(chain: Sequence[WeightVersion]) -> Iterator[Sequence[WeightVersion]]:
    """Divide a chain into parts whose files can be open at the same time."""
    begin = count = 0
    for end, version in enumerate(chain):
        count += len(version.files)
        if count > _OPEN_FILES and end > begin:
            yield chain[begin:end]
            begin, count = end, len(version.files)
    if begin < len(chain):
        yield chain[begin:]


def _manifest(target: Target, digest: Digest) -> Manifest:
    data = find_manifest(target.store, target.reference, digest)
    if data is None:
        raise ModelNotFound(f"the store has no model {digest.short} any more")
    return Manifest.from_bytes(data)


def check_blobs(store: LocalStore, manifest: Manifest, jobs: int | None) -> None:
    """Check the digests of all blobs that were not checked since they changed. Raises BlobDamaged."""
    with store.ingest() as ingest:
        intact = WorkerPool(jobs, None, 0).run(
            manifest.blobs, lambda blob: ingest.find(*blob.id) is not None
        )
    for blob, is_intact in zip(manifest.blobs, intact, strict=True):
        if not is_intact:
            raise BlobDamaged(f"layer {quote(blob.name)}: blob {blob.digest} is missing or damaged")


def _text(number: int) -> str:
    return version_name(number).removeprefix("weight_v")
