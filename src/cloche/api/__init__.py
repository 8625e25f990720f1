"""HTTP dialects: one sub-package per client protocol, all over the same engine.

Dialects do not import each other.
"""
