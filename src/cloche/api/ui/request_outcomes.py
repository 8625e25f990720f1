"""How a request for a model's answer, or a step of it, ended: in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cloche.api.admin_requests import UNFINISHED

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
