"""A folder of blobs and manifests: ingest, locks, leases, cold blobs and reachability.

Knows the headers of blobs and nothing else about tensors.
"""
