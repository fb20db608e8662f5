"""Deltas: chunks encoded as differences from the same place in a base blob."""
