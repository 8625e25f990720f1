"""Kernel mechanisms, one per file. Standard library only, Python 3.10: these files also run inside the sandbox."""
