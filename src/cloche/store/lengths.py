"""How long JSON would be, before it is made."""

from __future__ import annotations

from typing import Any


def is_longer(value: Any, most: int) -> bool:
    """Whether the texts in a JSON value have more characters in all. Much faster than to encode it."""
    waiting, size = [value], 0
    while waiting and size <= most:
        each = waiting.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return size > most
