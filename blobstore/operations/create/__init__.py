"""``blobstore create``: a checkpoint becomes blobs, a manifest and a name.

``plan`` and ``blobs`` decide what is stored and read no tensor data, ``tensor_bytes`` computes the bytes, ``jobs``
adds one blob on a thread or in a worker process, and ``create`` runs them all. Repairs use the same plans.
"""
