"""The operations on a store itself: list, show, verify, repair, gc, cp, mv, rm and du.

They may import every package below ``operations`` and the operation ``create``. They never print.
"""
