"""The peers and their drivers, in an environment that has them and nothing of Cloche.

Another interpreter runs these modules: they import each other, the standard library, and the peers where they are
used.
"""
