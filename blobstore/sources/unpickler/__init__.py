"""Reads pickles without running them: what a pickle asks for becomes inert values."""
