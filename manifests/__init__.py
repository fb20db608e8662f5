"""Names of models, and the manifests that list their layers. Pure values: no files are opened."""
