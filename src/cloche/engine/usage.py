"""What is told of how much owners and keys use."""

from __future__ import annotations

import time
from typing import Any

from cloche.config.sections import KeyQuota, Quota
from cloche.engine.account import Account
from cloche.model import Struct
from cloche.store.quotas import Spent


class Amounts(Struct):
    sandboxes: int  # that have a cell now
    memory_bytes: int  # that those may use, by their limits
    executions_last_minute: int
    executions: int  # in all
    cpu_seconds_last_hour: float
    cpu_seconds: float  # in all


class KeyUsage(Amounts):
    key_id: str
    name: str
    quota: KeyQuota  # None is as much as there is


class OwnerUsage(Amounts):
    owner: str
    stored_bytes: int
    stored: dict[str, int]  # the same by kind
    quota: Quota
    keys: list[KeyUsage]


def amounts_of(account: Account, hour: Spent, in_all: Spent) -> dict[str, Any]:
    """`hour`, `in_all`: by all processes of the data directory, in the last hour and since the beginning."""
    now = time.monotonic()
    return {
        "sandboxes": account.sandboxes,
        "memory_bytes": account.memory_bytes,
        "executions_last_minute": round(account.minute.sum(now)),
        "executions": in_all.executions,
        "cpu_seconds_last_hour": round(hour.cpu_seconds, 3),
        "cpu_seconds": round(in_all.cpu_seconds, 3),
    }
