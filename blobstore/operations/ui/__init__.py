"""Renders results as self-contained HTML pages.

The package turns values into text. It reads and writes no files.
"""
