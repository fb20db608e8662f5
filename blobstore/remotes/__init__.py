"""Models in registries and object storage: read by their addresses as from a store, and their blobs on the way.

It trusts nothing that a remote sends, and follows no address but the one that it was given.
"""
