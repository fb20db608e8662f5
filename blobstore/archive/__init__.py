"""Cold storage: lossless codecs for weights, and the container that holds what they make."""
