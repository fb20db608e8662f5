"""The addresses that models were pushed to and pulled from, which shells complete.

They are one file of JSON, which may vanish or be wrong at any time. Nothing but completion reads it.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.core.files import make_folders, read_regular, write_file
from blobstore.errors import BlobstoreError

if TYPE_CHECKING:
    from pathlib import Path

    from blobstore.store.local import LocalStore

_MAX_ADDRESSES: Final = 200
"""The oldest are forgotten first."""
_MAX_LENGTH: Final = 1 << 10
_MAX_FILE: Final = 1 << 20


def used_remotes(store: LocalStore) -> list[str]:
    """Return the addresses that were used, those of models and of their stores or repositories, latest first."""
    try:
        path = _path(store)
        if path.lstat().st_uid != os.geteuid():  # another user could offer any address
            return []
        value = strict_json.loads(read_regular(path, _MAX_FILE))
    except (OSError, ValueError, BlobstoreError):
        return []
    if not isinstance(value, list):
        return []
    return [one for one in value[:_MAX_ADDRESSES] if isinstance(one, str) and one.isprintable()]


def remember_remotes(store: LocalStore, *addresses: str) -> None:
    """Remember addresses that can be completed, unless the store cannot be written."""
    known = used_remotes(store)
    used = [
        one
        for one in dict.fromkeys((*addresses, *known))
        if len(one) <= _MAX_LENGTH and one.isprintable()
    ]
    if used != known:
        with contextlib.suppress(OSError):
            path = _path(store)
            make_folders(path.parent, store.root, durable=False)
            text = strict_json.dumps(used[:_MAX_ADDRESSES])
            write_file(path, [text.encode()], mode=0o600, durable=False)


def _path(store: LocalStore) -> Path:
    return store.folder("remotes") / "used"
