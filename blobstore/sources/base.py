"""What every source of tensors offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from blobstore.core.tensor import TensorSpec

KEPT_FILES = (
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "*.py",
    "*.md",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""Patterns of the small files that a runtime or its user needs. Code is kept, and never run."""
MAX_FILE_DEPTH = 3
"""Parts of a kept file's name: ``folder/folder/file`` at most."""


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
    keep_names: bool = False
    """Keep the tensor names and the row order of Meta's Llamas."""


DEFAULT_OPTIONS = SourceOptions()


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A small file to keep: its checked name (``file`` or ``folder/file``) and where it is."""

    name: str
    path: Path
    content: bytes | None = None
    """Its content if it was made, and ``path`` is what from."""


class Shard(Protocol):
    """One weight file, open for reading from any number of threads."""

    path: Path
    notices: Sequence[str]

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, in the order in which their bytes lie in the file."""

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :meth:`TensorSource.read`."""

    def close(self) -> None:
        """Close the file."""


class TensorSource(Protocol):
    """A checkpoint being read.

    Opening one has read and checked all headers, so that nothing is written for a source that is
    not whole. Reading is safe from any number of threads.
    """

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """The tensors, in the order in which their bytes lie in the files."""

    @property
    def files(self) -> Sequence[SourceFile]:
        """The small files to keep, sorted by name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The decoded ``config.json``, empty where there is none that can be read."""

    @property
    def notices(self) -> Sequence[str]:
        """What a person should know: files left out, checks not possible. One line each."""

    @property
    def reopen(self) -> Callable[[], TensorSource]:
        """A picklable function that opens the same source, in any process."""

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in pieces, each in ``buffer`` until the next is asked for.

        Bytes are read, not mapped: a file that shrinks while it is read is then an error and not
        a killed process.

        Raises:
            DamagedSource: the file ended before the tensor did, or could not be read.
        """

    def close(self) -> None:
        """Close the files."""
