"""The spellings of names in folders of manifests, so that no two names differ only in case.

A process that gives many names keeps what it has listed. A folder is listed again when its version has changed, unless
this process changed it; then names that are new are added to those that were there, which takes half the time. So a name that another program adds within one tick of the clock may be missed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from blobstore.core.files import FileVersion
from blobstore.errors import StoreError
from blobstore.store.scan import each_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_MAX_FOLDERS: Final = 64
_Listed = dict[str, list[str]]


class Spellings:
    """The names of folders of manifests, by their lower-case forms."""

    def __init__(self, manifests: Path) -> None:
        """List nothing yet."""
        self._manifests = manifests
        self._known: dict[Path, tuple[FileVersion | None, _Listed, set[str]]] = {}

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
        for level, part in enumerate(parts):
            folder = self._manifests.joinpath(*parts[:level])
            if (known := self._known.get(folder)) is not None:
                _, names, listed = known
                if part not in listed:
                    names.setdefault(part.lower(), []).append(part)
                    listed.add(part)
                self._known[folder] = FileVersion.of(folder), names, listed

    def _listed(self, parents: Sequence[str]) -> _Listed:
        folder = self._manifests.joinpath(*parents)
        known, names, before = self._known.get(folder, (None, {}, set[str]()))
        try:
            # Before the folder is listed: a change in between makes another version.
            version = FileVersion.of(folder)
            if version is None:
                return {}
            if known == version:
                return names
            listed = set(each_name(folder))
        except StoreError:
            return {}
        if not before <= listed:  # some were removed
            names, before = {}, set()
        for name in listed - before:
            names.setdefault(name.lower(), []).append(name)
        if len(self._known) >= _MAX_FOLDERS:
            self._known.clear()
        self._known[folder] = version, names, listed
        return names
