"""Which blobs a source becomes: decided from names, shapes and configs, before any data is read.

``grouping`` puts tensors into blobs, ``plan`` decides with which quantization, and ``import_options`` has all that a
user chooses, as a model records it.
"""
