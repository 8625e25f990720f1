"""What happened: every operation with its time and its end, every fault with what it caused."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import cloche

EXPIRED = "Container is expired."  # so OpenAI's API says of a container that has ended by itself: with status 400


class Wrong(Exception):
    """An answer that no fault explains: not the value that was asked for, or none at all."""


class Lost(Exception):
    """A program or sandbox that ended before its time: fine where a fault has hit it."""


@dataclass(slots=True)
class Fault:
    """Something done to the server on purpose."""

    kind: str
    hurts: frozenset[str]  # kinds of errors that it explains, of operations that were going on
    victims: float  # how many operations it may still hurt
    until: float = float("inf")

    def over(self, after_seconds: float = 1.0) -> None:
        """What begins from `after_seconds` from now on cannot have been hurt by it."""
        self.until = time.monotonic() + after_seconds


class Failure(NamedTuple):
    at: float
    operation: str
    what: str


class Book:
    def __init__(self) -> None:
        self.began = time.monotonic()
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.hit: dict[str, Counter[str]] = defaultdict(Counter)  # operation -> fault -> how often
        self.refused: Counter[str] = Counter()
        self.failures: list[Failure] = []
        self.faults: list[Fault] = []
        self.caused: Counter[str] = Counter()

    def fault(self, kind: str, *hurts: str, victims: float = float("inf")) -> Fault:
        """It begins now, and goes on until its `over`."""
        fault = Fault(kind, frozenset(hurts), victims)
        self.faults.append(fault)
        return fault

    def did(self, operation: str, began: float) -> None:
        self.seconds[operation].append(time.monotonic() - began)

    def failed(self, operation: str, began: float, error: BaseException) -> None:
        """Explains it by a fault, or keeps it as a failure of the whole run."""
        kind = kind_of(error)
        if kind == "refused":
            self.refused[operation] += 1
            return
        fault = self._explains(kind, began)
        if fault is not None:
            self.hit[operation][fault.kind] += 1
            self.caused[fault.kind] += 1
            return
        text = f"{kind}: {type(error).__name__}: {error}"
        self.failures.append(Failure(time.monotonic() - self.began, operation, text[:500]))

    def _explains(self, kind: str, began: float) -> Fault | None:
        for fault in self.faults:
            if kind in fault.hurts and fault.victims > 0 and began < fault.until:
                fault.victims -= 1
                return fault
        return None


def kind_of(error: BaseException) -> str:
    """One of refused, gone, unreachable, unavailable, hang, wrong, other."""
    if isinstance(error, Wrong):
        return "wrong"
    if isinstance(error, Lost):
        return "gone"
    if isinstance(error, TimeoutError):
        return "hang"
    if isinstance(error, cloche.ClocheError):
        return _kind_of_ours(error)
    return _kind_of_theirs(error)


def _kind_of_ours(error: cloche.ClocheError) -> str:
    if isinstance(error, cloche.errors.Busy | cloche.errors.QuotaExceeded):
        return "refused"
    if isinstance(error, cloche.errors.Gone | cloche.errors.NotFound):
        return "gone"
    if isinstance(error, cloche.errors.Unavailable):
        text = str(error)
        return "unreachable" if "no answer from" in text or "was lost" in text else "unavailable"
    return "other"


def _kind_of_theirs(error: BaseException) -> str:
    """By name and status: E2B's, OpenAI's and httpx's clients each have errors of their own."""
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    names = {each.__name__ for each in type(error).__mro__}
    if status == 429 or "RateLimitException" in names:
        return "refused"
    if status in (404, 410) or names & {"NotFoundException", "SandboxNotFoundException", "TimeoutException"}:
        return "gone"
    if status == 400 and EXPIRED in str(error):
        return "gone"
    if status == 503:
        return "refused" if "retry-after" in getattr(getattr(error, "response", None), "headers", {}) else "unavailable"
    if names & {"APIConnectionError", "TransportError", "ConnectionError", "OSError", "RemoteProtocolError"}:
        return "unreachable"
    return "other"
