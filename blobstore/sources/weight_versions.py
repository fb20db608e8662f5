"""The folder in which a trainer writes the versions of a model: full ones, and changes against the one before.

A version is a folder ``weight_v000007``. Its index is written last, so a folder without one is not complete;
only a single ``model.safetensors`` may stand alone. A full version is the folder of a model. Of a version that
is a change, the files have a vector of bytes for each tensor that changes, and the checksums of the new
tensors (:mod:`~blobstore.sources.weight_deltas`). Nothing in the folder is trusted: another user may
write it, and no link in it is followed.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from blobstore.core import strict_json
from blobstore.core.escape import join_some, quote
from blobstore.core.tensor import DType
from blobstore.errors import DamagedSource, SourceNotFound, UnsupportedSource
from blobstore.sources.safetensors import SAFETENSORS, SafetensorsShard
from blobstore.sources.sharded import read_index, read_weight_map
from blobstore.sources.weight_deltas import CHECKSUMS, ENCODINGS, Patch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_NAME: Final = re.compile(r"weight_v([0-9]{6,9})", re.ASCII)
_NUMBER: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_MAX_FILES: Final = 100_000
_BUFFER: Final = 2**17


def version_name(number: int) -> str:
    """Return the name of the folder of a version."""
    return f"weight_v{number:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightVersion:
    """A complete version, of which nothing but its index was read."""

    number: int
    folder: Path
    base: int | None
    """The version that it changes; None if it is full."""
    encoding: Any = ""
    checksums: str = ""
    """Their kind."""
    files: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The tensors of each file of changes."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """That of the index."""


class WeightVersions:
    """The versions in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, the newest first, also of those that are not complete.

        Raises:
            SourceNotFound: there is no such folder.
        """
        try:
            names = [path.name for path in self.folder.iterdir()]
        except OSError as error:
            raise SourceNotFound(f"cannot read {quote(self.folder)}: {error.strerror}") from None
        found = (_NAME.fullmatch(name) for name in names)
        return sorted((int(match[1]) for match in found if match), reverse=True)

    def newest(self) -> WeightVersion | None:
        """Return the newest version that is complete; None if there is none. Raises as :meth:`read`."""
        for number in self.numbers():
            if (version := self.read(number)) is not None:
                return version
        return None

    def read(self, number: int) -> WeightVersion | None:
        """Return a version; None if it is not complete.

        Raises:
            DamagedSource: its index is malformed or contradicts its folder, or there is a link in it.
            UnsupportedSource: its changes are encoded or compressed in another way.
        """
        folder = self.folder / version_name(number)
        names = _plain_files(folder)
        if INDEX not in names:
            weights = [name for name in names if name.endswith(SAFETENSORS)]
            # Files of changes may be there before their index.
            is_full = weights == [SINGLE]
            return WeightVersion(number=number, folder=folder, base=None) if is_full else None
        index = folder / INDEX
        try:
            value = strict_json.loads(read_index(index))
        except ValueError as error:
            raise DamagedSource(f"weight index {quote(index)}: {error}") from None
        metadata = value.get("metadata") if isinstance(value, dict) else None
        metadata = metadata if isinstance(metadata, dict) else {}
        if "delta_encoding" not in metadata:
            return WeightVersion(number=number, folder=folder, base=None, metadata=metadata)
        stated, base = (_number(metadata.get(key)) for key in ("version", "base_version"))
        if stated != number or base is None or base >= number:
            raise DamagedSource(
                f"weight index {quote(index)}: expected version {number} and an earlier base_version, got "
                f"{quote(metadata.get('version'))} and {quote(metadata.get('base_version'))}"
            )
        known = {
            "delta_encoding": ENCODINGS,
            "compression_format": ("zstd",),
            "checksum_format": CHECKSUMS,
        }
        for key, texts in known.items():
            if metadata.get(key) not in texts:
                raise UnsupportedSource(
                    f"weight index {quote(index)}: {key} is {quote(metadata.get(key))}, expected "
                    f"{join_some([*map(quote, texts)], 3)}"
                )
        files: dict[str, set[str]] = {}
        for name, file in read_weight_map(index).items():
            files.setdefault(file, set()).add(name)
        return WeightVersion(
            number=number,
            folder=folder,
            base=base,
            encoding=metadata["delta_encoding"],
            checksums=metadata["checksum_format"],
            files={file: frozenset(found) for file, found in files.items()},
            metadata=metadata,
        )

    def chain(self, newest: WeightVersion, known: int | None) -> list[WeightVersion]:
        """Return the versions that lead to ``newest``, oldest first: from ``known`` on, or from a full one.

        Raises:
            DamagedSource: a version between is missing, or not complete; or as :meth:`read`.
        """
        found = [newest]
        while (base := found[-1].base) is not None and base not in (known, 0):
            if known is not None and base < known:
                raise DamagedSource(
                    f"{quote(found[-1].folder)} changes version {base}, and version {known} is here"
                )
            version = self.read(base)
            if version is None:
                raise DamagedSource(
                    f"{quote(found[-1].folder)} changes version {base}, which is not complete"
                )
            found.append(version)
        return found[::-1]


class OpenChanges:
    """The changes of a version, open for reading from any number of threads."""

    def __init__(self, version: WeightVersion) -> None:
        """Open all files, and check that they have the tensors of the index.

        Raises:
            DamagedSource: a file is missing, truncated or malformed, or contradicts the index.
        """
        self.version = version
        self.checksums: dict[str, str] = {}
        """Of the tensors that change, by name."""
        self._shards: dict[str, SafetensorsShard] = {}
        self._open: list[SafetensorsShard] = []
        try:
            for file, names in sorted(version.files.items()):
                self._add(SafetensorsShard(version.folder / file), names)
        except BaseException:
            self.close()
            raise

    def _add(self, shard: SafetensorsShard, names: frozenset[str]) -> None:
        self._open.append(shard)
        if different := sorted(shard.specs.keys() ^ names):
            raise DamagedSource(
                f"{quote(shard.path)}: tensor {quote(different[0])} is not both in the file and, for this "
                "file, in the index"
            )
        for name, spec in shard.specs.items():
            if spec.dtype is not DType.U8 or len(spec.shape) != 1:
                raise DamagedSource(
                    f"{quote(shard.path)}: the change of tensor {quote(name)} is {spec.dtype.value} of "
                    f"shape {list(spec.shape)}, expected a vector of U8"
                )
            checksum = shard.metadata.get(name)
            if checksum is None:
                raise DamagedSource(f"{quote(shard.path)} has no checksum of tensor {quote(name)}")
            self.checksums[name] = checksum
            self._shards[name] = shard

    def patch(self, name: str, nbytes: int) -> Patch:
        """Return what changes a tensor of ``nbytes`` bytes. Raises DamagedSource."""
        shard = self._shards[name]
        return Patch(
            shard.read(name, memoryview(bytearray(_BUFFER))),
            self.version.encoding,
            nbytes,
            self.version.checksums,
            self.checksums[name],
            f"{quote(shard.path)}: tensor {quote(name)}",
        )

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.pop().close()


def _plain_files(folder: Path) -> list[str]:
    """Return the names in a folder, of which neither it nor anything in it may be a link or a device."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamagedSource(f"{quote(folder)} is not a folder")
        count = 0
        for place, folders, files in os.walk(folder, onerror=_raise):
            for name in (*folders, *files):
                path = os.path.join(place, name)  # noqa: PTH118 - for each of many files
                mode = os.lstat(path).st_mode
                if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
                    raise DamagedSource(f"{quote(path)} is neither a file nor a folder")
                count += 1
            if count > _MAX_FILES:
                raise DamagedSource(f"{quote(folder)} has more than {_MAX_FILES} files")
        return sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        raise DamagedSource(f"version {quote(folder)} is missing") from None
    except OSError as error:
        raise DamagedSource(f"cannot read {quote(folder)}: {error.strerror}") from None


def _raise(error: OSError) -> None:
    raise error


def _number(value: object) -> int | None:
    """Return the number of a version, which is a text of digits or, by some trainers, an integer."""
    if type(value) is int:
        value = str(value)
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None
