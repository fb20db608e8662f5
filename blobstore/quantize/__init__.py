"""Quantized weights: their types, and how a source that holds them is recognised."""
