"""Stored models written back as files: exported, linked, or converted from a checkpoint."""
