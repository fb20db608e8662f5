"""A set of safetensors files read as one source."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from blobstore.errors import BlobstoreError, DamagedSource, InvalidHeader, SourceError
from blobstore.files import open_regular
from blobstore.safetensors.file import read_header
from blobstore.tensor import TensorSpec
from blobstore.text import quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Set as AbstractSet
    from pathlib import Path

    from blobstore.safetensors.header import Header


class _Place(NamedTuple):
    shard: Shard
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One open file. The descriptor stays open, so that a rename cannot swap the bytes."""

    path: Path
    header: Header
    descriptor: int

    @classmethod
    def open(cls, path: Path) -> Shard:
        """Open a file and check its header and size.

        Raises:
            DamagedSource: the file breaks the format, is missing, or cannot be read.
        """
        try:
            descriptor, size = open_regular(path)
        except FileNotFoundError:
            message = f"weight file {quoted(path)} is missing"
            raise DamagedSource(message) from None
        except OSError as error:
            message = f"cannot open {quoted(path)}: {error.strerror}"
            raise SourceError(message) from error
        except BlobstoreError as error:
            raise SourceError(str(error)) from None
        try:
            return cls(path, read_header(descriptor, size), descriptor)
        except InvalidHeader as error:
            os.close(descriptor)
            message = f"{quoted(path)}: {error}"
            raise DamagedSource(message) from None
        except OSError as error:
            os.close(descriptor)
            message = f"cannot read {quoted(path)}: {error.strerror}"
            raise SourceError(message) from error
        except BaseException:
            os.close(descriptor)
            raise


class ShardSet:
    """The tensors of some shards, under their own names or below a prefix."""

    def __init__(self) -> None:
        self.specs: dict[str, TensorSpec] = {}
        self._places: dict[str, _Place] = {}
        self._shards: list[Shard] = []

    def add(self, path: Path, *, prefix: str = "", names: AbstractSet[str] | None = None) -> None:
        """Take in the tensors of a file, or those called ``names``, as ``prefix`` and the name.

        Raises:
            DamagedSource: the file is not whole, or a tensor is in an earlier file too.
        """
        shard = Shard.open(path)
        self._shards.append(shard)
        for name, (spec, begin, end) in shard.header.tensors.items():
            if names is not None and name not in names:
                continue
            full = prefix + name
            if full in self.specs:
                message = (
                    f"tensor {quoted(full)} is in both {quoted(self._places[full].shard.path)} "
                    f"and {quoted(path)}"
                )
                raise DamagedSource(message)
            self.specs[full] = TensorSpec(full, spec.dtype, spec.shape) if prefix else spec
            self._places[full] = _Place(shard, shard.header.data_start + begin, end - begin)

    def names_in(self, path: Path) -> AbstractSet[str]:
        """Return the names of all tensors of a file that was added, without prefix."""
        return next(shard for shard in self._shards if shard.path == path).header.tensors.keys()

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield a tensor's bytes in pieces; see :meth:`TensorSource.read`."""
        shard, offset, left = self._places[name]
        while left:
            try:
                count = os.preadv(shard.descriptor, [buffer[:left]], offset)
            except OSError as error:
                message = (
                    f"cannot read {quoted(shard.path)} at byte {offset}, in tensor "
                    f"{quoted(name)}: {error.strerror}"
                )
                raise DamagedSource(message) from error
            if not count:
                message = (
                    f"{quoted(shard.path)} ended at byte {offset}, in tensor {quoted(name)} with "
                    f"{left} bytes to come: the file was cut short while it was read"
                )
                raise DamagedSource(message)
            yield buffer[:count]
            offset += count
            left -= count

    def close(self) -> None:
        """Close the files."""
        while self._shards:
            os.close(self._shards.pop().descriptor)
