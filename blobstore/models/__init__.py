"""A stored model: which tensors it has, where they lie, and how they are loaded into memory.

Modules here read manifests and blobs through ``blobstore.store``, and import nothing from
``blobstore.operations``. They write nothing but the header index, and never print.
"""
