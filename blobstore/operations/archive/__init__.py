"""Models packed into one ``.bsar`` file, and unpacked from it. :mod:`blobstore.archives` knows the format.

It writes archives and the given store, never prints, and trusts nothing that it reads from an archive.
"""
