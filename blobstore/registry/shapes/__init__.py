"""How a model lies in a registry: pure functions from a local manifest to remote ones, and back.

Nothing here opens a file or a socket. ``plan`` holds the values that all shapes share, ``ollama``, ``oci``
and ``image`` one shape each, and ``read`` recognizes a shape and rebuilds the local manifest.
"""
