"""Freezing and thawing: models are compressed in place, alone or against a base, and restored.

It changes no manifest, and it removes one file of a blob only after the other one was verified and is durable.
"""
