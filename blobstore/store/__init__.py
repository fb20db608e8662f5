"""A store: one folder of blobs and manifests that any number of processes share.

It covers imports, locks and leases, hot and cold blobs, the catalog, and reachability. Modules outside this
package use the methods of :class:`~blobstore.store.local.LocalStore`, never its paths, shelves or locks.

May import compression, manifests, safetensors and core. Knows the headers of blobs and nothing else about
tensors; compresses nothing and deletes no blob on its own.
"""
