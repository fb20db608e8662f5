"""What a model has beside its tensors: the list of stacked ones, the small files, the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.core import strict_json as strictjson
from blobstore.core.escape import quote
from blobstore.core.files import read_regular
from blobstore.errors import DamagedSource
from blobstore.manifests import media_types
from blobstore.manifests.model import ModelConfig
from blobstore.operations.create.blobs import stacks

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from blobstore.core.digest import Digest
    from blobstore.operations.create.blobs import BlobPlan
    from blobstore.sources.base import SourceFile, TensorSource

_MAX_FILE_SIZE = 256 * 2**20


def small_layers(
    source: TensorSource, blobs: Iterable[BlobPlan]
) -> Iterator[tuple[str, str, bytes]]:
    """Yield media type, name and content of the layers after the tensors.

    Raises:
        DamagedSource: a small file cannot be read.
    """
    stacked = stacks_bytes(blobs)
    if stacked:
        yield media_types.STACKS, "", stacked
    yield from file_layers(source)


def stacks_bytes(blobs: Iterable[BlobPlan]) -> bytes:
    """Return the list of stacked tensors; empty where there are none."""
    stacked = stacks(blobs)
    return strictjson.dumps(stacked).encode() if stacked else b""


def file_layers(source: TensorSource) -> Iterator[tuple[str, str, bytes]]:
    """Yield media type, name and content of the small files. Raises as :func:`small_layers`."""
    for file in source.files:
        is_json = file.name.endswith(".json")
        yield media_types.JSON if is_json else media_types.FILE, file.name, _content(file)


def config_bytes(source: TensorSource, quant_type: str, layers: Digest | None) -> bytes:
    """Return the config of a model.

    Args:
        source: what it is made of.
        quant_type: what it is stored as, empty for the types of the source.
        layers: the digest of its list of layers; None as older versions wrote configs, without it.
    """
    config = ModelConfig(
        file_type=quant_type, capabilities=_capabilities(source), layers_digest=layers
    )
    return config.to_bytes()


def _content(file: SourceFile) -> bytes:
    if file.content is not None:
        return file.content
    try:
        return read_regular(file.path, _MAX_FILE_SIZE)
    except OSError as error:
        raise DamagedSource(f"cannot read {quote(file.path)}: {error.strerror}") from error


def _capabilities(source: TensorSource) -> tuple[str, ...]:
    config = source.config
    found = ["completion"]
    if "vision_config" in config or config.get("has_vision"):
        found.append("vision")
    if "audio_config" in config or "sound_config" in config:
        found.append("audio")
    return tuple(found)
