"""Keeping a store in order: verify, repair, garbage collection, names, disk usage."""
