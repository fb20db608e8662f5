"""How a model lies in a registry: pure functions from a local manifest to remote ones, and back.

Nothing here opens a file or a socket. ``plan`` holds the values that all layouts share, ``ollama``, ``oci``
and ``image`` one layout each, and ``read`` recognizes a layout and rebuilds the local manifest.
"""
