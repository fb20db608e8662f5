"""Which models a server has fetched for its clients: they are for whom the upstream lets read them.

The manifest itself says so, by the name of its source layer. So it holds for copies, archives and former manifests,
and no loss of another file makes such a model one of the store's own. What a user imports has no such name.

If a user brings the manifest from elsewhere, such as from a server's store to another one, a note says so, and that no
fetch has made it there. Then it is the store's own, unless clients of this store's server have asked for its repository
before. Without the note, it counts as fetched.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Final

from blobstore.core.digest import Digest
from blobstore.manifests import media_types

if TYPE_CHECKING:
    from blobstore.manifests.model import Manifest
    from blobstore.manifests.reference import Reference

Commit = tuple[str, str]
"""A repository of an upstream, and the name of a commit."""
BROUGHT: Final = ".brought-"
"""The beginning of the names of notes that a user has brought a manifest from elsewhere."""


class Brought(enum.Enum):
    """For whom a model is that a user has brought from elsewhere. The values are the bytes of the notes."""

    EVERYONE = b"everyone"
    READERS = b"readers"
    """A server has fetched from the repository: what its upstream says holds for this model, too."""


_PEER: Final = "@peer"
_MARK: Final = re.compile(rf"([^@]{{1,200}})@([0-9a-f]{{40}})(?:{_PEER})?")


def mark_of(commit: Commit, *, is_of_peer: bool = False) -> str:
    """Return the name of the source layer of a model that is fetched from a commit, as the upstream or a peer has it."""
    return "@".join(commit) + (_PEER if is_of_peer else "")


def fetched_from(manifest: Manifest) -> Commit | None:
    """Return the commit that a server has fetched a model from; None if a user has imported it."""
    for layer in manifest.layers_of(media_types.SOURCE):
        if found := _MARK.fullmatch(layer.name):
            return found[1], found[2]
    return None


def is_of_peer(manifest: Manifest) -> bool:
    """Return whether a peer has said what the commit is that a model was fetched from."""
    return any(one.name.endswith(_PEER) for one in manifest.layers_of(media_types.SOURCE))


def record_name(repository: str, commit: str = "") -> str:
    """Return the name of the file about a commit that was fetched into a store, or about a repository."""
    return Digest.of(f"{repository}@{commit}".encode()).hex


def brought_name(manifest: Digest) -> str:
    """Return the name of the note about a manifest that a user has brought from elsewhere."""
    return f"{BROUGHT}{manifest.hex}"


def given_name(reference: Reference) -> str:
    """Return the name of the note that a server has given a name, or is about to.

    It begins with a dot, as that of no record does.
    """
    return f".name-{Digest.of(str(reference).encode()).hex}"
