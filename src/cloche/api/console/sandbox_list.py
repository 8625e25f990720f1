"""The sandboxes that a visitor may see, as rows: the live ones, and the latest ended ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

from cloche import errors
from cloche.engine.engine import Engine
from cloche.engine.operations.metrics import Sample, SandboxMeter
from cloche.engine.sandboxes.endings import KILLED_BY_OWNER
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.store.base import HOST_DIED_REASON, SHUT_DOWN_REASON, SandboxRecord

# Recent CPU and memory of a sandbox as the points of a line. Drawn by the server: no request per row.

WIDTH, HEIGHT = 72, 20
ROW_POINTS = 36  # in a row: three minutes
LONG_WIDTH, LONG_HEIGHT = 360, 64
PAGE_POINTS = 360  # on a sandbox's own page: half an hour
_HEADROOM = 1.25


class Sparkline(NamedTuple):
    points: str  # of an SVG polyline
    now: float
    most: float


class UsageSparklines(NamedTuple):
    cpu: Sparkline  # percent of what it may use
    memory: Sparkline  # bytes


def usage_sparklines(
    meter: SandboxMeter, count: int = ROW_POINTS, width: int = WIDTH, height: int = HEIGHT
) -> UsageSparklines | None:
    """None where there is no sample yet. A line of few points begins further to the right."""
    samples = meter.recent(count)
    return None if not samples else _draw_usage(samples, max(len(samples), ROW_POINTS), width, height)


def _draw_usage(samples: Sequence[Sample], count: int, width: int, height: int) -> UsageSparklines:
    cpu = [each.cpu_percent for each in samples]
    memory = [float(each.memory_bytes + each.space_bytes) for each in samples]
    step = width / max(count - 1, 1)
    return UsageSparklines(
        Sparkline(_line_points(cpu, 100.0, step, width, height), cpu[-1], max(cpu)),
        Sparkline(_line_points(memory, max(memory) * _HEADROOM, step, width, height), memory[-1], max(memory)),
    )


def _line_points(values: Sequence[float], top: float, step: float, width: int, height: int) -> str:
    """The points of a line, the newest at the right edge. One pixel stays free above and below it."""
    room, first = height - 2, width - step * (len(values) - 1)
    if len(values) == 1:
        values, first = [*values, *values], width - step
    scaled = (height - 1 - room * min(value / top, 1.0) if top else height - 1 for value in values)
    return " ".join(f"{first + step * at:.4g},{y:.3g}" for at, y in enumerate(scaled))


# Explanations for people why a sandbox ended, and of possible remedies.

_INIT_DIED = "its init died"


class EndingExplanation(NamedTuple):
    headline: str
    detail: str
    advice: str = ""


_EXPIRED = EndingExplanation(
    "Its deadline passed",
    "It lived for as long as it was given.",
    "Renew it before its deadline, or make it with on_timeout “pause”: then it is paused and keeps its files.",
)
_SHUT_DOWN = EndingExplanation(
    "The server stopped",
    "The server was shut down or restarted while it ran, and ended it.",
    "Pause a sandbox before that: one that is paused can be resumed by the next server.",
)
_HOST_DIED = EndingExplanation(
    "The server died",
    "The server's process was killed or crashed, and all that ran in it ended with it.",
    "The server's log, or the system's (out of memory?), says why.",
)
_BROKEN = EndingExplanation(
    "Its first process died",
    "The process that all others in it descend from was killed or broke: by a program in it, or for want of memory.",
    "Where that happens again, give it more memory, or look at what it runs.",
)
_KILLED_BY_OWNER = EndingExplanation("Killed by its owner", "Whoever it belongs to ended it, by a request of theirs.")


def explain_ending(record: SandboxRecord) -> EndingExplanation:
    """Explains the end of a sandbox."""
    reason = record.end_reason or HOST_DIED_REASON
    if record.state == "expired":
        return _EXPIRED
    if reason == SHUT_DOWN_REASON:
        return _SHUT_DOWN
    if record.state == "killed":
        return (
            _KILLED_BY_OWNER
            if reason == KILLED_BY_OWNER
            else EndingExplanation(_as_sentence(reason), "It was ended on purpose.")
        )
    if reason == HOST_DIED_REASON:
        return _HOST_DIED
    return _explain_lost(reason)


def _explain_lost(reason: str) -> EndingExplanation:
    if reason.startswith(_INIT_DIED):
        return _BROKEN._replace(detail=f"{_BROKEN.detail} What was seen: {reason}.")
    return EndingExplanation("It broke", f"{_as_sentence(reason)}.", "The server's log has more.")


def _as_sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


PAGE_ROWS = 100
ENDED_ROWS = 500  # that are looked through
MAX_TEXT = 200
SHOWN_PAIRS = 2  # of metadata, in a row
SHOWN_CHARACTERS = 40
STATE_FILTERS = ("live", "running", "paused", "ended")
LIVE_STATES = ("running", "paused")


class SandboxPageQuery(NamedTuple):
    """The filter and the order."""

    state: str = ""
    owner: str = ""
    template: str = ""
    text: str = ""
    sort: str = "age"
    reverse: bool = False
    page: int = 1

    def link(self, **changes: object) -> str:
        """The address of the list with these changes: its first page, unless a page is named."""
        meant = {**self._asdict(), "page": 1, **changes}
        query = {name: int(value) if value is True else value for name, value in meant.items()}
        given = {name: value for name, value in query.items() if value != SandboxPageQuery._field_defaults[name]}
        return "/ui/sandboxes" + (f"?{urlencode(given)}" if given else "")

    def sorted_by(self, name: str) -> str:
        """The address of the list in that order; reversed if that is its order now."""
        return self.link(sort=name, reverse=self.sort == name and not self.reverse)


class SandboxRow(NamedTuple):
    record: SandboxRecord
    sandbox: Sandbox | None  # of one that has a cell
    ending: EndingExplanation | None
    usage: UsageSparklines | None = None

    @property
    def state(self) -> str:
        return self.record.state if self.record.state in LIVE_STATES else "ended"

    @property
    def template(self) -> str:
        return self.record.template.partition("@")[0]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The first pairs of its metadata, cut short."""
        first = itertools.islice(self.record.spec.metadata.items(), SHOWN_PAIRS)
        return [(name[:SHOWN_CHARACTERS], value[:SHOWN_CHARACTERS]) for name, value in first]

    @property
    def processes(self) -> int | None:
        return None if self.sandbox is None else self.sandbox.meter.processes

    @property
    def deadline_at(self) -> float | None:
        """None also for one that is paused or has ended."""
        return self.record.deadline_at if self.record.state == "running" else None


class SandboxListing(NamedTuple):
    """One page of them, and the choices of the filters."""

    rows: Sequence[SandboxRow]
    total: int
    page: int
    pages: int
    counts: Mapping[str, int]  # by state, for any query
    owners: Sequence[str]
    templates: Sequence[str]

    @property
    def first(self) -> int:
        """The number of the first row, among all matches."""
        return (self.page - 1) * PAGE_ROWS + 1


def decode_sandbox_query(query: Mapping[str, str]) -> SandboxPageQuery:
    """Raises InvalidRequest for an invalid filter."""
    state, sort, page = query.get("state", ""), query.get("sort", "age"), query.get("page", "1")
    if state and state not in STATE_FILTERS:
        raise errors.InvalidRequest(
            f"there is no state {state[:50]!r}: use {', '.join(STATE_FILTERS)}, or none for all"
        )
    if sort not in _SORT_KEYS:
        raise errors.InvalidRequest(f"sandboxes cannot be sorted by {sort[:50]!r}: use {', '.join(_SORT_KEYS)}")
    if not (page.isascii() and page.isdigit() and len(page) < 6 and int(page) > 0):
        raise errors.InvalidRequest(f"{page[:50]!r} is no page: use a number from 1")
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in ("owner", "template", "text")}
    return SandboxPageQuery(state=state, sort=sort, reverse=query.get("reverse") == "1", page=int(page), **texts)


async def find_sandboxes(engine: Engine, owner: str | None, query: SandboxPageQuery) -> SandboxListing:
    """The sandboxes of that owner, or with None of all."""
    rows = await _all_rows(engine, owner)
    wanted = _sort_rows((row for row in rows if _matches_query(row, query)), query)
    pages = max(-(-len(wanted) // PAGE_ROWS), 1)
    page = min(query.page, pages)
    shown = wanted[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
    return SandboxListing(
        rows=[_with_usage(row) for row in shown],
        total=len(wanted),
        page=page,
        pages=pages,
        counts=_count_states(rows),
        owners=sorted({row.record.owner for row in rows}),
        templates=sorted({row.template for row in rows}),
    )


async def _all_rows(engine: Engine, owner: str | None) -> list[SandboxRow]:
    known = {record.id: record for record in engine.known(owner)}
    ended = [each for each in await engine.records.recent(owner, ENDED_ROWS) if each.id not in known]
    cells = {each.id: each for each in engine.live_sandboxes()}
    live = (SandboxRow(record, cells.get(record.id), None) for record in known.values())
    return [*live, *(SandboxRow(record, None, explain_ending(record)) for record in ended)]


def _with_usage(row: SandboxRow) -> SandboxRow:
    return row if row.sandbox is None else row._replace(usage=usage_sparklines(row.sandbox.meter))


def _count_states(rows: Iterable[SandboxRow]) -> dict[str, int]:
    counts = {"running": 0, "paused": 0, "ended": 0}
    for row in rows:
        counts[row.state] += 1
    return counts


def _matches_query(row: SandboxRow, query: SandboxPageQuery) -> bool:
    states = LIVE_STATES if query.state == "live" else (query.state,)
    return (
        (not query.state or row.state in states)
        and query.owner in ("", row.record.owner)
        and query.template in ("", row.template)
        and query.text.lower() in _searchable_text(row)
    )


def _searchable_text(row: SandboxRow) -> str:
    record = row.record
    pairs = (f"{name}={value}" for name, value in record.spec.metadata.items())
    said = () if row.ending is None else (row.ending.headline,)
    return "\n".join((record.id, record.owner, record.template, record.key_id, *pairs, *said)).lower()


def _latest_sample(row: SandboxRow, name: str) -> float | None:
    samples = [] if row.sandbox is None else row.sandbox.meter.recent(1)
    return float(getattr(samples[0], name)) if samples else None


# What is sorted by, the most interesting first; None comes last, whichever way.
_SORT_KEYS: dict[str, Callable[[SandboxRow], Any]] = {
    "age": lambda row: -row.record.created_at,
    "id": lambda row: row.record.id,
    "state": lambda row: row.record.state,
    "owner": lambda row: row.record.owner,
    "template": lambda row: row.record.template,
    "deadline": lambda row: row.deadline_at,
    "cpu": lambda row: _descending_key(_latest_sample(row, "cpu_percent")),
    "memory": lambda row: _descending_key(_latest_sample(row, "memory_bytes")),
    "processes": lambda row: _descending_key(row.processes),
}


def _descending_key(value: float | None) -> float | None:
    return None if value is None else -value


def _sort_rows(rows: Iterable[SandboxRow], query: SandboxPageQuery) -> list[SandboxRow]:
    """By age, live sandboxes come first: an old one that runs matters more than one that ended just now."""
    keyed = [(_SORT_KEYS[query.sort](row), row) for row in rows]
    known = sorted((each for each in keyed if each[0] is not None), key=lambda each: each[0], reverse=query.reverse)
    ordered = [row for _, row in known] + [row for value, row in keyed if value is None]
    if query.sort == "age":
        ordered.sort(key=lambda row: row.state == "ended")
    return ordered
