"""The wall clock set forward and back, by hours: sandboxes live as long as they were given, and nothing is removed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conftest import RunningServer, wait_until
from tests.faults.conftest import Neighbour, serving_by

import cloche
from cloche.store.retention_clock import BELIEVED_SECONDS, RetentionClock

HOUR = 3600.0
SHIFTED = """
import os, sys, time
real, shift = time.time, os.environ["SHIFT"]
def shifted():
    with open(shift) as file:
        return real() + float(file.read() or 0)
time.time = shifted
from cloche.cli import main
sys.argv[0] = "cloche"
main()
"""


@pytest.fixture(scope="module")
def shift(tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], None]:
    """Sets the wall clock of that server so many seconds away from ours."""
    file = tmp_path_factory.mktemp("clock") / "shift"
    file.write_text("0")

    def to(seconds: float) -> None:
        draft = file.with_suffix(".draft")
        draft.write_text(str(seconds))
        draft.rename(file)

    to.file = file  # type: ignore[attr-defined]
    return to


@pytest.fixture(scope="module")
def shifted(place: Path, shift) -> Iterator[RunningServer]:
    with serving_by([sys.executable, "-c", SHIFTED], place, SHIFT=str(shift.file), CLOCHE_POOL_READY="0") as server:
        yield server


def left_seconds(box: cloche.Sandbox, shifted_by: float) -> float:
    """What a client is told, by the server's clock."""
    deadline_at = box.info().deadline_at
    assert deadline_at is not None
    return deadline_at - time.time() - shifted_by


@pytest.mark.long
@pytest.mark.parametrize("hours", [30.0, -30.0], ids=["forward", "back"])
def test_a_clock_set_by_hours_moves_no_deadline(shifted: RunningServer, shift, hours: float):
    """More than the longest lifetime: neither are sandboxes over at once, nor do they live for ever."""
    mine = {"url": shifted.url, "api_key": shifted.key}
    shift(0)
    neighbour = Neighbour(shifted)
    long, short, resting = [cloche.Sandbox(timeout=seconds, **mine) for seconds in (600, 4, 600)]
    resting.pause()
    shift(hours * HOUR)
    wait_until(lambda: 0 < left_seconds(long, hours * HOUR) <= 600)
    assert long.run("6 * 7").text == "42"
    long.renew(900)
    assert 600 < left_seconds(long, hours * HOUR) <= 900
    with cloche.Sandbox(timeout=600, **mine) as new:
        assert new.run("6 * 7").text == "42"
    with cloche.Sandbox(timeout=1, **mine) as brief:
        wait_until(lambda: has_expired(brief))
    wait_until(lambda: has_expired(short), 30)
    assert not has_expired(long)
    resting.resume()
    assert resting.run("6 * 7").text == "42"
    neighbour.assert_unharmed()
    shift(0)
    wait_until(lambda: 0 < left_seconds(long, 0) <= 900)
    neighbour.close()
    for box in (long, resting):
        box.close()


def has_expired(box: cloche.Sandbox) -> bool:
    try:
        box.run("1")
    except cloche.errors.SandboxExpired:
        return True
    return False


class Clocks:
    """Of a process that has run for so long, on a machine whose wall clock says that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.passed, self.wall = 1000.0, 1_800_000_000.0
        monkeypatch.setattr("cloche.store.retention_clock._passed", lambda: self.passed)
        monkeypatch.setattr("cloche.store.retention_clock.time.time", lambda: self.wall)

    def go_on(self, seconds: float) -> None:
        self.passed += seconds
        self.wall += seconds


def test_nothing_ages_because_the_clock_was_set(monkeypatch):
    clocks = Clocks(monkeypatch)
    past, began = RetentionClock(), clocks.wall
    clocks.go_on(HOUR)
    assert past.now() == began + HOUR
    clocks.wall += 365 * 24 * HOUR  # a mistake
    assert past.now() == began + HOUR
    clocks.go_on(HOUR)
    assert past.now() == began + 2 * HOUR
    clocks.wall -= 365 * 24 * HOUR  # noticed
    assert past.now() == began + 2 * HOUR == clocks.wall


def test_a_clock_that_was_set_forward_for_good_is_believed_after_a_day(monkeypatch):
    clocks = Clocks(monkeypatch)
    past = RetentionClock()
    clocks.wall += 20 * 365 * 24 * HOUR  # a machine without a battery, which has heard the time
    assert past.now() < clocks.wall
    clocks.go_on(BELIEVED_SECONDS + 1)
    assert past.now() == clocks.wall
    clocks.go_on(HOUR)
    assert past.now() == clocks.wall


def test_a_clock_that_was_set_back_is_believed_at_once_and_small_steps_are_drift(monkeypatch):
    clocks = Clocks(monkeypatch)
    past = RetentionClock()
    clocks.wall -= HOUR
    assert past.now() == clocks.wall
    for _ in range(100):
        clocks.go_on(60)
        clocks.wall += 59
        past.now()
    clocks.wall += HOUR
    assert past.now() <= clocks.wall
