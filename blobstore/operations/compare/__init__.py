"""Compares two stored models: equality of tensors and files, and errors of tensors.

The package reads stores and models. It never prints, and never changes a store.
"""
