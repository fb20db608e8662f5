"""Archives: models packed into one ``.bsar`` file, read and unpacked again.

The file format is in ``docs/archive-format.md``.
"""
