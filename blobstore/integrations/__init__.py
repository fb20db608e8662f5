"""Models of the store in other libraries: vLLM, mlx-lm and transformers.

Each library has a module or package here, the only place that imports it. Integrations call the rest
of blobstore as any program would; nothing imports them.
"""
