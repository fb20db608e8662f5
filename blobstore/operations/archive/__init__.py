"""Archives: models packed into one ``.bsar`` file, and unpacked from it.

The file format is specified in docs/reference/archive-format.md. This package combines the store, the cold-blob
codec and the searches of :mod:`blobstore.operations.freeze`; it may import these and everything below.
It writes archives and the given store, never prints, and trusts nothing that it reads from an archive.
"""
