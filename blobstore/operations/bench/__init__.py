"""Measures how fast the bytes of a model arrive, by bare reads and copies and by ``open``.

The package combines stores, remotes and models. It never prints, and never changes a store.
"""
