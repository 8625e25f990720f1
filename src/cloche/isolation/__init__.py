"""Isolation: the backends that make cells."""
