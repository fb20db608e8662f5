"""Compressed blobs are made here: which base a blob gets, its bytes, and the check that they decode.

``plan`` chooses bases with ``base_search``, ``similarity``, ``equal_tensors`` and ``gguf_parents``; ``builder``
compresses blobs with ``blob_encoder``, decodes them again and compares; ``batches`` collects what is ready to be
committed. ``freeze``, archives and ``push --cold`` use the same encoders and the same choice of bases.

Nothing here changes a manifest or removes a blob.
"""
