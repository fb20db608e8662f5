"""The layers of a model besides its tensors: stacked sources, small files, and the config."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.files import open_regular
from blobstore.errors import DamagedSource
from blobstore.manifests import media_types
from blobstore.manifests.model import ModelConfig
from blobstore.planning.grouping import stacked_sources
from blobstore.sources.small_files import MAX_SMALL_FILE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from typing_extensions import Buffer

    from blobstore.core.digest import Digest
    from blobstore.core.files import Opener
    from blobstore.planning.grouping import BlobPlan
    from blobstore.planning.plan import ModelPlan
    from blobstore.sources.base import TensorSource

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileLayer:
    """A layer that is not a tensor, with its content or the file that has it."""

    media_type: str
    name: str
    data: bytes = b""
    path: Path | None = None
    file_size: int = 0
    """The size of the file when it was listed."""
    opener: Opener = open_regular

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.data) if self.path is None else self.file_size

    def is_large(self) -> bool:
        """Return whether the content is too large to be held in memory."""
        return self.size > MAX_SMALL_FILE

    def buffers(self) -> Iterator[Buffer]:
        """Yield the content in pieces, which are valid until the next one.

        Raises:
            DamagedSource: the file cannot be read, or has another size now.
        """
        if self.path is None:
            yield self.data
            return
        buffer = memoryview(bytearray(min(_CHUNK, self.file_size + 1)))
        done = 0
        with _readable(self.path, self.opener) as descriptor:
            while count := os.readv(descriptor, [buffer]):
                done += count
                if done > self.file_size:
                    break
                yield buffer[:count]
        if done != self.file_size:
            raise DamagedSource(f"{quote(self.path)} changed while it was imported; try again")


@contextlib.contextmanager
def _readable(path: Path, opener: Opener) -> Iterator[int]:
    """Yield the descriptor of a file of the source."""
    try:
        descriptor, _ = opener(path)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DamagedSource(f"cannot read {quote(path)}: {error.strerror}") from error


def stacks_layer(blobs: Iterable[BlobPlan]) -> list[FileLayer]:
    """Return the layer that lists the source tensors of stacked ones; none if nothing is stacked."""
    stacked = stacked_sources(blobs)
    data = strict_json.dumps(stacked).encode()
    return [FileLayer(media_types.STACKS, "", data)] if stacked else []


def file_layers(source: TensorSource) -> Iterator[FileLayer]:
    """Yield the files of a source that are stored as they are.

    Raises:
        DamagedSource: a file cannot be read.
    """
    for file in source.files:
        is_json = file.name.endswith(".json")
        media_type = media_types.JSON if is_json else media_types.FILE
        if file.content is not None:
            yield FileLayer(media_type, file.name, file.content)
            continue
        opener = source.versions.open
        with _readable(file.path, opener) as descriptor:
            size = os.fstat(descriptor).st_size
        layer = FileLayer(media_type, file.name, path=file.path, file_size=size, opener=opener)
        # Readers of JSON hold it in memory.
        yield replace(layer, media_type=media_types.FILE) if layer.is_large() else layer


def config_json(source: TensorSource, plan: ModelPlan, layers: Digest | None) -> bytes:
    """Return the config of a model.

    Args:
        source: the source of the model.
        plan: its plan.
        layers: digest of the list of layers; None for a config as older versions wrote it.
    """
    config = source.config
    capabilities = ["completion"]
    if "vision_config" in config or config.get("has_vision"):
        capabilities.append("vision")
    if "audio_config" in config or "sound_config" in config:
        capabilities.append("audio")
    return ModelConfig(
        file_type=plan.quant_type,
        capabilities=tuple(capabilities),
        layers_digest=layers,
        published_scheme=plan.scheme,
    ).to_bytes()
