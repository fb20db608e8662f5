"""The spellings of names in folders of manifests, so that no two names differ only in case.

A process that gives many names keeps what it has listed, until the version of the folder changes. For changes by this
user, a journal has the versions before and after a name was given, so that other processes need not list the folder
again. Otherwise names that are new are added to those that were there, which takes half the time. So a name that
another program adds within one tick of the clock may be missed.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import TYPE_CHECKING, Any, Final

from blobstore.core.files import FileVersion, open_own, read_exactly
from blobstore.errors import StoreError
from blobstore.store.scan import each_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_FOLDERS: Final = 64
_MAX_BYTES: Final = 1 << 20
"""Of the journal, which then begins again."""
_Listed = dict[str, list[str]]


class Spellings:
    """The names of folders of manifests, by their lower-case forms."""

    def __init__(self, manifests: Path, journal: Path) -> None:
        """List nothing yet."""
        self._manifests = manifests
        self._known: dict[str, tuple[FileVersion | None, _Listed, set[str]]] = {}
        self._journal = journal
        self._read = 0, 0
        """The inode of the journal, and the bytes of it that were read."""
        self._lock = threading.Lock()
        """Of what is known, which threads ask for outside the lock of the store."""

    def __reduce__(self) -> Any:
        """Let a store be sent to another process, which lists the folders itself."""
        return Spellings, (self._manifests, self._journal)

    def of(self, parts: Sequence[str]) -> list[tuple[str, ...]]:
        """Return the paths of hosts, namespaces, models or tags that differ from this one in case at most, sorted.

        A folder that cannot be read has none.
        """
        found: list[tuple[str, ...]] = [()]
        for part in parts:
            found = [
                (*parents, name)
                for parents in found
                for name in sorted(self._listed(parents).get(part.lower(), ()))  # names are ASCII
            ]
        return found

    def has_tags(self, repository: Sequence[str]) -> bool:
        """Return whether a repository has a tag, spelled as here."""
        return bool(self._listed(repository))

    def first_tag(self, repository: Sequence[str]) -> str | None:
        """Return a tag of a repository; None if it has no tag."""
        tags = list(self._listed(repository).values())  # at once: other threads may note names
        return min((tag for alike in tags for tag in alike), default=None)

    def note(self, parts: Sequence[str]) -> None:
        """Note that this process has just given a name, after :meth:`of` and under the same lock."""
        lines = []
        with self._lock:
            for level, part in enumerate(parts):
                folder = "/".join(parts[:level])
                if (known := self._known.get(folder)) is not None:
                    version = self._version(folder)
                    self._add(folder, part, version)
                    if version != known[0]:
                        lines.append(json.dumps([folder, part, known[0], version]) + "\n")
        with contextlib.suppress(OSError):  # a cache
            self._append("".join(lines).encode())

    def _append(self, lines: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._journal, flags | os.O_NONBLOCK, 0o600)
        try:
            os.write(descriptor, lines)
            if os.fstat(descriptor).st_size > _MAX_BYTES:
                self._journal.unlink()
        finally:
            os.close(descriptor)

    def _catch_up(self) -> None:
        """Add the names that other processes have given since the last look."""
        with open_own(self._journal) as descriptor, contextlib.suppress(ValueError, TypeError):
            if descriptor is None:
                return
            status = os.fstat(descriptor)
            inode, begin = self._read
            begin = begin if inode == status.st_ino and begin <= status.st_size else 0
            lines = read_exactly(descriptor, min(status.st_size - begin, 2 * _MAX_BYTES), begin)
            lines = lines[: lines.rfind(b"\n") + 1]  # another process may be writing the last
            self._read = status.st_ino, begin + len(lines)
            for folder, part, before, after in map(json.loads, lines.splitlines()):
                known = self._known.get(folder)
                if known is not None and known[0] == tuple(before):
                    self._add(folder, part, FileVersion(*after))

    def _add(self, folder: str, part: str, version: FileVersion | None) -> None:
        """Add a name to a folder that was listed, and which has this version now."""
        _, names, listed = self._known[folder]
        if part not in listed:
            names.setdefault(part.lower(), []).append(part)
            listed.add(part)
        self._known[folder] = version, names, listed

    def _version(self, folder: str) -> FileVersion | None:
        return FileVersion.of(f"{self._manifests}/{folder}")

    def _listed(self, parents: Sequence[str]) -> _Listed:
        with self._lock:
            return self._list("/".join(parents))

    def _list(self, folder: str) -> _Listed:
        try:
            # Before the folder is listed: a change in between makes another version.
            version = self._version(folder)
            if version is None:
                self._known.pop(folder, None)  # the names that it had are gone
                return {}
            if folder in self._known and self._known[folder][0] != version:
                self._catch_up()
            known, names, before = self._known.get(folder, (None, {}, set[str]()))
            if known == version:
                return names
            listed = set(each_name(f"{self._manifests}/{folder}"))
        except StoreError:
            self._known.pop(folder, None)
            return {}
        if not before <= listed:  # some were removed
            names, before = {}, set()
        for name in listed - before:
            names.setdefault(name.lower(), []).append(name)
        if len(self._known) >= _MAX_FOLDERS:
            self._known.clear()
        self._known[folder] = version, names, listed
        return names
