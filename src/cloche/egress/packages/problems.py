"""Why an index did not give what was asked for. The texts have no URLs in them: a program may read them."""

from __future__ import annotations


class UpstreamError(Exception):
    """It does not answer, or not with what it should."""


class NotThere(UpstreamError):
    """It has no such thing, and says so."""


class OutOfReach(UpstreamError):
    """It names a host that nothing is fetched from."""


class HashMismatch(UpstreamError):
    """A file is not the one that its index describes."""


class NoRoom(UpstreamError):
    """A file can be passed on, but not kept."""
