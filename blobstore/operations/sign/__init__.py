"""Signatures of models, and the policy that says whose signatures a model needs.

A signature is of a manifest, which names every blob by digest. :mod:`bundle` and :mod:`cosign` read and
write the two kinds, :mod:`policy` decides whether they are enough, and both are pure.
"""
