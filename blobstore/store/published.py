"""The names that were given and not removed, each with a second hard link to its manifest: what is lost is known.

The link tells a name that was lost from one that was removed, and restores it. It is made after the manifest has its
name, and removed before. So a crash leaves a name without a link, which is only not protected, and never a link of a
name that was not given. Links are not synced. The callers hold the exclusive lock.

Ollama, on a store that both use, removes a model's blobs with its manifest. Such a name is not lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.digest import Digest
from blobstore.core.escape import cli_command, quote
from blobstore.core.files import (
    is_there,
    make_folders,
    read_regular,
    sync_folder,
    write_file,
)
from blobstore.core.untrusted_folder import Folder
from blobstore.errors import BlobstoreError, InvalidManifest
from blobstore.manifests.model import MAX_MANIFEST_SIZE, Manifest
from blobstore.store.scan import each_name, walk_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from blobstore.manifests.reference import Reference
    from blobstore.store.manifests import ManifestReader

_HEX: Final = re.compile(rb"[0-9a-f]{64}")


class _Others(NamedTuple):
    """What the names of a store have that are not lost."""

    manifests: set[Digest]
    blobs: set[bytes]
    """The hex digests in their manifests."""


class Published:
    """The second links of the manifests of a store."""

    def __init__(self, store: ManifestReader) -> None:
        self._store = store
        self._folder = store._layout.published
        self._temporary = store._layout.temporary

    def path(self, reference: Reference) -> Path:
        """Return the path of the link of a name."""
        return self._folder.joinpath(*reference.parts)

    def add(self, reference: Reference) -> None:
        """Link the manifest of a name, unless its link has that manifest, or the store cannot be written."""
        manifest, link = self._store.manifest_path(reference), self.path(reference)
        with contextlib.suppress(OSError, BlobstoreError):
            make_folders(
                link.parent, self._store.root, durable=False
            )  # first: it finds links to elsewhere
            if is_there(link):
                if self._is_of(link, manifest):
                    return
                link.unlink()  # another program has replaced the manifest since
            try:
                os.link(manifest, link, follow_symlinks=False)
            except OSError:  # a file system without hard links; or it is full
                data = read_regular(manifest, MAX_MANIFEST_SIZE)
                write_file(link, [data], mode=0o644, temporary=self._temporary, durable=False)

    def _is_of(self, link: Path, manifest: Path) -> bool:
        """Return whether a link is one of a manifest, or a copy."""
        if os.path.samestat(link.lstat(), manifest.lstat()):
            return True
        with contextlib.suppress(OSError, BlobstoreError):
            pair = (read_regular(path, MAX_MANIFEST_SIZE) for path in (link, manifest))
            return next(pair) == next(pair)
        return False

    def remove(self, references: Iterable[Reference], *, durable: bool = True) -> None:
        """Remove the links of names, and folders that become empty. Raises OSError."""
        folders: dict[Path, None] = {}
        with contextlib.closing(Folder(self._store.root)) as root:

            def act(path: Path, remove: Callable[..., None]) -> None:
                below = path.relative_to(self._store.root)
                root.at(str(below), lambda last, at: remove(last, dir_fd=at))

            for reference in references:
                path = self.path(reference)
                # A folder there is nothing of ours, and neither is what a link leads to.
                with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    act(path, os.unlink)
                    folders[path.parent] = None
            for folder in folders if durable else ():
                sync_folder(folder)
            remove_empty(folders, lambda path: act(path, os.rmdir))

    def read_manifest(self, reference: Reference) -> bytes:
        """Return the manifest that a name was given. Raises OSError or BlobstoreError."""
        return read_regular(self.path(reference), MAX_MANIFEST_SIZE)

    def read_blob(self, digest: Digest, size: int) -> bytes:
        """Return a small blob of the store. Raises as :meth:`BlobReader.read_blob`."""
        return self._store.read_blob(digest, size)

    def references(self) -> Iterator[Reference]:
        """Yield the names that have a link. Raises StoreError."""
        for _, path in self._links():
            reference = self._store.reference_of(Path(path))
            if reference is not None:  # otherwise it is a file of something else
                yield reference

    def _links(self) -> Iterator[tuple[os.DirEntry[str], str]]:
        """Yield each link, and where its manifest is, or was; a string, because there may be thousands."""
        folder, below = str(self._store.folder("manifests")), len(str(self._folder))
        return ((entry, folder + entry.path[below:]) for entry in walk_files(self._folder))

    def lost(
        self, *, on_error: Callable[[InvalidManifest], object] | None = None
    ) -> dict[Reference, bytes]:
        """Return the names that are lost, and their manifests.

        A name is lost if it has a link and no manifest, no other name has the same one, as after ``mv`` by hand,
        and some of its blobs are there that no other name needs. Without these, another program has removed it.

        Args:
            on_error: called with the error of each link that is damaged; otherwise the first is raised.

        Raises:
            InvalidManifest: a link cannot be read, or its config does not confirm it, so that what the name
                needs is unknown.
            StoreError: the store cannot be read.
        """
        found = {}
        for reference, data in self._without_manifest():
            if isinstance(data, bytes):
                found[reference] = data
            elif data is not None:
                if on_error is None:
                    raise data
                on_error(data)
        return found

    def lost_manifest(self, reference: Reference) -> bytes | None:
        """Return the manifest of a name that is lost; None if it is not. Raises as :meth:`lost`."""
        if not self._store.is_gone(reference):
            return None
        data = self._judge(reference, self._others())
        if isinstance(data, InvalidManifest):
            raise data
        return data

    def gone(self) -> Iterator[Reference]:
        """Yield the names that have a link and no manifest: those that may come back. Raises StoreError."""
        for _, path in self._links():
            reference = None if is_there(path) else self._store.reference_of(Path(path))
            if reference is not None:
                yield reference

    def _without_manifest(self) -> Iterator[tuple[Reference, bytes | InvalidManifest | None]]:
        """Yield the names without a manifest: with that of a lost one, an error, or None for one that was removed."""
        others = None
        for reference in self.gone():
            others = others or self._others()
            yield reference, self._judge(reference, others)

    def _others(self) -> _Others:
        digests, blobs = set(), set()
        for name in self._store.references():
            with contextlib.suppress(BlobstoreError):
                data = self._store.read_manifest(name)
                digests.add(Digest.of(data))
                # A digest that is spelled otherwise is not found here, and its blob kept.
                blobs.update(_HEX.findall(data))
        return _Others(digests, blobs)

    def _judge(self, reference: Reference, others: _Others) -> bytes | InvalidManifest | None:
        try:
            data = self.read_manifest(reference)
            # Looked for after the link is read, because a removal takes the link first.
            if self._store.has_model(reference) or Digest.of(data) in others.manifests:
                return None
            manifest = Manifest.from_bytes(data)
            own = (blob for blob in manifest.blobs if blob.digest.hex.encode() not in others.blobs)
            if not any(self._is_there(blob.digest) for blob in own):
                return None
            if self._store.check_manifest(data, manifest):
                return data
            problem = f"the config {manifest.config.digest} cannot be read"
        except FileNotFoundError:
            return None
        except (OSError, BlobstoreError) as error:
            problem = str(error)
        return InvalidManifest(
            f"the manifest of {quote(reference)} is lost, and {quote(self.path(reference))} does not "
            f"replace it: {problem}",
            advice=f"restore it with {cli_command('repair', reference, '--from', 'PLACE')}, or forget the "
            f"name with {cli_command('rm', reference)}",
        )

    def _is_there(self, digest: Digest) -> bool:
        return is_there(self._store.blob_path(digest)) or self._store.has_cold(digest)

    def update(self, *, forget_lost: bool) -> None:
        """Bring links up to date with what other programs did: with names that they have replaced or removed.

        Also remove the links of lost names if asked.
        """
        for entry, path in list(self._links()):
            with contextlib.suppress(FileNotFoundError):
                if os.lstat(path).st_ino != entry.inode():
                    reference = self._store.reference_of(Path(path))
                    if reference is not None:
                        self.add(reference)
        # Without any blobs, the folder is more likely not mounted.
        if forget_lost or any(each_name(self._store.folder("blobs"))):
            names = self._without_manifest()
            self.remove(
                [name for name, data in names if forget_lost or data is None], durable=False
            )


def hex_digests_of(manifests: Mapping[Reference, bytes]) -> set[str]:
    """Return the hex digests of the blobs that some manifests reference."""
    parsed = map(Manifest.from_bytes, manifests.values())
    return {blob.digest.hex for manifest in parsed for blob in manifest.blobs}


def remove_empty(folders: Iterable[Path], remove: Callable[[Path], object] = Path.rmdir) -> None:
    """Remove folders of tags that are empty, and then those above them: of the model, the namespace and the host."""
    for folder in folders:
        with contextlib.suppress(OSError):  # the folder has other names
            for empty in (folder, *folder.parents[:2]):
                remove(empty)
