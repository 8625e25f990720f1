"""HTTP dialects: one sub-package per client protocol, all over the same engine.

Dialects do not import each other: `dialect` is the kit that all are built from, `http` the layer below it.
"""
