"""Pauses, snapshots and images of sandboxes."""
