"""The sandboxes that a visitor may see, as rows: those that live, and those that ended last."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.operations.metrics import Meter, Sample
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.store.base import HOST_DIED, SHUT_DOWN, SandboxRecord

# What a sandbox used in the last minutes, as the points of a line. Drawn by the server: no request per row.

WIDTH, HEIGHT = 72, 20
POINTS = 36  # in a row: three minutes
LONG_WIDTH, LONG_HEIGHT = 360, 64
LONG_POINTS = 360  # on a sandbox's own page: half an hour
_HEADROOM = 1.25


class Line(NamedTuple):
    points: str  # of an SVG polyline
    now: float
    most: float


class Usage(NamedTuple):
    cpu: Line  # percent of what it may use
    memory: Line  # bytes


def usage_of(meter: Meter, count: int = POINTS, width: int = WIDTH, height: int = HEIGHT) -> Usage | None:
    """None of one that is so young that nobody has looked yet. A line of few points begins further to the right."""
    samples = meter.recent(count)
    return None if not samples else _usage(samples, max(len(samples), POINTS), width, height)


def _usage(samples: Sequence[Sample], count: int, width: int, height: int) -> Usage:
    cpu = [each.cpu_percent for each in samples]
    memory = [float(each.memory_bytes + each.space_bytes) for each in samples]
    step = width / max(count - 1, 1)
    return Usage(
        Line(_points(cpu, 100.0, step, width, height), cpu[-1], max(cpu)),
        Line(_points(memory, max(memory) * _HEADROOM, step, width, height), memory[-1], max(memory)),
    )


def _points(values: Sequence[float], top: float, step: float, width: int, height: int) -> str:
    """The newest at the right edge. A line on the ground is a line, too: one pixel stays below it and above."""
    room, first = height - 2, width - step * (len(values) - 1)
    if len(values) == 1:
        values, first = [*values, *values], width - step
    scaled = (height - 1 - room * min(value / top, 1.0) if top else height - 1 for value in values)
    return " ".join(f"{first + step * at:.4g},{y:.3g}" for at, y in enumerate(scaled))


# Why a sandbox ended, for people: what happened, what it means, and what to do about it.

_INIT_DIED = "its init died"


class Ending(NamedTuple):
    headline: str
    detail: str
    advice: str = ""


_EXPIRED = Ending(
    "Its deadline passed",
    "It lived for as long as it was given.",
    "Renew it before its deadline, or make it with on_timeout “pause”: then it is paused and keeps its files.",
)
_SHUT_DOWN = Ending(
    "The server stopped",
    "The server was shut down or restarted while it ran, and ended it.",
    "Pause a sandbox before that: one that is paused can be resumed by the next server.",
)
_HOST_DIED = Ending(
    "The server died",
    "The server's process was killed or crashed, and all that ran in it ended with it.",
    "The server's log, or the system's (out of memory?), says why.",
)
_BROKEN = Ending(
    "Its first process died",
    "The process that all others in it descend from was killed or broke: by a program in it, or for want of memory.",
    "Where that happens again, give it more memory, or look at what it runs.",
)
_BY_OWNER = Ending("Killed by its owner", "Whoever it belongs to ended it, by a request of theirs.")


def why(record: SandboxRecord) -> Ending:
    """Of one that has ended."""
    reason = record.end_reason or HOST_DIED
    if record.state == "expired":
        return _EXPIRED
    if reason == SHUT_DOWN:
        return _SHUT_DOWN
    if record.state == "killed":
        return _BY_OWNER if reason == KILLED_BY_OWNER else Ending(_sentence(reason), "It was ended on purpose.")
    if reason == HOST_DIED:
        return _HOST_DIED
    return _lost(reason)


def _lost(reason: str) -> Ending:
    if reason.startswith(_INIT_DIED):
        return _BROKEN._replace(detail=f"{_BROKEN.detail} What was seen: {reason}.")
    return Ending("It broke", f"{_sentence(reason)}.", "The server's log has more.")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


PAGE_ROWS = 100
ENDED_ROWS = 500  # that are looked through
MAX_TEXT = 200
SHOWN_PAIRS = 2  # of metadata, in a row
SHOWN_CHARACTERS = 40
STATES = ("live", "running", "paused", "ended")
LIVE = ("running", "paused")


class Asked(NamedTuple):
    """Which of them, and in which order."""

    state: str = ""
    owner: str = ""
    template: str = ""
    text: str = ""
    sort: str = "age"
    reverse: bool = False
    page: int = 1

    def link(self, **changes: object) -> str:
        """The address of the list with something else asked for: from its first page on, unless that is named."""
        meant = {**self._asdict(), "page": 1, **changes}
        query = {name: int(value) if value is True else value for name, value in meant.items()}
        given = {name: value for name, value in query.items() if value != Asked._field_defaults[name]}
        return "/ui/sandboxes" + (f"?{urlencode(given)}" if given else "")

    def sorted_by(self, name: str) -> str:
        """The address of the list in that order; in the other direction if that is its order now."""
        return self.link(sort=name, reverse=self.sort == name and not self.reverse)


class Row(NamedTuple):
    record: SandboxRecord
    sandbox: Sandbox | None  # of one that has a cell
    ending: Ending | None
    usage: Usage | None = None

    @property
    def state(self) -> str:
        return self.record.state if self.record.state in LIVE else "ended"

    @property
    def template(self) -> str:
        return self.record.template.partition("@")[0]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The first of its metadata, cut short."""
        first = itertools.islice(self.record.metadata.items(), SHOWN_PAIRS)
        return [(name[:SHOWN_CHARACTERS], value[:SHOWN_CHARACTERS]) for name, value in first]

    @property
    def processes(self) -> int | None:
        return None if self.sandbox is None else self.sandbox.meter.processes

    @property
    def deadline_at(self) -> float | None:
        """None also where it stands still, or has passed."""
        return self.record.deadline_at if self.record.state == "running" else None


class Found(NamedTuple):
    """One page of them, and what can be chosen from."""

    rows: Sequence[Row]
    total: int
    page: int
    pages: int
    counts: Mapping[str, int]  # by state, whatever was asked for
    owners: Sequence[str]
    templates: Sequence[str]

    @property
    def first(self) -> int:
        """The number of the first row, among all that were found."""
        return (self.page - 1) * PAGE_ROWS + 1


def asked_of(query: Mapping[str, str]) -> Asked:
    """Raises InvalidRequest for what cannot be asked for."""
    state, sort, page = query.get("state", ""), query.get("sort", "age"), query.get("page", "1")
    if state and state not in STATES:
        raise errors.InvalidRequest(f"there is no state {state[:50]!r}: use {', '.join(STATES)}, or none for all")
    if sort not in _KEYS:
        raise errors.InvalidRequest(f"sandboxes cannot be sorted by {sort[:50]!r}: use {', '.join(_KEYS)}")
    if not (page.isascii() and page.isdigit() and len(page) < 6 and int(page) > 0):
        raise errors.InvalidRequest(f"{page[:50]!r} is no page: use a number from 1")
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("owner", "template", "text")}
    return Asked(state=state, sort=sort, reverse=query.get("reverse") == "1", page=int(page), **texts)


async def found(engine: Engine, owner: str | None, asked: Asked) -> Found:
    """Those of that owner, or with None of all."""
    rows = await _all_rows(engine, owner)
    wanted = _sorted((row for row in rows if _is_wanted(row, asked)), asked)
    pages = max(-(-len(wanted) // PAGE_ROWS), 1)
    page = min(asked.page, pages)
    shown = wanted[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    return Found(
        rows=[_with_usage(row) for row in shown],
        total=len(wanted),
        page=page,
        pages=pages,
        counts=_counts(rows),
        owners=sorted({row.record.owner for row in rows}),
        templates=sorted({row.template for row in rows}),
    )


async def _all_rows(engine: Engine, owner: str | None) -> list[Row]:
    known = {record.id: record for record in engine.known(owner)}
    ended = [each for each in await engine.records.recent(owner, ENDED_ROWS) if each.id not in known]
    cells = {each.id: each for each in engine.living()}
    live = (Row(record, cells.get(record.id), None) for record in known.values())
    return [*live, *(Row(record, None, why(record)) for record in ended)]


def _with_usage(row: Row) -> Row:
    return row if row.sandbox is None else row._replace(usage=usage_of(row.sandbox.meter))


def _counts(rows: Iterable[Row]) -> dict[str, int]:
    counts = {"running": 0, "paused": 0, "ended": 0}
    for row in rows:
        counts[row.state] += 1
    return counts


def _is_wanted(row: Row, asked: Asked) -> bool:
    states = LIVE if asked.state == "live" else (asked.state,)
    return (
        (not asked.state or row.state in states)
        and asked.owner in ("", row.record.owner)
        and asked.template in ("", row.template)
        and asked.text.lower() in _text_of(row)
    )


def _text_of(row: Row) -> str:
    record = row.record
    pairs = (f"{name}={value}" for name, value in record.metadata.items())
    said = () if row.ending is None else (row.ending.headline,)
    return "\n".join((record.id, record.owner, record.template, record.key_id, *pairs, *said)).lower()


def _latest(row: Row, name: str) -> float | None:
    samples = [] if row.sandbox is None else row.sandbox.meter.recent(1)
    return float(getattr(samples[0], name)) if samples else None


# What is sorted by, the most interesting first; None comes last, whichever way.
_KEYS: dict[str, Callable[[Row], Any]] = {
    "age": lambda row: -row.record.created_at,
    "id": lambda row: row.record.id,
    "state": lambda row: row.record.state,
    "owner": lambda row: row.record.owner,
    "template": lambda row: row.record.template,
    "deadline": lambda row: row.deadline_at,
    "cpu": lambda row: _negative(_latest(row, "cpu_percent")),
    "memory": lambda row: _negative(_latest(row, "memory_bytes")),
    "processes": lambda row: _negative(row.processes),
}


def _negative(value: float | None) -> float | None:
    return None if value is None else -value


def _sorted(rows: Iterable[Row], asked: Asked) -> list[Row]:
    """By age, those that live come first: an old one that runs is of more interest than one that ended just now."""
    keyed = [(_KEYS[asked.sort](row), row) for row in rows]
    known = sorted((each for each in keyed if each[0] is not None), key=lambda each: each[0], reverse=asked.reverse)
    ordered = [row for _, row in known] + [row for value, row in keyed if value is None]
    if asked.sort == "age":
        ordered.sort(key=lambda row: row.state == "ended")
    return ordered
