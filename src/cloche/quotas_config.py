"""How much one owner, and one key, may use where nobody said otherwise. None is as much as the host has."""

from __future__ import annotations

import msgspec

from cloche import errors
from cloche.structs import Struct


def check_amount(name: str, amount: float | None) -> None:
    """Raises InvalidRequest unless it is None, or a number that can be a quota."""
    if amount is None:
        return
    if not 0 <= amount < float("inf"):
        raise errors.InvalidRequest(f"the quota {name} must be a number, 0 or more, not {amount}")
    if name == "lifetime_seconds" and amount < 1:
        raise errors.InvalidRequest(f"the quota {name} must be 1 or more, not {amount}")


class KeyQuota(Struct):
    """What one key may use: at most as much as its owner."""

    sandboxes: int | None = None  # that have a cell: those that run, and those that are paused with their memory
    executions_per_minute: int | None = None  # of code, and starts of commands and terminals
    cpu_seconds_per_hour: float | None = None  # of all programs in sandboxes, also in the background
    memory_bytes: int | None = None  # that the sandboxes which have a cell may use, by their limits
    lifetime_seconds: float | None = None  # of each sandbox

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_amount(name, getattr(self, name))


class Quota(KeyQuota):
    """What one owner may use, with all keys together."""

    stored_bytes: int | None = None  # of all that outlasts sandboxes


class QuotaDefaults(Struct):
    owner: Quota = Quota()
    key: KeyQuota = KeyQuota()


NAMES = Quota.__struct_fields__
"""Of all quotas."""


class Override(Struct, omit_defaults=True, forbid_unknown_fields=True):
    """What an owner or a key may use instead: a number, or None for as much as the host has. Unset is the default."""

    sandboxes: int | msgspec.UnsetType | None = msgspec.UNSET
    executions_per_minute: int | msgspec.UnsetType | None = msgspec.UNSET
    cpu_seconds_per_hour: float | msgspec.UnsetType | None = msgspec.UNSET
    memory_bytes: int | msgspec.UnsetType | None = msgspec.UNSET
    lifetime_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    stored_bytes: int | msgspec.UnsetType | None = msgspec.UNSET

    def __post_init__(self) -> None:
        for name, amount in self.given().items():
            check_amount(name, amount)

    def given(self) -> dict[str, float | None]:
        """Those that are set."""
        found = {name: getattr(self, name) for name in NAMES}
        return {name: amount for name, amount in found.items() if amount is not msgspec.UNSET}

    def __str__(self) -> str:
        """As the logs say it."""
        given = {name: "unlimited" if amount is None else f"{amount:.15g}" for name, amount in self.given().items()}
        return " ".join(f"{name}={amount}" for name, amount in given.items()) or "default"

    def over(self, default: KeyQuota) -> Quota:
        """What holds in the end."""
        return Quota(**{**msgspec.structs.asdict(default), **self.given()})
