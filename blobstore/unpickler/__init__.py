"""Reads pickles without executing them.

The package parses the bytes of a pickle into inert records. It imports only ``core``, ``errors`` and
its own modules. It never imports or calls a global of the pickle, and never imports Python's ``pickle``.
"""
