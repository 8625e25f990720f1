"""Moments to come, as people write them: after a while, or on a day."""

from __future__ import annotations

import datetime
import re
import time

import click

from cloche.store.keys import MAX_YEARS

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


def to_come(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:
    """An option's callback: seconds since 1970 for `12h` or `30d` from now on, or for `2027-01-01`, as it begins."""
    at = None if value is None else moment(value, time.time())
    if value is not None and at is None:
        raise click.BadParameter(
            f"{value!r} is neither a while, such as 12h or 30d, nor a day to come like 2027-01-01, {MAX_YEARS} years "
            "from now at most"
        )
    return at


def moment(text: str, now: float) -> float | None:
    """None if it is none, not to come, or too far away."""
    match = re.fullmatch(r"(\d{1,6})([mhdwy])", text)
    if match:
        at = now + int(match[1]) * _UNITS[match[2]]
    else:
        try:
            at = datetime.datetime.fromisoformat(text).timestamp()
        except (ValueError, OverflowError):
            return None
    return at if now < at <= now + MAX_YEARS * _UNITS["y"] else None
