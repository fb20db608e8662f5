"""The ``.bsar`` format: the table of an archive, its members in order, and a reader that trusts nothing of a file.

docs/reference/archive-format.md specifies it. Nothing here knows which models go into an archive, or writes a store:
:mod:`blobstore.operations.archive` plans, packs and unpacks.
"""
