"""Downloads the files of a model from object storage or a web server, to read them as a folder."""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import BlobId, Digest
from blobstore.core.escape import escape, quote
from blobstore.core.file_kinds import HEAD, absence
from blobstore.core.schemes import WEB, scheme_of
from blobstore.core.workers import Cancelled, WorkerPool
from blobstore.errors import DamagedSource, InvalidDigest, UsageError
from blobstore.remotes.bucket_files import BucketFiles
from blobstore.remotes.web_file import WebFile
from blobstore.sources.fetched_tree import FetchedTree
from blobstore.sources.huggingface import HuggingFaceFolder
from blobstore.store.partial import PartialBlob

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from blobstore.core.progress import Progress
    from blobstore.sources.base import SourceOptions
    from blobstore.sources.fetched_tree import Downloads

_STREAMS: Final = 8
"""Parts of a file that are fetched at once."""


@contextlib.contextmanager
def opened_remote(
    source: str,
    options: SourceOptions,
    downloads: Downloads,
    sha256: str | None,
    progress: Progress | None,
) -> Iterator[HuggingFaceFolder]:
    """Download the files of a model that ``options`` select, and open them.

    Args:
        source: ``s3://bucket/folder``, also with gs or az, or the file itself; or the URL of a weight file.
        options: what to select.
        downloads: has the files.
        sha256: what the only file must have; None to check nothing.
        progress: called with the name of a file, bytes done and total bytes.

    Raises:
        SourceNotFound: there is nothing.
        DamagedSource: a file changed in the meantime, does not have the digest, or is something else.
        RemoteError: the server cannot be reached, or refuses.
        UsageError: the address or the digest is malformed.
        BlobstoreError: as :class:`HuggingFaceFolder` and ``downloads``.
    """
    digest = None if sha256 is None else _parsed(sha256)
    with contextlib.closing(
        WebFile(source) if scheme_of(source) in WEB else BucketFiles(source)
    ) as place:
        if digest is not None and len(place.files) > 1:
            raise UsageError(f"{quote(place.address)} has several files, and one SHA-256 is given")
        tree = _Tree(place, options, downloads, digest)
        found, _ = tree.take(progress)
    with contextlib.closing(HuggingFaceFolder(tree.root, options, found)) as opened:
        opened.notices.extend(place.notices)
        yield opened


class _Tree(FetchedTree):
    """The files of a place. They lie in ``files`` of the folder, and unfinished ones in ``partial``."""

    def __init__(
        self,
        place: BucketFiles | WebFile,
        options: SourceOptions,
        downloads: Downloads,
        sha256: Digest | None,
    ) -> None:
        self._place = place
        self._sha256 = sha256
        version = f"{sorted(place.files.items())} {sha256}"
        if sha256 is None and not all(file.version for file in place.files.values()):
            version += secrets.token_hex(16)  # so that no later download continues it
        folder = downloads.folder(place.address, version)
        self._partial = folder / "partial"
        sizes = {name: file.size for name, file in place.files.items()}
        super().__init__(folder / "files", sizes, options, place.address, downloads)

    def first_bytes(self, name: str) -> bytes:
        """See :class:`FetchedTree`."""
        end = min(self._place.files[name].size, HEAD)
        return self._checked(name, b"".join(self._place.read(name, 0, end)))

    def left_of(self, name: str) -> int:
        """See :class:`FetchedTree`."""
        return 0 if (self.root / name).exists() else self._place.files[name].size

    def fetch(self, names: Sequence[str], progress: Progress | None) -> None:
        """See :class:`FetchedTree`."""
        missing = [name for name in names if not (self.root / name).exists()]
        pool = WorkerPool(_STREAMS, progress, sum(map(self.left_of, missing)))
        for name in missing:
            digest = self._sha256 or Digest.of(name.encode())
            file = PartialBlob.open(self._partial, BlobId(digest, self._place.files[name].size))
            if file is None:
                raise Cancelled("stopped")  # the lock of the folder keeps other processes from it
            with file:
                self._fill(name, file, pool)
                if self._sha256 is not None and not file.has_right_digest():
                    raise DamagedSource(
                        f"{self.label(name)} has another SHA-256 than {digest.hex}",
                        advice="check the address and the digest",
                    )
                file.complete()
                with file.path.open("rb") as stream:
                    self._checked(name, stream.read(HEAD))
                target = self.root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                file.path.rename(target)
                file.discard()

    def _checked(self, name: str, head: bytes) -> bytes:
        """Return the first bytes of a file, which must not be something else in its place."""
        if kind := absence(name, head):
            advice = "put the file itself there, or give another address"
            raise kind.error(self.label(name), advice=advice)
        return head

    def _fill(self, name: str, file: PartialBlob, pool: WorkerPool) -> None:
        what = f"fetching {escape(name)}"
        pool.report(file.done, what)

        def fill(parts: Sequence[int]) -> None:
            begin, end = (file.missing_bytes(part) for part in (parts[0], parts[-1]))
            left = iter(parts)
            part = next(left)
            for whole in self._place.read(name, begin.start, end.stop):
                piece = memoryview(whole)
                while piece:
                    while not (count := len(file.missing_bytes(part))):
                        part = next(left)
                    file.write(part, piece[:count])
                    piece = piece[count:]
                pool.report(len(whole), what)

        jobs = [[part] for part in file.missing]
        if jobs and not self._place.files[name].has_ranges:
            jobs = [file.missing]  # the server sends only all of the file, which is read once
        pool.run(jobs, fill, self._place.abort)


def _parsed(sha256: str) -> Digest:
    try:
        return Digest.parse(f"sha256:{sha256.lower().removeprefix('sha256:')}")
    except InvalidDigest:
        raise UsageError(
            f"not a SHA-256: {quote(sha256)}; expected 64 hexadecimal digits"
        ) from None
