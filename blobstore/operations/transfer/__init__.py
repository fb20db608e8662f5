"""Models sent to registries and fetched from them.

This package combines the store with :mod:`blobstore.registry`. It never prints, trusts nothing that a
registry sends, and follows no address but the one that it was given.
"""
