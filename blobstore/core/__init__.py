"""Values and operating-system primitives that every other package builds on.

Nothing here knows about models, manifests or stores. ``core`` imports only ``blobstore.errors``.
"""
