"""Reads Meta's Llama folders: joins their shards, and generates a ``config.json``.

The package imports ``core``, ``errors`` and the interface of sources. Opened shards are passed in.
"""
