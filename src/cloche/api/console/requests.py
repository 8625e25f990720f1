"""`/ui/requests`: the gateway's requests, a line each, and one of them as a tree with a waterfall."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.admin_requests import UNFINISHED, build_request_trees, request_summary
from cloche.api.console import format
from cloche.api.console.context import ConsoleContext, ConsolePage, ConsoleVisitor, is_partial
from cloche.store.gateway import StepQuery, StepRecord

# Outcomes of gateway requests and their steps, in plain words.

OutcomeTone = Literal["ok", "quiet", "warn", "bad"]


class OutcomeLabel(NamedTuple):
    code: str
    tone: OutcomeTone
    label: str
    meaning: str  # a sentence; empty where nothing is to be said


_OUTCOMES: dict[str, tuple[OutcomeTone, str, str]] = {
    "ok": ("ok", "ok", ""),
    UNFINISHED: ("quiet", "under way", "It goes on, or its server died before it had ended."),
    "left": ("quiet", "left", "The client stopped waiting before the answer was whole."),
    "cancelled": ("quiet", "cancelled", "Somebody cancelled the response while it was being made."),
    "interrupted": ("quiet", "interrupted", "The code was interrupted while it ran."),
    "raised": ("warn", "raised", "The code raised an exception. The model was shown it and could go on."),
    "incomplete": ("warn", "incomplete", "The model stopped before its answer was whole."),
    "timed_out": ("bad", "timed out", "The code ran for longer than one call may (gateway.execution_seconds)."),
    "out_of_memory": ("bad", "out of memory", "The code used more memory than its container has."),
    "died": ("bad", "died", "The program that ran the code died: it crashed or was killed."),
    "failed": ("bad", "failed", "The model's server said that it failed."),
    "upstream_failed": ("bad", "upstream failed", "The model's server refused, failed or broke off."),
    "model_not_found": ("bad", "no such model", "No upstream in the configuration has a model of that name."),
    "quota_exceeded": ("bad", "over quota", "The owner or the key has used as much as they may."),
    "busy": ("bad", "busy", "As much ran as this host can have at once."),
    "unavailable": ("bad", "unavailable", "This host could not do it at that time."),
    "not_found": ("bad", "not found", "Something that the request named is not there, or not its owner's."),
    "invalid_request": ("bad", "invalid", "The request was invalid."),
    "internal_error": ("bad", "internal error", "Internal error. The server log has it under the request's id."),
    "no_space": ("bad", "no space", "The container's writable space is full."),
    "sandbox_expired": ("bad", "container expired", "The container's time ran out."),
    "sandbox_killed": ("bad", "container killed", "Somebody ended the container."),
    "sandbox_lost": ("bad", "container lost", "The container broke, or the server that had it died."),
    "shutting_down": ("bad", "shutting down", "The server was being stopped."),
}

OUTCOME_FILTERS = (
    "ok",
    "!ok",
    "left",
    "cancelled",
    "incomplete",
    "upstream_failed",
    "model_not_found",
    "quota_exceeded",
)
"""What can be chosen of requests; `!ok` is all that did not end well."""

_INCOMPLETE_REASONS = {
    "max_output_tokens": "It reached the number of output tokens that it was allowed.",
    "content_filter": "The model's server filtered its content.",
}
_STATUS_MEANINGS = {
    400: "It did not understand the request.",
    401: "It did not accept the gateway's key: see api_key of the upstream in the configuration.",
    403: "It did not allow this with the gateway's key.",
    404: "It knows no such model or path: see base_url of the upstream in the configuration.",
    429: "It was asked too often, or its credit is used up.",
}


def describe_outcome(code: str, fields: Mapping[str, Any]) -> OutcomeLabel:
    """`fields` are those of the record: they include the upstream's status and error."""
    tone, label, meaning = _OUTCOMES.get(code) or ("bad", code.replace("_", " "), "")
    return OutcomeLabel(code, tone, label, " ".join(filter(None, (meaning, *_upstream_reasons(code, fields)))))


def outcome_label(code: str) -> str:
    return "not ok" if code == "!ok" else describe_outcome(code, {}).label


def _upstream_reasons(code: str, fields: Mapping[str, Any]) -> list[str]:
    """Sentences on the upstream's status and its error."""
    status, word = fields.get("upstream_status"), fields.get("error")
    if code == "ok" or (status in (None, 200) and not word):
        return []
    if code == "incomplete":
        return [_INCOMPLETE_REASONS.get(str(word), f"The reason it gave: {word}.")] if word else []
    said = [f"Its status was {status}."] if status not in (None, 200) else []
    if isinstance(status, int):
        said.append(_STATUS_MEANINGS.get(status, "It failed: try again, or ask its operator." if status >= 500 else ""))
    return [*said, f"Its word for it: {word}."] if word else said


# A request and its steps, as rows of a waterfall: cause, order and time.

CONTAINER_PREFIX = "cntr_"  # before a sandbox's id, as OpenAI's clients know it
MIN_BAR_WIDTH = 0.4  # percent: what took no time is seen, too
MAX_SHOWN_CHARACTERS = 32_768  # characters of what was captured

_CONTAINER_ORIGINS = {
    "created": "made for this request",
    "reused": "one that was there already",
    "replaced": "made in the place of one that was gone",
}
_STEP_NAMES = {"request": "Request", "container": "Container", "execution": "Code"}
_TEXT_TITLES = {"prompt": "What the model was asked", "code": "Code", "output": "Output"}


class WaterfallBar(NamedTuple):
    """The position of a bar, in percent of the whole request."""

    start: str
    width: str
    first: str  # until its first word came; empty if unknown


class CapturedText(NamedTuple):
    """A captured text. Always shown as plain text."""

    name: str
    title: str
    text: str
    cut: int  # characters that are not shown


class WaterfallRow(NamedTuple):
    record: str
    kind: str
    name: str
    depth: int  # 0: the request, 1: what it did, 2: what a model's answer led to
    last: bool  # of those below the same
    goes_on: bool  # whether below it comes another step of the request itself
    begins: str
    took: str
    bar: WaterfallBar
    tokens: str
    cached: str  # of those
    outcome: OutcomeLabel
    notes: tuple[str, ...]
    sandbox: str  # the id of the one that it is about; empty where there is none
    texts: tuple[CapturedText, ...]


class RequestTree(NamedTuple):
    id: str
    record: str
    owner: str
    at: str
    moment: str
    model: str
    outcome: OutcomeLabel
    took: str
    tokens: str
    calls: int
    executions: int
    sandboxes: tuple[str, ...]
    response: str
    completion: str
    unfinished: bool
    captured: bool
    rows: tuple[WaterfallRow, ...]


def format_seconds(seconds: float) -> str:
    """12.3 ms, 1.40 s, 2m 5s."""
    if seconds >= 60:
        return format.duration(seconds)
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def format_tokens(fields: Mapping[str, Any]) -> str:
    """1,520 in, 231 out. Empty where there is no count."""
    if "input_tokens" not in fields:
        return ""
    return f"{fields['input_tokens']:,} in, {fields.get('output_tokens', 0):,} out"


def format_cached(fields: Mapping[str, Any]) -> str:
    """The input tokens that the upstream had cached: 1,024 cached. Empty where there are none."""
    return f"{fields['cached_tokens']:,} cached" if fields.get("cached_tokens") else ""


def request_href(id: str) -> str:
    """The address of a request's page. A client may have chosen the id, so all of it is quoted."""
    return f"/ui/requests/{quote(id, safe='')}"


def container_sandbox(container: object) -> str:
    return str(container or "").removeprefix(CONTAINER_PREFIX)


def build_tree(told: Mapping[str, Any]) -> RequestTree:
    """Builds the tree of one request from the data of `/admin/requests/{id}`."""
    steps = told["steps"]
    whole = max([float(told["seconds"]), *(each["offset_seconds"] + each["seconds"] for each in steps)], default=0.0)
    rows = (_root_row(told), *_step_rows(steps, whole or 1e-9))
    return RequestTree(
        id=told["id"],
        record=told["record"],
        owner=told["owner"],
        at=format.iso(told["at"]),
        moment=format.moment(told["at"]),
        model=str(told.get("model") or next((each["model"] for each in steps if each.get("model")), "")),
        outcome=describe_outcome(told["outcome"], told),
        took=format_seconds(told["seconds"]),
        tokens=", ".join(filter(None, (format_tokens(told), format_cached(told)))),
        calls=int(told.get("model_calls", 0)),
        executions=int(told.get("executions", 0)),
        sandboxes=tuple(container_sandbox(each) for each in told.get("containers", ())),
        response=str(told.get("response", "")),
        completion=str(told.get("completion", "")),
        unfinished=told["outcome"] == UNFINISHED,
        captured=any(row.texts for row in rows),
        rows=rows,
    )


def _root_row(told: Mapping[str, Any]) -> WaterfallRow:
    return _waterfall_row(
        {**told, "kind": "request", "offset_seconds": 0.0}, max(float(told["seconds"]), 1e-9), 0, last=True
    )


def _step_rows(steps: list[dict[str, Any]], whole: float) -> Iterator[WaterfallRow]:
    """The steps in the order of their starts. Other steps after a model call are its consequences."""
    depths = [
        1 if each["kind"] == "model_call" or not _follows_a_call(steps[:at]) else 2 for at, each in enumerate(steps)
    ]
    for at, step in enumerate(steps):
        yield _waterfall_row(step, whole, depths[at], last=_is_last(depths, at), goes_on=1 in depths[at + 1 :])


def _follows_a_call(before: list[dict[str, Any]]) -> bool:
    return any(each["kind"] == "model_call" for each in before)


def _is_last(depths: list[int], at: int) -> bool:
    for depth in depths[at + 1 :]:
        if depth <= depths[at]:
            return depth < depths[at]
    return True


def _waterfall_row(
    step: Mapping[str, Any], whole: float, depth: int, *, last: bool, goes_on: bool = False
) -> WaterfallRow:
    outcome = describe_outcome(step["outcome"], step)
    return WaterfallRow(
        record=step["record"],
        kind=step["kind"],
        name=_step_name(step),
        depth=depth,
        last=last,
        goes_on=goes_on,
        begins=format_seconds(step["offset_seconds"]),
        took=format_seconds(step["seconds"]),
        bar=_step_bar(step, whole),
        tokens=format_tokens(step),
        cached=format_cached(step),
        outcome=outcome,
        notes=tuple(filter(None, (*_step_notes(step), outcome.meaning))),
        sandbox=container_sandbox(step.get("container")),
        texts=tuple(_captured_texts(step.get("captured") or {})),
    )


def _step_name(step: Mapping[str, Any]) -> str:
    kind = step["kind"]
    if kind == "model_call":
        after = int(step.get("leg", 1)) - 1
        return "Model call" if not after else "Follow-up call" if after == 1 else f"Follow-up call {after}"
    return _STEP_NAMES.get(kind, str(kind))


def _step_bar(step: Mapping[str, Any], whole: float) -> WaterfallBar:
    begins = min(step["offset_seconds"] / whole * 100, 100 - MIN_BAR_WIDTH)
    width = min(max(step["seconds"] / whole * 100, MIN_BAR_WIDTH), 100 - begins)
    first = min(step["first_seconds"] / whole * 100, width) if "first_seconds" in step else None
    return WaterfallBar(f"{begins:.2f}", f"{width:.2f}", "" if first is None else f"{first:.2f}")


def _step_notes(step: Mapping[str, Any]) -> Iterator[str]:
    if step["kind"] == "model_call":
        yield str(step.get("model", ""))
        yield f"first word after {format_seconds(step['first_seconds'])}" if "first_seconds" in step else ""
    yield _CONTAINER_ORIGINS.get(step.get("how", ""), "")
    if "cpu_seconds" in step:
        yield f"CPU {format_seconds(step['cpu_seconds'])}, memory {format.size(step.get('memory_peak_bytes', 0))}"


def _captured_texts(captured: Mapping[str, Any]) -> Iterator[CapturedText]:
    for name in sorted(
        captured, key=lambda each: [*_TEXT_TITLES].index(each) if each in _TEXT_TITLES else len(_TEXT_TITLES)
    ):
        text = str(captured[name])
        yield CapturedText(
            name, _TEXT_TITLES.get(name, name), text[:MAX_SHOWN_CHARACTERS], max(len(text) - MAX_SHOWN_CHARACTERS, 0)
        )


ROWS = 50
MAX_TEXT = 300
UNDER_WAY_SECONDS = 900.0  # for which a request without an end is shown among the others
SINCE = {"1h": 3600.0, "24h": 86400.0, "7d": 7 * 86400.0}
_SINCE_NAMES = {"1h": "the last hour", "24h": "the last day", "7d": "the last week"}


class RequestPageQuery(NamedTuple):
    """The filter; empty fields match all."""

    outcome: str = ""
    model: str = ""
    owner: str = ""
    since: str = ""
    id: str = ""
    before: str = ""

    @property
    def query(self) -> str:
        """The filter without the page, as a query string."""
        return urlencode({name: value for name, value in self._asdict().items() if value and name != "before"})

    @property
    def is_live(self) -> bool:
        """Whether new requests are added to it: not on an older page, nor in a search by id."""
        return not self.before and not self.id


class RequestLine(NamedTuple):
    href: str
    id: str
    at: str
    moment: str
    model: str
    owner: str
    outcome: OutcomeLabel
    took: str
    tokens_in: str
    tokens_out: str
    calls: int
    executions: int
    sandboxes: tuple[str, ...]


def pages(context: ConsoleContext) -> list[ConsolePage]:
    desk = RequestPages(context)
    return [ConsolePage("/requests", desk.show_overview), ConsolePage("/requests/{id:path}", desk.show)]


class RequestPages:
    def __init__(self, context: ConsoleContext):
        self._context = context
        self._steps = context.gateway.gateway_store.steps

    async def show_overview(self, request: Request, visitor: ConsoleVisitor) -> Response:
        query = decode_request_query(request.query_params, visitor)
        step_query = StepQuery(
            limit=ROWS + 1,
            before=query.before or None,
            owner=visitor.visible_owner or query.owner or None,
            outcome=query.outcome or None,
            model=query.model or None,
            id=query.id or None,
            since=time.time() - SINCE[query.since] if query.since else None,
        )
        found = await self._steps.requests(step_query)
        lines = [
            *await self._unfinished_lines(query, visitor),
            *(_request_line(request_summary(each)) for each in found[:ROWS]),
        ]
        older = urlencode({"before": found[ROWS - 1].id}) if len(found) > ROWS else ""
        name = "requests_rows.html" if is_partial(request) else "requests.html"
        return self._context.render(
            request,
            visitor,
            name,
            lines=lines,
            asked=query,
            older="&".join(filter(None, (query.query, older))) if older else "",
            outcomes=[(code, outcome_label(code)) for code in OUTCOME_FILTERS],
            times=_SINCE_NAMES,
            models=sorted({line.model for line in lines if line.model}),
            capture=self._context.config.gateway.capture,
        )

    async def show(self, request: Request, visitor: ConsoleVisitor) -> Response:
        """A request by the id of its record, or by its own: clients may have given that to several."""
        id = request.path_params["id"]
        steps = await self._find_steps(id, visitor.visible_owner)
        if not steps:
            raise errors.NotFound(f"there is no record of a request {id[:200]!r}: they are kept for 30 days")
        found = [build_tree(_elapsed_until_now(each)) for each in build_request_trees(steps)]
        name = "request_trees.html" if is_partial(request) else "request.html"
        return self._context.render(
            request,
            visitor,
            name,
            id=id,
            href=request_href(id),
            trees=found,
            capture=self._context.config.gateway.capture,
        )

    async def _find_steps(self, id: str, owner: str | None) -> list[StepRecord]:
        record = await self._steps.get(id)
        if record is None or owner not in (None, record.owner):
            return await self._steps.of(id, owner)
        root = record.parent or record.id
        return [each for each in await self._steps.of(record.request, owner) if root in (each.id, each.parent)] or [
            record
        ]

    async def _unfinished_lines(self, query: RequestPageQuery, visitor: ConsoleVisitor) -> list[RequestLine]:
        """Requests that have not ended. None where the filter needs a fact that is known only at the end."""
        if not query.is_live or query.outcome:
            return []
        owner = visitor.visible_owner or query.owner or None
        steps = await self._steps.list_unfinished(time.time() - UNDER_WAY_SECONDS, owner)
        found = [
            _unfinished_line(each) for each in reversed(build_request_trees(steps)) if each["outcome"] == UNFINISHED
        ]
        return [line for line in found if query.model in ("", line.model)]


def decode_request_query(query: Mapping[str, str], visitor: ConsoleVisitor) -> RequestPageQuery:
    """Raises InvalidRequest for an invalid filter."""
    texts = {name: query.get(name, "").strip()[:MAX_TEXT] for name in RequestPageQuery._fields}
    if texts["since"] and texts["since"] not in SINCE:
        raise errors.InvalidRequest(f"since must be one of {', '.join(SINCE)}, not {texts['since'][:50]!r}")
    return RequestPageQuery(**{**texts, "owner": texts["owner"] if visitor.is_admin else ""})


def _request_line(told: Mapping[str, Any]) -> RequestLine:
    return RequestLine(
        href=request_href(told["record"]),
        id=told["id"],
        at=format.iso(told["at"]),
        moment=format.moment(told["at"]),
        model=str(told.get("model", "")),
        owner=told["owner"],
        outcome=describe_outcome(told["outcome"], told),
        took=format_seconds(told["seconds"]),
        tokens_in=f"{told.get('input_tokens', 0):,}",
        tokens_out=f"{told.get('output_tokens', 0):,}",
        calls=int(told.get("model_calls", 0)),
        executions=int(told.get("executions", 0)),
        sandboxes=tuple(container_sandbox(each) for each in told.get("containers", ())),
    )


def _elapsed_until_now(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """An unfinished record with the time until now. After a while it is taken for lost."""
    seconds = time.time() - told["at"]
    if told["outcome"] != UNFINISHED or not told["seconds"] < seconds < UNDER_WAY_SECONDS:
        return told
    return {**told, "seconds": seconds}


def _unfinished_line(told: Mapping[str, Any]) -> RequestLine:
    """A line of an unfinished request: its record has no sums yet, so its steps are added up."""
    steps = told["steps"]
    kinds = [each["kind"] for each in steps]
    sums = {name: sum(each.get(name, 0) for each in steps) for name in ("input_tokens", "output_tokens")}
    model = next((each["model"] for each in steps if each.get("model")), "")
    line = _request_line({**_elapsed_until_now(told), **sums, "model": model, "model_calls": kinds.count("model_call")})
    return line._replace(href=request_href(told["id"]), executions=kinds.count("execution"))
