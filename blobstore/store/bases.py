"""Blobs by which cold ones are coded, in whatever form they are here: hot, cold, or by their second names.

One that is damaged in one form may be whole in another. Reading tries one after the other, and hashes
none of them: what is decoded by a base is checked afterwards.
"""

from __future__ import annotations

import errno
import os
import secrets
from typing import TYPE_CHECKING

from blobstore.core.escape import quote
from blobstore.core.files import make_folders, sync_folder
from blobstore.errors import BlobDamaged, BlobMissing, ColdDamaged, StoreError
from blobstore.store.cold import file_state
from blobstore.store.hot import ADVICE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

    from blobstore.compression.base import BaseBlob
    from blobstore.core.digest import Digest
    from blobstore.store.blobs import BlobReader
    from blobstore.store.cold import ColdBlob, State


_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV, errno.ENOSYS}


def pin(store: BlobReader, digest: Digest) -> bool:
    """Make sure that a blob by which others are coded outlives its file among the blobs.

    Programs that know nothing of cold blobs remove what no manifest reaches. So it is cold itself, or
    its file has a second name, durably. Only who has the store's lock alone may do this.

    Returns:
        Whether that could be done: there are file systems without hard links.

    Raises:
        OSError: the system refused something.
    """
    return store.has_cold(digest) or link_base(store, digest)


def link_base(store: BlobReader, digest: Digest) -> bool:
    """Give a hot blob its second name, durably; an older file loses it. As :func:`pin`."""
    layout = store._layout
    hot, second = layout.blob(digest), layout.base_blob(digest)
    if not os.path.lexists(hot):
        return os.path.lexists(second)
    if os.path.lexists(second) and os.path.samestat(os.lstat(hot), os.lstat(second)):
        return True
    make_folders(layout.bases, layout.root)
    make_folders(layout.temporary, layout.root)
    ready = layout.temporary / f"{os.getpid()}-{secrets.token_hex(8)}-0"
    try:
        os.link(hot, ready, follow_symlinks=False)
        ready.replace(second)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    sync_folder(layout.bases)
    return True


def states(store: BlobReader, digest: Digest) -> tuple[State | None, State | None]:
    """Return what tells the files of a blob, hot and cold, from others; None for what is no file."""
    return file_state(store.blob_path(digest)), file_state(store.cold_path(digest))


def which_are_whole(
    store: BlobReader, digest: Digest, size: int, progress: Callable[[int], None]
) -> tuple[bool, bool]:
    """Tell whether a blob can be used, and whether its cold form is whole or not there.

    Raises:
        StoreError: a file cannot be read.
    """

    def is_whole(check: Callable[[Digest, int, Callable[[int], None]], None]) -> bool:
        try:
            check(digest, size, progress)
        except (BlobMissing, BlobDamaged):
            return False
        return True

    has_cold = store._cold.has(digest)
    is_cold_whole = not has_cold or is_whole(store.check_cold)
    if store._hot.has(digest):
        return is_whole(store.check_digest), is_cold_whole
    return has_cold and is_cold_whole, is_cold_whole


_LOOKS = 3
"""How often a form is looked for: one may become another between two looks."""


def forms_of_base(store: BlobReader, digest: Digest, size: int) -> Iterator[BaseBlob]:
    """Yield a blob of ``size`` bytes by which others are coded, in each form that can be opened.

    Each is looked for when it is wanted, what costs least first.

    Raises:
        BlobDamaged: it is not here, or in no form of that size.
        ColdDamaged: it is coded by another itself.
        StoreError: it cannot be read.
    """
    left = _openers(store, digest, size)
    faults: list[BlobDamaged | ColdDamaged | StoreError] = []
    is_here = False
    for _ in range(_LOOKS):
        for form in list(left):
            try:
                base = form()
            except BlobMissing:
                continue
            except (BlobDamaged, ColdDamaged, StoreError) as error:
                faults.append(error)
            else:
                yield base
                is_here = True
            left.remove(form)
    if not is_here:
        path = quote(store._layout.blob(digest))
        missing = f"blob {path}, by which others are coded, is missing{ADVICE}"
        raise faults[0] if faults else BlobDamaged(missing)


def _openers(store: BlobReader, digest: Digest, size: int) -> list[Callable[[], BaseBlob]]:
    from blobstore.compression.base import BaseBlob  # brings numpy

    def hot() -> BaseBlob:
        return BaseBlob.hot(store._hot.whole(digest, size), digest)

    def cold() -> BaseBlob:
        return _decoding(store._cold.open(digest, size))

    def pinned() -> BaseBlob:
        if is_one_file(store, digest):  # which was tried before
            raise BlobMissing(f"blob {digest} has no second file")
        return BaseBlob.hot(store._pinned.whole(digest, size), digest)

    return [hot, cold, pinned]


def _decoding(blob: ColdBlob) -> BaseBlob:
    """Return a cold blob as a base, which says of itself that it is damaged."""
    base = blob.container.as_base()

    def read_into(out: Buffer, begin: int) -> None:
        try:
            base.read_into(out, begin)
        except ColdDamaged as error:
            raise ColdDamaged(f"so is its base, cold blob {blob.digest}: {error}") from None

    return base._replace(read_into=read_into)


def is_one_file(store: BlobReader, digest: Digest) -> bool:
    """Tell whether the second name of a blob is that of its file."""
    state = file_state(store.blob_path(digest))
    return state is not None and state == file_state(store.base_path(digest))


class WholeBases:
    """Bases that were hashed: what is coded by bytes that are not theirs is lost when these are mended."""

    def __init__(self, store: BlobReader) -> None:
        self._store = store
        self._whole: dict[Digest, set[tuple[str, State]]] = {}

    def form(self, digest: Digest) -> tuple[str, State] | None:
        """Return the file that a base is read from, and what tells it from others; None if none."""
        layout = self._store._layout
        for path in (layout.blob(digest), layout.cold_blob(digest), layout.base_blob(digest)):
            if os.path.lexists(path):
                state = file_state(path)
                return None if state is None else (path, state)
        return None

    def is_whole(self, digest: Digest, size: int, form: tuple[str, State] | None) -> bool:
        """Tell whether the file that a base is read from has the base's bytes; hash it once.

        Raises:
            StoreError: it cannot be read.
        """
        if form is None:
            return False
        if form in self._whole.get(digest, ()):
            return True
        try:
            self._check(digest, size, form[0])
        except (BlobMissing, BlobDamaged):
            return False
        if self.form(digest) != form:
            return False
        self.add(digest, form)
        return True

    def add(self, digest: Digest, form: tuple[str, State]) -> None:
        """Note a file that was hashed by others."""
        self._whole.setdefault(digest, set()).add(form)

    def _check(self, digest: Digest, size: int, path: str) -> None:
        if path == self._store._layout.cold_blob(digest):
            self._store.check_cold(digest, size)
        elif path == self._store._layout.base_blob(digest):
            self._store.check_base_link(digest, size)
        else:
            self._store.check_digest(digest, size)
