"""The files that a model is in a Hugging Face folder: which there are, their bytes and their digests."""
