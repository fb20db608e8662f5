"""Imports of many models at once, on threads, processes or a cluster."""
