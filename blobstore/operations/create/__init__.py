"""``blobstore create``: a checkpoint becomes blobs, a manifest and a name.

``plan`` and ``grouping`` decide what is stored and read no tensor data, ``jobs`` adds one blob on a thread or in
a worker process, and ``create`` runs them all. Repairs use the same plans.
"""
