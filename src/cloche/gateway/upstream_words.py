"""What may be said, and logged, of what an upstream says and of how it fails."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Iterable

LEAST_SECRET = 8  # characters of a header's value that may be a key
MASK = "***"
_BETWEEN = re.compile(r"[\s,;=]+")
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def secrets_in(values: Iterable[str]) -> list[str]:
    """What in values of headers may be secret: they themselves, and the words of those like `Bearer sk-..`."""
    parts = (part for value in values for part in (value.strip(), *_BETWEEN.split(value)))
    found = {part for part in parts if len(part) >= LEAST_SECRET}
    return sorted(found, key=len, reverse=True)  # a part of another must not leave the rest of it


def concealed(text: str, secrets: list[str]) -> str:
    """Without the secrets; nor the beginning of one at the end, where a text was cut."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    for secret in secrets:
        for size in range(min(len(secret), len(text)), LEAST_SECRET - 1, -1):
            if text.endswith(secret[:size]):
                return text[:-size] + MASK
    return text


def cause_of(error: BaseException) -> str:
    """The name of what an error comes from, such as ConnectionRefusedError. Nothing of its text: that may be anything.

    Of several addresses that failed in several ways there is only an OSError, whose text has their numbers.
    """
    for _ in range(10):
        below = error.__cause__ or error.__context__
        if below is None or isinstance(below, asyncio.CancelledError):  # a time-out is made of one
            break
        error = below
    if type(error) is OSError and (number := _ERRNO.search(str(error))):
        return f"OSError {errno.errorcode.get(int(number[1]), number[1])}"
    return type(error).__name__
