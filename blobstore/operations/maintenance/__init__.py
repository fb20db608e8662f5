"""The operations that keep a store in order: verify, repair, gc, cp, mv, rm and history.

They may import every package below ``operations`` and the operation ``create``. They never print.
"""
