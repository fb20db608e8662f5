"""The operations on a store itself: list, show, verify, repair, gc, cp, mv, rm and du.

They may import store, models, sources and the operation ``create``. They never print or exit.
"""
