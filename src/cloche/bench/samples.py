"""Measured values, nothing trimmed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty

from cloche import errors

QUANTILES = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class WrongAnswer(Exception):
    """The measured program gave a wrong result: its time means nothing."""


FAILURES = (errors.ClocheError, WrongAnswer, Empty, TimeoutError, RuntimeError, OSError)


class Samples:
    """The values of one row, and why attempts failed."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.failures: list[str] = []

    def quantile(self, share: float) -> float:
        """The smallest value that is not below `share` of all values (nearest rank)."""
        ordered = sorted(self.values)
        return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

    @property
    def p50(self) -> float:
        return self.quantile(0.5)


class SampleBook:
    """The samples of all rows, by their keys."""

    def __init__(self) -> None:
        self.rows: dict[str, Samples] = {}

    def __getitem__(self, key: str) -> Samples:
        return self.rows.setdefault(key, Samples())

    def __contains__(self, key: str) -> bool:
        """Whether something of that row was measured."""
        return key in self.rows and bool(self.rows[key].values)

    def add(self, key: str, value: float) -> None:
        self[key].values.append(value)

    @contextmanager
    def attempt(self, *keys: str) -> Iterator[None]:
        """Counts an error within the block as a failed attempt of each of those rows; the run goes on."""
        try:
            yield
        except FAILURES as error:
            self._record_failure(keys, error)
        except ExceptionGroup as group:  # of a client with tasks of its own, as MCP's official one
            failed, others = group.split(FAILURES)
            if failed is None or others is not None:
                raise
            self._record_failure(keys, _innermost_error(failed))

    def _record_failure(self, keys: Sequence[str], error: Exception) -> None:
        for key in keys:
            self[key].failures.append(f"{type(error).__name__}: {error}")


def _innermost_error(error: Exception) -> Exception:
    return _innermost_error(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error


def expect_answer(condition: bool, found: object) -> None:
    """Raises WrongAnswer."""
    if not condition:
        raise WrongAnswer(f"a wrong answer: {found!r:.200}")


def split_evenly(total: int, parts: int) -> Iterator[int]:
    """Splits `total` into `parts` nearly equal numbers, so that two series can take turns."""
    for part in range(parts):
        yield total * (part + 1) // parts - total * part // parts
