"""The folder in which a trainer writes the versions of a model: full ones, and changes against the one before.

A version is a folder ``weight_v000007``. Its index is written last, so a folder without one is not complete;
only a single ``model.safetensors`` may stand alone, unless it looks like a change whose index is still to
come. A full version is the folder of a model. The files of a change have a vector of bytes for each tensor
that changes, and the checksums of the new tensors (:mod:`~blobstore.sources.weight_deltas`). Nothing in the folder is
trusted: another user may write it. Each look opens the folder once and everything else relative to it, and follows no
link in it.
"""

from __future__ import annotations

import contextlib
import re
import stat
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from blobstore.core import strict_json
from blobstore.core.digest import Digest
from blobstore.core.escape import join_some, quote
from blobstore.core.files import FileVersion
from blobstore.core.tensor import DType
from blobstore.core.untrusted_folder import Folder
from blobstore.errors import BlobstoreError, DamagedSource, SourceNotFound, UnsupportedSource
from blobstore.sources.safetensors import SAFETENSORS, SafetensorsShard
from blobstore.sources.sharded import read_index, read_weight_map
from blobstore.sources.weight_deltas import CHECKSUMS, ENCODINGS, Patch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
_NAME: Final = re.compile(r"weight_v([0-9]{6}|[1-9][0-9]{6,8})", re.ASCII)
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
    parent: Folder
    """The open folder of all versions."""
    nbytes: int
    """Bytes of its files."""
    state: str
    """Text that changes whenever one of its files does."""
    has_index: bool = True
    base: int | None
    """The version that it changes; None if it is full."""
    encoding: Any = ""
    checksums: str = ""
    """Their kind."""
    files: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """The tensors of each file of changes."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """That of the index."""

    @property
    def folder(self) -> Path:
        """Its path."""
        return self.parent.path / version_name(self.number)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Folder]:
        """Open the folder for a block, in which no link is followed. Raises DamagedSource."""
        try:
            folder = self.parent.folder(self.folder.name)
        except OSError as error:
            raise DamagedSource(f"cannot read {quote(self.folder)}: {error.strerror}") from None
        with contextlib.closing(folder):
            yield folder


class WeightVersions:
    """The versions in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read nothing yet."""
        self.folder = folder
        self._opened = Folder(folder)
        self._numbers: list[int] = []

    def numbers(self) -> list[int]:
        """Return the numbers of all versions, the newest first, also of those that are not complete.

        This opens the folder again, since trainers replace it.

        Raises:
            SourceNotFound: there is no such folder.
        """
        self._opened = Folder(self.folder)
        try:
            names = self._opened.names()
        except OSError as error:
            raise SourceNotFound(f"cannot read {quote(self.folder)}: {error.strerror}") from None
        found = (_NAME.fullmatch(name) for name in names)
        self._numbers = sorted((int(match[1]) for match in found if match), reverse=True)
        return self._numbers

    def newest(self) -> WeightVersion | None:
        """Return the newest version that is complete; None if there is none. Raises as :meth:`read`."""
        for number in self.numbers():
            if (version := self.read(number)) is not None:
                return version
        return None

    def find(self, number: int) -> WeightVersion | None:
        """Return a version; None if it was not there when :meth:`numbers` looked. Raises as :meth:`read`."""
        return self.read(number) if number in self._numbers else None

    def read(self, number: int) -> WeightVersion | None:
        """Return a version; None if it is not complete.

        Raises:
            DamagedSource: its index is malformed or contradicts its folder, or there is a link in it.
            UnsupportedSource: its changes are encoded or compressed in another way.
        """
        name = version_name(number)
        try:
            folder = self._opened.folder(name)
        except FileNotFoundError:
            raise DamagedSource(f"version {quote(self.folder / name)} is missing") from None
        except OSError:  # a link too
            raise DamagedSource(f"{quote(self.folder / name)} is not a folder") from None
        with contextlib.closing(folder):
            try:
                files = _list_files(folder)
            except OSError as error:
                raise DamagedSource(f"cannot read {quote(folder.path)}: {error.strerror}") from None
            version = WeightVersion(
                number=number,
                parent=self._opened,
                nbytes=files.nbytes,
                state=files.state,
                has_index=INDEX in files.names,
                base=None,
            )
            if version.has_index:
                return self._read_index(version, folder)
            is_full = _is_single_model(folder, files.names)
            return version if is_full else None

    def _read_index(self, version: WeightVersion, folder: Folder) -> WeightVersion:
        index, number = folder.path / INDEX, version.number
        try:
            value = strict_json.loads(read_index(index, folder.open_path))
        except ValueError as error:
            raise DamagedSource(f"weight index {quote(index)}: {error}") from None
        metadata = value.get("metadata") if isinstance(value, dict) else None
        metadata = metadata if isinstance(metadata, dict) else {}
        if "delta_encoding" not in metadata:
            return replace(version, metadata=metadata)
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
        for name, file in read_weight_map(index, folder.open_path).items():
            files.setdefault(file, set()).add(name)
        return replace(
            version,
            base=base,
            encoding=metadata["delta_encoding"],
            checksums=metadata["checksum_format"],
            files={file: frozenset(found) for file, found in files.items()},
            metadata=metadata,
        )

    def chain(self, newest: WeightVersion, known: int | None) -> list[WeightVersion]:
        """Return the versions that lead to ``newest``, oldest first: after ``known``, or from a full one on.

        Raises:
            DamagedSource: a version between is missing, or not complete; or as :meth:`read`.
        """
        if newest.number == known:
            return []
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
            with version.opened() as folder:
                for file, names in sorted(version.files.items()):
                    self._add(SafetensorsShard(folder.path / file, folder.open_path), names)
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
        """Return the change of a tensor of ``nbytes`` bytes. Raises DamagedSource."""
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


def _is_single_model(folder: Folder, names: set[str]) -> bool:
    """Return whether a folder without an index has one file of weights, which is complete and no change."""
    if [name for name in names if name.endswith(SAFETENSORS)] != [SINGLE]:
        return False
    try:
        shard = SafetensorsShard(folder.path / SINGLE, folder.open_path)
    except BlobstoreError:  # it is being written
        return False
    with contextlib.closing(shard):
        return not any(
            spec.dtype is DType.U8 and len(spec.shape) == 1 and name in shard.metadata
            for name, spec in shard.specs.items()
        )


class _Files(NamedTuple):
    """The content of a folder."""

    names: set[str]
    nbytes: int
    state: str
    """Changes whenever a file is written, replaced or added."""


def _list_files(folder: Folder) -> _Files:
    """Return the files of a version, in which nothing may be a link or a device. Raises DamagedSource, OSError."""
    found: list[str] = []
    nbytes = 0
    for name, status in folder.walk():
        is_file = stat.S_ISREG(status.st_mode)
        if not is_file and not stat.S_ISDIR(status.st_mode):
            raise DamagedSource(f"{quote(folder.path / name)} is neither a file nor a folder")
        # Machines that share a file system number its device differently.
        version = FileVersion.of_status(status)[1:] if is_file else ()
        found.append(f"{name} {version}")
        nbytes += status.st_size if is_file else 0
        if len(found) > _MAX_FILES:
            raise DamagedSource(f"{quote(folder.path)} has more than {_MAX_FILES} files")
    state = Digest.of("\n".join(sorted(found)).encode(errors="surrogateescape"))
    return _Files(set(folder.names()), nbytes, state.hex)


def _number(value: object) -> int | None:
    """Return the number of a version, which is a text of digits or, by some trainers, an integer."""
    if type(value) is int:
        value = str(value)
    return int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else None
