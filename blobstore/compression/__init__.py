"""The cold-blob format: lossless codecs for weights, and deltas against a base.

Pure functions and readers over buffers; nothing here knows where a store keeps its files. The format
is in ``docs/cold-format.md``. ``decoder`` and ``encoder`` are the way in.
"""
