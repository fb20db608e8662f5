"""``blobstore create``: a checkpoint becomes blobs, a manifest and a name.

``blobstore.planning`` decides what is stored, ``jobs`` adds one blob on a thread or in a worker process, and
``create`` runs them all. Repairs use the same plans.
"""
