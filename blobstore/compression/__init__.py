"""Lossless compression of weights: the cold-blob format, and deltas against a base blob.

The package contains pure functions and readers over buffers. It opens no files, starts no threads and
knows no store; it imports only ``core``, ``safetensors`` and ``errors``. ``encoder`` and ``decoder`` are
the entry points. The format is specified in ``docs/reference/cold-format.md``.
"""
