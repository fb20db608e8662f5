"""What files say that an operator may change while a server runs: its tokens, or its certificate."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Generic, TypeVar

from blobstore.core.files import FileVersion
from blobstore.errors import BlobstoreError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_Value = TypeVar("_Value")


class Watched(Generic[_Value]):
    """The value of files, which are read again when one of them has changed."""

    def __init__(
        self,
        paths: Sequence[Path],
        read: Callable[[_Value | None], tuple[_Value, str]],
        note: Callable[..., object],
    ) -> None:
        """Read the files.

        Args:
            paths: of the files.
            read: gets the value so far, and returns the next one and the fault of the files: empty if they have none.
                If it raises BlobstoreError, the value stays as it is.
            note: called with each fault that the files get later.

        Raises:
            UsageError: the files have a fault. Otherwise as ``read``.
        """
        self._paths, self._read, self._note = paths, read, note
        self._seen, self._wrong = self._versions(), ""
        self.value, wrong = read(None)
        if wrong:
            raise UsageError(wrong)

    def look(self) -> None:
        """Read the files if one of them has changed, or had a fault. It may wait for a disk."""
        seen, before = self._versions(), self._wrong
        if seen == self._seen and not before:
            return
        self._seen = seen
        try:
            self.value, self._wrong = self._read(self.value)
        except BlobstoreError as error:
            self._wrong = str(error)
        if self._wrong not in ("", before):
            self._note(error=self._wrong)

    def _versions(self) -> list[FileVersion | None]:
        with contextlib.suppress(BlobstoreError):  # reading says what is wrong
            return [FileVersion.of(path) for path in self._paths]
        return []
