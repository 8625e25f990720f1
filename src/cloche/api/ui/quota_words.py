"""Quotas and what is used of them, for people."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cloche.api.ui import words
from cloche.config.sections import KeyQuota

NEARLY = 0.8  # of a quota


class Kind(NamedTuple):
    name: str  # as the API has it
    title: str
    short: str  # behind a number
    say: Callable[[float], str]
    hint: str


def _count(amount: float) -> str:
    return f"{amount:,.15g}"


def _lifetime(amount: float) -> str:
    return words.duration(amount) if amount >= 1 else f"{amount:g}s"


KINDS = (
    Kind("sandboxes", "Sandboxes at once", "sandboxes", _count, "those that run, or are paused with their memory"),
    Kind("executions_per_minute", "Executions per minute", "executions/min", _count, "of code, and starts of commands"),
    Kind("cpu_seconds_per_hour", "CPU seconds per hour", "CPU s/hour", _count, "of all programs in sandboxes"),
    Kind("memory_bytes", "Memory", "memory", words.size, "of all sandboxes together, by their limits; such as 8GiB"),
    Kind("stored_bytes", "Stored", "stored", words.size, "snapshots, volumes, files and so on; such as 10GiB"),
    Kind(
        "lifetime_seconds", "Lifetime of a sandbox, in seconds", "lifetime", _lifetime, "from its creation or resuming"
    ),
)


class Meter(NamedTuple):
    """How much of something is used."""

    title: str
    used: str
    most: str  # empty where there is no limit
    value: str  # from 0 to 1
    tone: str  # good, warn (nearly all) or bad (all of it)
    alarm: str  # the same in words; empty where all is well


def meter(title: str, used: float, most: float | None, say: Callable[[float], str]) -> Meter:
    if most is None:
        return Meter(title, say(used), "", "0", "good", "")
    part = used / most if most else 1.0
    tone, alarm = ("bad", "used up") if part >= 1 else ("warn", "nearly used up") if part >= NEARLY else ("good", "")
    return Meter(title, say(used), say(most), f"{min(part, 1.0):.3f}", tone, alarm)


def limits_of(quota: KeyQuota) -> list[str]:
    """What is limited: "20 sandboxes", "10 GiB stored"."""
    amounts = ((kind, getattr(quota, kind.name, None)) for kind in KINDS)
    return [f"{kind.say(amount)} {kind.short}" for kind, amount in amounts if amount is not None]
