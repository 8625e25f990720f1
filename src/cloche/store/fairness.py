"""What each may have of something that is for all."""

from __future__ import annotations

from collections.abc import Iterable


def equal_share(amounts: Iterable[int], most: int) -> int:
    """What one may have at most, so that all together have no more than `most`: whoever has little loses nothing."""
    ordered, left = sorted(amounts), most
    for at, amount in enumerate(ordered):
        equal = left // (len(ordered) - at)
        if amount > equal:
            return equal
        left -= amount
    return most
