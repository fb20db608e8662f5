"""Steps of ``torch.distributed.checkpoint`` in a store: a writer and a reader for its ``save`` and ``load``.

Tensors are stored whole, so a step has the same digests whatever the number of processes and the placement of its
shards, and any other number of processes can load it.
"""

from __future__ import annotations

from blobstore.core.libraries import optional_libraries

with optional_libraries():
    from blobstore.integrations.torch_checkpoint.export import export_checkpoint, export_trainer
    from blobstore.integrations.torch_checkpoint.reader import StoreReader
    from blobstore.integrations.torch_checkpoint.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter", "export_checkpoint", "export_trainer"]
