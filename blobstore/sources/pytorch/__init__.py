"""Reads PyTorch checkpoints: zip archives, legacy streams, and the tensors in them.

The package imports ``unpickler``, ``safetensors`` and ``core``. It never imports torch, and never
executes anything from a file.
"""
