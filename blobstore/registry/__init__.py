"""Models in OCI registries: the client, what registries return, and the shapes of models there."""
