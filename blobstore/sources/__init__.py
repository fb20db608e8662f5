"""Reads checkpoints: model folders, weight files of several formats, and Hugging Face Hub repositories.

Sources import ``core``, ``manifests`` and ``safetensors``, and know nothing of stores. They never change
a file, and never execute code from one: pickles are parsed by an unpickler of our own.
"""
