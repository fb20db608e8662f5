"""The layers of a model besides its tensors: stacked sources, small files, and the config."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from blobstore.core import strict_json
from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.errors import DamagedSource
from blobstore.manifests import media_types
from blobstore.manifests.model import ModelConfig
from blobstore.operations.create.blobs import stacked_sources

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.operations.create.blobs import BlobPlan
    from blobstore.sources.base import TensorSource

_MAX_FILE_SIZE = 256 * 2**20


class FileLayer(NamedTuple):
    """A small layer with its content."""

    media_type: str
    name: str
    data: bytes


def stacks_layer(blobs: Iterable[BlobPlan]) -> list[FileLayer]:
    """Return the layer that lists the source tensors of stacked ones; none if nothing is stacked."""
    stacked = stacked_sources(blobs)
    data = strict_json.dumps(stacked).encode()
    return [FileLayer(media_types.STACKS, "", data)] if stacked else []


def file_layers(source: TensorSource) -> Iterator[FileLayer]:
    """Yield the small files of a source.

    Raises:
        DamagedSource: a file cannot be read.
    """
    for file in source.files:
        media_type = media_types.JSON if file.name.endswith(".json") else media_types.FILE
        data = file.content
        if data is None:
            try:
                data = read_regular(file.path, _MAX_FILE_SIZE)
            except OSError as error:
                raise DamagedSource(f"cannot read {quote(file.path)}: {error.strerror}") from error
        yield FileLayer(media_type, file.name, data)


def config_json(source: TensorSource, quant_type: str, layers: Digest | None) -> bytes:
    """Return the config of a model.

    Args:
        source: the source of the model.
        quant_type: the type that the model is quantized to; empty for none.
        layers: digest of the list of layers; None for a config as older versions wrote it.
    """
    config = source.config
    capabilities = ["completion"]
    if "vision_config" in config or config.get("has_vision"):
        capabilities.append("vision")
    if "audio_config" in config or "sound_config" in config:
        capabilities.append("audio")
    return ModelConfig(
        file_type=quant_type, capabilities=tuple(capabilities), layers_digest=layers
    ).to_bytes()
