"""Freezing and thawing: models are compressed in place, alone or against a base, and restored.

``freeze`` and ``thaw`` are the operations. Freezing plans (``plan``, with ``base_search``, ``similarity``,
``duplicates`` and ``tensor_index``), compresses blobs on threads (``compress``, with ``blob_encoder``) and
commits them in ``batches``. Archives use the same encoders and the same choice of bases.

This package imports ``store``, ``compression`` and the layers below them. It changes no manifest, and it
removes one file of a blob only after the other one was verified and is durable.
"""
