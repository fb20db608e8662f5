"""Writes stored models as Hugging Face folders, of files or of links, and sources as one file.

The package combines stores, models and sources. It never prints, and never changes a store.
"""
