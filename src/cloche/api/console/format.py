"""Formats durations, sizes and times for people."""

from __future__ import annotations

from datetime import UTC, datetime

from cloche.model import KIB

_DURATION_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def duration(seconds: float) -> str:
    """The two largest units of it: 5s, 3m 20s, 2h 1m, 1d 4h."""
    parts: list[str] = []
    rest = max(int(seconds), 0)
    for unit, size in _DURATION_UNITS:
        count, rest = divmod(rest, size)
        if count or parts or unit == "s":
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])


def size(count: float) -> str:
    """Bytes: 312 B, 4.2 KiB, 37 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < KIB or unit == "GiB":
            break
        count /= KIB
    return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"


def moment(at: float) -> str:
    """2026-11-16 20:31:05 UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"


def iso(at: float) -> str:
    """For machines, as in <time datetime>."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%dT%H:%M:%SZ}"
