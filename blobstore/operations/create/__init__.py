"""Import: a checkpoint becomes blobs, a manifest and a name."""
