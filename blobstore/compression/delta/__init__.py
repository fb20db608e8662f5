"""Deltas: chunks encoded as differences from the same place in a base blob."""

MAX_CHAIN = 16
"""Deltas of a chain, at most: the first one has an ordinary blob as its base."""
MAX_WRITTEN_CHAIN = 8
"""Deltas of the chains that are written. To read the last one, all of them are decoded."""
