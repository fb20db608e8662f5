"""Names of models, and the manifests that list their layers: pure values, no files."""
