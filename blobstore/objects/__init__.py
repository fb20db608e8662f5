"""Stores of models in object storage: S3, Google Cloud Storage, Azure, and folders by ``file://``.

A store has the same layout under a prefix of a bucket as in a folder, so ``aws s3 sync`` of a store's
``blobs/`` and ``manifests/`` gives one, and the other way round. Blobs have the names of their digests and
never change. The manifest of a name is one small object that is replaced only if it is still the one that
was read. docs/reference/format.md specifies the layout.

``address`` is about addresses, ``client`` sends requests, and ``store`` reads and writes models.
"""
