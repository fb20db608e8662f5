"""The safetensors format: headers and files, read strictly and written in one canonical form.

``header`` turns bytes into checked values and back; ``numpy``, ``torch`` and ``mlx`` make tensors of
them. Knows nothing of stores and manifests.
"""
