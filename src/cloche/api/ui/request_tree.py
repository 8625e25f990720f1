"""A request and what it did, as rows of a waterfall: what led to what, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from cloche.api.admin_requests import UNFINISHED
from cloche.api.ui import words
from cloche.api.ui.request_outcomes import Outcome, outcome_of

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
        return words.duration(seconds)
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
        at=words.iso(told["at"]),
        moment=words.moment(told["at"]),
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
        yield f"CPU {took(step['cpu_seconds'])}, memory {words.size(step.get('memory_peak_bytes', 0))}"


def _texts(captured: Mapping[str, Any]) -> Iterator[Text]:
    for name in sorted(captured, key=lambda each: [*_TEXTS].index(each) if each in _TEXTS else len(_TEXTS)):
        text = str(captured[name])
        yield Text(name, _TEXTS.get(name, name), text[:MAX_SHOWN], max(len(text) - MAX_SHOWN, 0))
