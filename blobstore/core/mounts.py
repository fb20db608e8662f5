"""The file system that a path lies on, and whether its bytes come from another process or machine."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from blobstore.core.system import mount_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_DEVICES: Final = "/sys/dev/block"
_REMOTE: Final = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|fuse([.].*)?|glusterfs|gpfs|lustre|nfs4?|orangefs|panfs|prl_fs|"
    "pvfs2|smb3|smbfs|vboxsf|virtiofs|vmhgfs|wekafs"
)
"""Types whose reads are requests to another process or machine."""
_MEMORY: Final = frozenset(("ramfs", "tmpfs"))
_ESCAPED: Final = re.compile(r"\\([0-7]{3})")
_COLON: Final = re.compile(r"(?<!\\):")
_MAX_DEPTH: Final = 4


class FileSystem(NamedTuple):
    """What a path lies on."""

    kind: str
    """The type as Linux names it, such as ``ext4`` or ``fuse.sshfs``, or a chain such as ``overlay on nfs4``;
    empty if unknown."""
    is_remote: bool = False
    """Whether each read is a request to another process or machine."""
    is_memory: bool = False


class Mount(NamedTuple):
    """A line of the table of mounts."""

    device: str
    """Its number, such as ``254:0``."""
    place: str
    kind: str
    options: str


def file_system_of(path: str | Path) -> FileSystem:
    """Return what a path lies on; if it does not exist, what its nearest parent does."""
    found = Path(path).absolute()
    while True:
        with contextlib.suppress(OSError):
            return _of_device(found, found.stat().st_dev)
        found = found.parent


@functools.lru_cache(maxsize=64)  # reading the table takes as long as opening a small model
def _of_device(path: Path, number: int) -> FileSystem:
    mounts = list(parse_mounts(mount_table()))
    return _found(os.path.realpath(path), number, mounts, _MAX_DEPTH)


def parse_mounts(table: str) -> Iterator[Mount]:
    """Yield the mounts of ``/proc/self/mountinfo``, whose lines proc(5) describes."""
    for line in table.splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(" "), after.split(" ")
        yield Mount(place[2], _unescaped(place[4]), kind[0], kind[-1])


def mount_of(path: str, device: str, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that an absolute path without links is on.

    ``device`` is that of the path. Mounts below others that were mounted later are hidden, and have another
    one; some file systems, such as btrfs, have devices that the table does not list.
    """
    above = [
        mount
        for mount in mounts
        if path == mount.place or path.startswith(mount.place.rstrip("/") + "/")
    ]
    # Of those at one place, the last one is on top.
    return max(
        reversed(above), key=lambda one: (one.device == device, len(one.place)), default=None
    )


def _found(path: str, number: int, mounts: list[Mount], depth: int) -> FileSystem:
    """Return what a path lies on, followed through overlays and files that are mounted as disks."""
    mount = mount_of(path, f"{os.major(number)}:{os.minor(number)}", mounts)
    if mount is None:
        return FileSystem("")
    for layer in _layers(mount) if depth else ():
        with contextlib.suppress(OSError):  # a container does not see the layers of its own root
            below = _found(os.path.realpath(layer), layer.stat().st_dev, mounts, depth - 1)
            if below.is_remote:
                return FileSystem(f"{mount.kind} on {below.kind}", is_remote=True)
    is_remote = _REMOTE.fullmatch(mount.kind) is not None
    return FileSystem(mount.kind, is_remote, mount.kind in _MEMORY)


def _layers(mount: Mount) -> Iterator[Path]:
    """Yield the folders that an overlay shows, or the file that is mounted as a disk."""
    if mount.kind == "overlay":
        for option in mount.options.split(","):
            key, _, value = option.partition("=")
            if key in ("lowerdir", "lowerdir+", "upperdir"):
                parts = _COLON.split(_unescaped(value))
                yield from (Path(part.replace("\\:", ":")) for part in parts if part)
        return
    with contextlib.suppress(OSError):
        yield Path(Path(_DEVICES, mount.device, "loop/backing_file").read_text().rstrip("\n"))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)
