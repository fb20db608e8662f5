"""The files that a model is: what ``export`` writes, ``serve`` offers and ``sign`` signs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from blobstore.folders.export_plan import is_adapter, plan_export
from blobstore.folders.original import plan_original
from blobstore.folders.shards import SHARD_SIZE
from blobstore.manifests.descriptor import MAX_SIZE

if TYPE_CHECKING:
    from blobstore.folders.export_plan import ExportPlan
    from blobstore.models.contents import ModelContents


def files_of(
    model: ModelContents,
    *,
    shard_size: int | None = None,
    single: bool = False,
    dequantize: bool = False,
) -> ExportPlan:
    """Return the files of a model: those that it was imported from, or else a new folder.

    Args:
        model: the model.
        shard_size: bytes of tensors per file, instead of the source's files.
        single: plan one file for each component, instead of the source's files.
        dequantize: plan plain values instead of quantized weights.

    Raises:
        BlobMissing, BlobDamaged, InvalidManifest: the model is damaged, or names files that must not be written.
        BlobstoreError: the model has no such folder.
    """
    has_options = shard_size is not None or single or dequantize
    # Adapters are single files, so that sizes change nothing.
    if not has_options or (not dequantize and is_adapter(model.manifest)):
        original = plan_original(model)
        if original is not None:
            return original
    size = MAX_SIZE if single else shard_size or SHARD_SIZE
    return plan_export(model, size, dequantize=dequantize)
