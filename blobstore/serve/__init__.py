"""Serves the models of a store over HTTP, as the Hub and as a registry of containers do. It only reads.

``routes`` turns a request into a response without a socket; ``hub`` and ``registry`` know one protocol each.
``library`` finds models, and ``model_files`` composes their files of parts of blobs. Only ``server`` imports aiohttp,
and only ``blob_reader`` opens blobs.
"""
