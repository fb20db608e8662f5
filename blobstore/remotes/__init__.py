"""Models in registries and object storage, read by their addresses as from a store."""
