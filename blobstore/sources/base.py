"""The interface of all sources of tensors."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from blobstore.errors import DamagedSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.files import FileVersion
    from blobstore.core.tensor import TensorSpec
    from blobstore.manifests.source_record import SourceRecord
    from blobstore.sources.versions import SourceVersions

COMPLETE: Final = "download the complete model"
"""What to do with most sources that are damaged."""


@contextlib.contextmanager
def advising_download() -> Iterator[None]:
    """Advise in a DamagedSource that advises nothing else to download the source again."""
    try:
        yield
    except DamagedSource as error:
        if error.advice or "; " in error.message:  # some messages have it in their text
            raise
        raise type(error)(error.message, advice=COMPLETE) from error.__cause__


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """Which tensors of a source are read, and under which names."""

    weights: str | None = None
    """Pattern of file names, to choose one of several sets of weights in a folder."""
    ignore_unindexed: bool = False
    """Leave out tensors that the weight index does not name. Otherwise they are an error."""
    subtree: str | None = None
    """Part of a PyTorch checkpoint: its keys, joined by dots. ``.`` is the whole checkpoint; by
    default it is the model, found by the keys that training programs use."""
    strip_prefix: str | None = None
    """Text to remove from the beginning of the names of a PyTorch checkpoint's tensors."""
    keep_names: bool = False
    """Keep the tensor names and the row order of Meta's Llamas."""
    skip_unreadable: bool = False
    """Leave out tensors of PyTorch checkpoints whose type the safetensors format does not have.
    Otherwise they are an error."""
    exclude: tuple[str, ...] = ()
    """Patterns of files to treat as if they did not exist, by their names relative to the folder."""
    keep: tuple[str, ...] = ()
    """Patterns of files to store as they are, besides those that are always kept."""


DEFAULT_OPTIONS = SourceOptions()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A small file to keep: its checked name (``file`` or ``folder/file``) and its path."""

    name: str
    path: Path
    content: bytes | None = None
    """The content of a generated file. ``path`` is then the file that it was generated from."""


class Shard(Protocol):
    """One weight file, open for reading from any number of threads."""

    path: Path
    notices: Sequence[str]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, in the order of their bytes in the file."""

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :meth:`TensorSource.read`."""

    def version(self) -> FileVersion:
        """Return the version that the open file has now."""

    def close(self) -> None:
        """Close the file."""


class TensorSource(Protocol):
    """A checkpoint being read.

    All headers are read and checked when a source is opened, so that nothing is written for an
    incomplete one. Any number of threads may read at once.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, in the order of their bytes in the files."""

    @property
    def files(self) -> Sequence[SourceFile]:
        """The small files to keep, sorted by name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The decoded ``config.json``; empty if there is none or it cannot be read."""

    @property
    def notices(self) -> Sequence[str]:
        """Remarks for users, one line each: files that are left out, checks that are not possible."""

    @property
    def metadata(self) -> Mapping[Path, Mapping[str, str]]:
        """The ``__metadata__`` of the safetensors files."""

    @property
    def block_types(self) -> Mapping[str, str]:
        """The llama.cpp types of the tensors that are blocks, by the names of the tensors."""

    @property
    def reopen(self) -> Callable[[], TensorSource]:
        """A picklable function that opens the same source, in any process."""

    @property
    def versions(self) -> SourceVersions:
        """The versions of all files before they were read: weights, indexes, config and small files."""

    def check_unchanged(self) -> None:
        """Check that no file has changed since the source was opened.

        Raises:
            DamagedSource: one has; what was read may be a mixture.
        """

    def record(self) -> SourceRecord:
        """Return the kind of the source, its files, and the repository if it is one of the Hub."""

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in pieces, each in ``buffer`` and valid until the next one.

        Bytes are read, not mapped: a file that shrinks while it is read raises an error, and does
        not kill the process.

        Raises:
            DamagedSource: the file ended before the tensor, or cannot be read.
        """

    def close(self) -> None:
        """Close the files."""
