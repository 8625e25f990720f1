"""Kernels of other languages, and how a fork becomes one."""
