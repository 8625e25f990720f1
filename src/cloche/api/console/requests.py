"""`/ui/requests`: what requests to the gateway did, a line each, and one of them as a tree with a waterfall."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.admin_requests import UNFINISHED, line_of, trees
from cloche.api.console import format
from cloche.api.console.context import House, Page, Visitor, is_partial
from cloche.store.gateway import Page as Wanted
from cloche.store.gateway import Step

# How a request for a model's answer, or a step of it, ended: in plain words.

Tone = Literal["ok", "quiet", "warn", "bad"]


class Outcome(NamedTuple):
    code: str
    tone: Tone
    label: str
    meaning: str  # a sentence; empty where nothing is to be said


_KNOWN: dict[str, tuple[Tone, str, str]] = {
    "ok": ("ok", "ok", ""),
    UNFINISHED: ("quiet", "under way", "It goes on, or its server died before it had ended."),
    "left": ("quiet", "left", "The client stopped waiting before the answer was whole."),
    "cancelled": ("quiet", "cancelled", "Somebody cancelled the response while it was being made."),
    "interrupted": ("quiet", "interrupted", "The code was interrupted while it ran."),
    "raised": ("warn", "raised", "The code raised an exception. The model was shown it and could go on."),
    "incomplete": ("warn", "incomplete", "The model stopped before its answer was whole."),
    "timed_out": ("bad", "timed out", "The code ran for longer than one call may (gateway.execution_seconds)."),
    "out_of_memory": ("bad", "out of memory", "The code used more memory than its container has."),
    "died": ("bad", "died", "The program that ran the code died: a crash, or somebody killed it."),
    "failed": ("bad", "failed", "The model's server said that it failed."),
    "upstream_failed": ("bad", "upstream failed", "The model's server refused, failed or broke off."),
    "model_not_found": ("bad", "no such model", "No upstream in the configuration has a model of that name."),
    "quota_exceeded": ("bad", "over quota", "The owner or the key has used as much as they may."),
    "busy": ("bad", "busy", "As much ran as this host can have at once."),
    "unavailable": ("bad", "unavailable", "This host could not do it at that time."),
    "not_found": ("bad", "not found", "Something that the request named is not there, or not its owner's."),
    "invalid_request": ("bad", "invalid", "The request asked for something that makes no sense."),
    "internal_error": ("bad", "internal error", "A fault of Cloche's. The server's log has it under the request's id."),
    "no_space": ("bad", "no space", "The container's writable space is full."),
    "sandbox_expired": ("bad", "container expired", "The container's time ran out."),
    "sandbox_killed": ("bad", "container killed", "Somebody ended the container."),
    "sandbox_lost": ("bad", "container lost", "The container broke, or the server that had it died."),
    "shutting_down": ("bad", "shutting down", "The server was being stopped."),
}

FILTERS = ("ok", "!ok", "left", "cancelled", "incomplete", "upstream_failed", "model_not_found", "quota_exceeded")
"""What can be chosen of requests; `!ok` is all that did not end well."""

_REASONS = {
    "max_output_tokens": "It reached the number of output tokens that it was allowed.",
    "content_filter": "The model's server filtered its content.",
}
_STATUSES = {
    400: "It did not understand the request.",
    401: "It did not accept the gateway's key: see api_key of the upstream in the configuration.",
    403: "It did not allow this with the gateway's key.",
    404: "It knows no such model or path: see base_url of the upstream in the configuration.",
    429: "It was asked too often, or its credit is used up.",
}


def outcome_of(code: str, fields: Mapping[str, Any]) -> Outcome:
    """`fields` are those of the record: what a model's server said is among them."""
    tone, label, meaning = _KNOWN.get(code) or ("bad", code.replace("_", " "), "")
    return Outcome(code, tone, label, " ".join(filter(None, (meaning, *_why(code, fields)))))


def label_of(code: str) -> str:
    return "not ok" if code == "!ok" else outcome_of(code, {}).label


def _why(code: str, fields: Mapping[str, Any]) -> list[str]:
    """What the model's server said, of its status and its word for it."""
    status, word = fields.get("upstream_status"), fields.get("error")
    if code == "ok" or (status in (None, 200) and not word):
        return []
    if code == "incomplete":
        return [_REASONS.get(str(word), f"The reason it gave: {word}.")] if word else []
    said = [f"Its status was {status}."] if status not in (None, 200) else []
    if isinstance(status, int):
        said.append(_STATUSES.get(status, "It failed: try again, or ask its operator." if status >= 500 else ""))
    return [*said, f"Its word for it: {word}."] if word else said


# A request and what it did, as rows of a waterfall: what led to what, and when.

CONTAINER = "cntr_"  # before a sandbox's id, as OpenAI's clients know it
MIN_WIDTH = 0.4  # percent: what took no time is seen, too
MAX_SHOWN = 32_768  # characters of what was captured

_HOW = {
    "created": "made for this request",
    "reused": "one that was there already",
    "replaced": "made in the place of one that was gone",
}
_NAMES = {"request": "Request", "container": "Container", "execution": "Code"}
_TEXTS = {"prompt": "What the model was asked", "code": "Code", "output": "Output"}


class Bar(NamedTuple):
    """Where it is drawn, in percent of the whole request."""

    start: str
    width: str
    first: str  # until its first word came; empty where nobody knows


class Text(NamedTuple):
    """Something that was captured. Shown as text, whatever it is."""

    name: str
    title: str
    text: str
    cut: int  # characters that are not shown


class Row(NamedTuple):
    record: str
    kind: str
    name: str
    depth: int  # 0: the request, 1: what it did, 2: what a model's answer led to
    last: bool  # of those below the same
    goes_on: bool  # whether below it comes another step of the request itself
    begins: str
    took: str
    bar: Bar
    tokens: str
    cached: str  # of those
    outcome: Outcome
    notes: tuple[str, ...]
    sandbox: str  # the id of the one that it is about; empty where there is none
    texts: tuple[Text, ...]


class Tree(NamedTuple):
    id: str
    record: str
    owner: str
    at: str
    moment: str
    model: str
    outcome: Outcome
    took: str
    tokens: str
    calls: int
    executions: int
    sandboxes: tuple[str, ...]
    response: str
    completion: str
    unfinished: bool
    captured: bool
    rows: tuple[Row, ...]


def took(seconds: float) -> str:
    """12.3 ms, 1.40 s, 2m 5s."""
    if seconds >= 60:
        return format.duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def tokens(fields: Mapping[str, Any]) -> str:
    """1,520 in, 231 out. Empty where nobody counted."""
    if "input_tokens" not in fields:
        return ""
    return f"{fields['input_tokens']:,} in, {fields.get('output_tokens', 0):,} out"


def cached(fields: Mapping[str, Any]) -> str:
    """What of the input the model's server had at hand: 1,024 cached. Empty where that is nothing."""
    return f"{fields['cached_tokens']:,} cached" if fields.get("cached_tokens") else ""


def href(id: str) -> str:
    """Where a request's page is. A client may have chosen the id, so nothing in it may be a path of its own."""
    return f"/ui/requests/{quote(id, safe='')}"


def sandbox_of(container: object) -> str:
    return str(container or "").removeprefix(CONTAINER)


def tree_of(told: Mapping[str, Any]) -> Tree:
    """From what `/admin/requests/{id}` tells of one request."""
    steps = told["steps"]
    whole = max([float(told["seconds"]), *(each["offset_seconds"] + each["seconds"] for each in steps)], default=0.0)
    rows = (_root(told), *_rows(steps, whole or 1e-9))
    return Tree(
        id=told["id"],
        record=told["record"],
        owner=told["owner"],
        at=format.iso(told["at"]),
        moment=format.moment(told["at"]),
        model=str(told.get("model") or next((each["model"] for each in steps if each.get("model")), "")),
        outcome=outcome_of(told["outcome"], told),
        took=took(told["seconds"]),
        tokens=", ".join(filter(None, (tokens(told), cached(told)))),
        calls=int(told.get("model_calls", 0)),
        executions=int(told.get("executions", 0)),
        sandboxes=tuple(sandbox_of(each) for each in told.get("containers", ())),
        response=str(told.get("response", "")),
        completion=str(told.get("completion", "")),
        unfinished=told["outcome"] == UNFINISHED,
        captured=any(row.texts for row in rows),
        rows=rows,
    )


def _root(told: Mapping[str, Any]) -> Row:
    return _row({**told, "kind": "request", "offset_seconds": 0.0}, max(float(told["seconds"]), 1e-9), 0, last=True)


def _rows(steps: list[dict[str, Any]], whole: float) -> Iterator[Row]:
    """In the order in which they began. What came after a model's call, and is none, is what that led to."""
    depths = [
        1 if each["kind"] == "model_call" or not _follows_a_call(steps[:at]) else 2 for at, each in enumerate(steps)
    ]
    for at, step in enumerate(steps):
        yield _row(step, whole, depths[at], last=_is_last(depths, at), goes_on=1 in depths[at + 1 :])


def _follows_a_call(before: list[dict[str, Any]]) -> bool:
    return any(each["kind"] == "model_call" for each in before)


def _is_last(depths: list[int], at: int) -> bool:
    for depth in depths[at + 1 :]:
        if depth <= depths[at]:
            return depth < depths[at]
    return True


def _row(step: Mapping[str, Any], whole: float, depth: int, *, last: bool, goes_on: bool = False) -> Row:
    outcome = outcome_of(step["outcome"], step)
    return Row(
        record=step["record"],
        kind=step["kind"],
        name=_name(step),
        depth=depth,
        last=last,
        goes_on=goes_on,
        begins=took(step["offset_seconds"]),
        took=took(step["seconds"]),
        bar=_bar(step, whole),
        tokens=tokens(step),
        cached=cached(step),
        outcome=outcome,
        notes=tuple(filter(None, (*_notes(step), outcome.meaning))),
        sandbox=sandbox_of(step.get("container")),
        texts=tuple(_texts(step.get("captured") or {})),
    )


def _name(step: Mapping[str, Any]) -> str:
    kind = step["kind"]
    if kind == "model_call":
        after = int(step.get("leg", 1)) - 1
        return "Model call" if not after else "Follow-up call" if after == 1 else f"Follow-up call {after}"
    return _NAMES.get(kind, str(kind))


def _bar(step: Mapping[str, Any], whole: float) -> Bar:
    begins = min(step["offset_seconds"] / whole * 100, 100 - MIN_WIDTH)
    width = min(max(step["seconds"] / whole * 100, MIN_WIDTH), 100 - begins)
    first = min(step["first_seconds"] / whole * 100, width) if "first_seconds" in step else None
    return Bar(f"{begins:.2f}", f"{width:.2f}", "" if first is None else f"{first:.2f}")


def _notes(step: Mapping[str, Any]) -> Iterator[str]:
    if step["kind"] == "model_call":
        yield str(step.get("model", ""))
        yield f"first word after {took(step['first_seconds'])}" if "first_seconds" in step else ""
    yield _HOW.get(step.get("how", ""), "")
    if "cpu_seconds" in step:
        yield f"CPU {took(step['cpu_seconds'])}, memory {format.size(step.get('memory_peak_bytes', 0))}"


def _texts(captured: Mapping[str, Any]) -> Iterator[Text]:
    for name in sorted(captured, key=lambda each: [*_TEXTS].index(each) if each in _TEXTS else len(_TEXTS)):
        text = str(captured[name])
        yield Text(name, _TEXTS.get(name, name), text[:MAX_SHOWN], max(len(text) - MAX_SHOWN, 0))


ROWS = 50
MAX_TEXT = 300
UNDER_WAY_SECONDS = 900.0  # for which a request without an end is shown among the others
SINCE = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0}
_SINCE_NAMES = {"1h": "the last hour", "24h": "the last day", "7d": "the last week"}


class Asked(NamedTuple):
    """Which of them; empty is all."""

    outcome: str = ""
    model: str = ""
    owner: str = ""
    since: str = ""
    id: str = ""
    before: str = ""

    @property
    def query(self) -> str:
        """The same, but for the page."""
        return urlencode({name: value for name, value in self._asdict().items() if value and name != "before"})

    @property
    def is_live(self) -> bool:
        """Whether new ones come to it: not on an older page, nor where one is looked for by an id."""
        return not self.before and not self.id


class Line(NamedTuple):
    href: str
    id: str
    at: str
    moment: str
    model: str
    owner: str
    outcome: Outcome
    took: str
    tokens_in: str
    tokens_out: str
    calls: int
    executions: int
    sandboxes: tuple[str, ...]


def pages(house: House) -> list[Page]:
    desk = Requests(house)
    return [Page("/requests", desk.overview), Page("/requests/{id:path}", desk.show)]


class Requests:
    def __init__(self, house: House):
        self._house = house
        self._steps = house.gateway.shelf.steps

    async def overview(self, request: Request, visitor: Visitor) -> Response:
        asked = asked_of(request.query_params, visitor)
        wanted = Wanted(
            limit=ROWS + 1,
            before=asked.before or None,
            owner=visitor.sees or asked.owner or None,
            outcome=asked.outcome or None,
            model=asked.model or None,
            id=asked.id or None,
            since=time.time() - SINCE[asked.since] if asked.since else None,
        )
        found = await self._steps.requests(wanted)
        lines = [*await self._under_way(asked, visitor), *(_line(line_of(each)) for each in found[:ROWS])]
        older = urlencode({"before": found[ROWS - 1].id}) if len(found) > ROWS else ""
        name = "requests_rows.html" if is_partial(request) else "requests.html"
        return self._house.render(
            request,
            visitor,
            name,
            lines=lines,
            asked=asked,
            older="&".join(filter(None, (asked.query, older))) if older else "",
            outcomes=[(code, label_of(code)) for code in FILTERS],
            times=_SINCE_NAMES,
            models=sorted({line.model for line in lines if line.model}),
            capture=self._house.config.gateway.capture,
        )

    async def show(self, request: Request, visitor: Visitor) -> Response:
        """By the id of its record, or by its own: clients may have given that to several."""
        id = request.path_params["id"]
        steps = await self._found(id, visitor.sees)
        if not steps:
            raise errors.NotFound(f"there is no record of a request {id[:200]!r}: they are kept for 30 days")
        found = [tree_of(_until_now(each)) for each in trees(steps)]
        name = "request_trees.html" if is_partial(request) else "request.html"
        return self._house.render(
            request, visitor, name, id=id, href=href(id), trees=found, capture=self._house.config.gateway.capture
        )

    async def _found(self, id: str, owner: str | None) -> list[Step]:
        record = await self._steps.get(id)
        if record is None or owner not in (None, record.owner):
            return await self._steps.of(id, owner)
        root = record.parent or record.id
        return [each for each in await self._steps.of(record.request, owner) if root in (each.id, each.parent)] or [
            record
        ]

    async def _under_way(self, asked: Asked, visitor: Visitor) -> list[Line]:
        """Those that have not ended. Only where nothing is asked for that nobody knows before the end."""
        if not asked.is_live or asked.outcome:
            return []
        owner = visitor.sees or asked.owner or None
        steps = await self._steps.under_way(time.time() - UNDER_WAY_SECONDS, owner)
        found = [_unfinished(each) for each in reversed(trees(steps)) if each["outcome"] == UNFINISHED]
        return [line for line in found if asked.model in ("", line.model)]


def asked_of(query: Mapping[str, str], visitor: Visitor) -> Asked:
    """Raises InvalidRequest for what cannot be asked for."""
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in Asked._fields}
    if texts["since"] and texts["since"] not in SINCE:
        raise errors.InvalidRequest(f"since must be one of {', '.join(SINCE)}, not {texts['since'][:50]!r}")
    return Asked(**{**texts, "owner": texts["owner"] if visitor.is_admin else ""})


def _line(told: Mapping[str, Any]) -> Line:
    return Line(
        href=href(told["record"]),
        id=told["id"],
        at=format.iso(told["at"]),
        moment=format.moment(told["at"]),
        model=str(told.get("model", "")),
        owner=told["owner"],
        outcome=outcome_of(told["outcome"], told),
        took=took(told["seconds"]),
        tokens_in=f"{told.get('input_tokens', 0):,}",
        tokens_out=f"{told.get('output_tokens', 0):,}",
        calls=int(told.get("model_calls", 0)),
        executions=int(told.get("executions", 0)),
        sandboxes=tuple(sandbox_of(each) for each in told.get("containers", ())),
    )


def _until_now(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """What has no end may go on: it takes as long as it has been there. After a while nobody believes that any more."""
    seconds = time.time() - told["at"]
    if told["outcome"] != UNFINISHED or not told["seconds"] < seconds < UNDER_WAY_SECONDS:
        return told
    return {**told, "seconds": seconds}


def _unfinished(told: Mapping[str, Any]) -> Line:
    """Its own record has no sums yet: those of its steps."""
    steps = told["steps"]
    kinds = [each["kind"] for each in steps]
    sums = {name: sum(each.get(name, 0) for each in steps) for name in ("input_tokens", "output_tokens")}
    model = next((each["model"] for each in steps if each.get("model")), "")
    line = _line({**_until_now(told), **sums, "model": model, "model_calls": kinds.count("model_call")})
    return line._replace(href=href(told["id"]), executions=kinds.count("execution"))
