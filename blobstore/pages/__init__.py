"""Draws stores and models as one self-contained HTML page.

Modules named ``*_view`` compute layout and data as plain values, one module per view. ``shell`` turns
them into the page, whose script only draws. Nothing here prints or changes a store.
"""
