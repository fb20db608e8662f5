"""A stored model: which tensors it has, where they lie, and how they come into memory.

Reads manifests and blobs through ``blobstore.store``. Writes nothing but the header index.
"""
