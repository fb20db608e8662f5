"""The safetensors format: strict reading, and writing in one canonical form.

``header`` converts between bytes and checked values; ``numpy``, ``torch``, ``mlx`` and ``cuda`` turn
bytes into tensors. The package imports only ``core`` and ``errors``, and knows no stores or manifests.
"""
