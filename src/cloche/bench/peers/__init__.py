"""The peers and what drives them, in an environment that has them and nothing of Cloche.

What is here is run by another interpreter: it imports itself, `cloche.bench.programs`, the standard library, and the
peers where they are used.
"""
