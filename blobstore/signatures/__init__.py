"""Signatures of models, and the policy that says whose signatures a model needs.

A signature is of a manifest, which names every blob by digest. :mod:`bundle` and :mod:`cosign` read and
write the two kinds, and :mod:`policy` decides whether they are enough. Nothing here does any I/O, except that
:mod:`keys` reads key files.
"""
