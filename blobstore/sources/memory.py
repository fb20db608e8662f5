"""The tensors of a running program as a source, read from its memory.

The source is like a folder with one file, ``model.safetensors``, that the safetensors library would write, or
``adapter_model.safetensors`` for an adapter of PEFT. So an export of the model writes that file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.errors import (
    BlobstoreError,
    DamagedSource,
    InvalidHeader,
    InvalidManifest,
    UnsupportedSource,
    UsageError,
)
from blobstore.manifests.file_names import MAX_DEPTH, check_paths, is_valid_name
from blobstore.manifests.source_record import RecordedFile, SourceRecord
from blobstore.safetensors.header import encode_file_header, in_file_order
from blobstore.sources.base import SourceFile
from blobstore.sources.small_files import MAX_SMALL_FILE, is_weight_index
from blobstore.sources.versions import SourceVersions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from typing_extensions import Buffer

    from blobstore.core.tensor import TensorSpec

_FILE, _ADAPTER_FILE = "model.safetensors", "adapter_model.safetensors"
_COPIES = 8
"""Threads that copy tensors, at most; more than these do not read memory faster."""


class MemorySource:
    """Tensors in memory. See :class:`TensorSource`."""

    def __init__(
        self,
        tensors: Mapping[TensorSpec, Callable[[], Buffer]],
        metadata: Mapping[str, str],
        files: Mapping[str, bytes],
    ) -> None:
        """Read nothing yet.

        Args:
            tensors: the tensors, each with a function that returns its bytes in the form of a file.
            metadata: the ``__metadata__`` of the file.
            files: the contents of small files, by name.

        Raises:
            UsageError: there are no tensors, a file has a name that a store cannot hold or is too
                large, or ``config.json`` is not a JSON object.
            UnsupportedSource: no header can hold the tensors.
        """
        in_order = in_file_order(tensors)
        self.specs = {spec.name: spec for spec in in_order}
        self._read = {spec.name: read for spec, read in tensors.items()}
        if not in_order:
            raise UsageError("there are no tensors")
        # PEFT, and transformers with it, read an adapter from a file of this name alone.
        is_adapter = "adapter_config.json" in files and "config.json" not in files
        self._file = _ADAPTER_FILE if is_adapter else _FILE
        try:
            check_paths([*files, self._file])
        except InvalidManifest as error:
            raise UsageError(error.message) from None
        for name, content in files.items():
            if is_weight_index(name):
                raise UsageError(
                    f"{quote(name)} is an index of weight files, and there is one file"
                )
            if not is_valid_name(name):
                raise UsageError(
                    f"a store cannot hold a file {quote(name)}: names have at most {MAX_DEPTH} parts of letters, "
                    "digits, '_', '.' and '-'"
                )
            if len(content) > MAX_SMALL_FILE:
                raise UsageError(f"file {quote(name)} is over {MAX_SMALL_FILE >> 20} MiB")
        self.files: Sequence[SourceFile] = [
            SourceFile(name, Path(name), content) for name, content in sorted(files.items())
        ]
        self.config: Mapping[str, Any] = _config(files.get("config.json"))
        self.notices: Sequence[str] = ()
        self.metadata = {Path(self._file): metadata}
        self.block_types: Mapping[str, str] = {}
        self.versions = SourceVersions()
        try:
            self._header = encode_file_header(in_order, metadata or None)
        except (InvalidHeader, UnicodeEncodeError) as error:
            raise UnsupportedSource(f"no safetensors file can hold the tensors: {error}") from None

    @property
    def reopen(self) -> Callable[[], MemorySource]:
        """Raise UsageError, because other processes do not have the tensors."""
        raise UsageError("tensors in memory can be saved only by threads of this process")

    def check_unchanged(self) -> None:
        """Do nothing: it cannot be seen whether memory has changed."""

    def record(self) -> SourceRecord:
        """See :class:`TensorSource`."""
        size = len(self._header) + sum(spec.nbytes for spec in self.specs.values())
        file = RecordedFile(self._file, "safetensors", size, self._header)
        return SourceRecord(kind="memory", files=(file,))

    def read(self, name: str, buffer: memoryview) -> Iterator[memoryview]:
        """See :class:`TensorSource`."""
        data = self._bytes(name)
        for begin in range(0, len(data), len(buffer)):
            # A copy, so that what is hashed is what is written, even if a thread changes the tensor.
            piece = buffer[: len(data) - begin]
            piece[:] = data[begin : begin + len(buffer)]
            yield piece

    def copy(self, memory: memoryview) -> None:
        """Copy the bytes of all tensors to the start of ``memory``, so that the caller may change them.

        Raises:
            DamagedSource: as :meth:`read`.
        """
        import numpy as np

        ends = itertools.accumulate(spec.nbytes for spec in self.specs.values())
        places = iter(list(zip(self.specs, ends, strict=True)))

        def copy() -> None:
            for name, end in places:
                data = self._bytes(name)
                copied = memory[end - len(data) : end]
                np.copyto(np.frombuffer(copied, np.uint8), np.frombuffer(data, np.uint8))
                self._read[name] = functools.partial(_same, copied)

        futures: list[Future[None]] = []
        with ThreadPoolExecutor(_COPIES, thread_name_prefix="blobstore-copy") as pool:
            with contextlib.suppress(RuntimeError):  # the interpreter is ending
                futures += (pool.submit(copy) for _ in range(1, min(_COPIES, os.cpu_count() or 1)))
            copy()
        for future in futures:
            future.result()

    def _bytes(self, name: str) -> memoryview:
        """Return the bytes of a tensor, which a thread may have replaced since it was described."""
        try:
            data = memoryview(self._read[name]()).cast("B")
        except BlobstoreError:
            raise
        except Exception as error:  # whatever a framework raises
            raise DamagedSource(f"tensor {quote(name)} cannot be read: {error}") from error
        expected = self.specs[name].nbytes
        if len(data) != expected:
            raise DamagedSource(
                f"tensor {quote(name)} has {len(data)} bytes, and had {expected}: it was replaced "
                "while it was saved"
            )
        return data

    def close(self) -> None:
        """Forget the tensors."""
        self._read = {}


def _config(content: bytes | None) -> Mapping[str, Any]:
    if content is None:
        return {}
    try:
        value = strict_json.loads_any(content)
    except ValueError as error:
        raise UsageError(f"config.json: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("config.json is not a JSON object")
    return value


def _same(memory: memoryview) -> memoryview:
    return memory
