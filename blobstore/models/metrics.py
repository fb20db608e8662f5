"""The numbers that describe a model, such as the loss of a training step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from blobstore.core import strict_json
from blobstore.errors import BlobstoreError
from blobstore.manifests import media_types
from blobstore.manifests.step_record import METRICS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from blobstore.manifests.model import Manifest
    from blobstore.store.protocols import BlobDescriber

_MAX_SIZE: Final = 1 << 20
"""Bytes; a larger file is not read for metrics."""
_LARGEST: Final = sys.float_info.max


def read_metrics(store: BlobDescriber, manifest: Manifest) -> Mapping[str, float]:
    """Return the finite numbers in the ``metrics.json`` of a model; none if it cannot be read."""
    for layer in manifest.layers_of(media_types.JSON):
        if layer.name == METRICS_FILE and layer.size <= _MAX_SIZE:
            try:
                value = strict_json.loads(store.read_blob(layer.digest, layer.size))
            except (BlobstoreError, ValueError):  # show and verify report a blob that is damaged
                return {}
            if isinstance(value, dict):
                numbers = ((key, one) for key, one in value.items() if type(one) in (int, float))
                return {key: one for key, one in numbers if -_LARGEST <= one <= _LARGEST}
    return {}
