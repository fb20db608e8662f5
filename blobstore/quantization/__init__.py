"""Quantized weights: types, policy, detection of quantized sources, and the arithmetic.

Decisions are pure functions of names, shapes and configs. The arithmetic has three implementations
with equal results: ``numpy`` (the reference), ``torch`` and ``mlx``. ``tensor_bytes`` converts what is imported.
"""
