"""Where blobs and manifests live."""
