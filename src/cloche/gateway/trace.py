"""What a request did, as records that share its id: model calls, containers, executions.

Without code, prompts or output, unless capture is switched on.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from cloche import errors
from cloche.events import Ended
from cloche.gateway.events import Finished
from cloche.gateway.items import Item, without_credentials
from cloche.gateway.outputs import Sight, abridged
from cloche.model import KIB, new_id
from cloche.store.gateway import Kind, Step

CAPTURED_BYTES = 64 * KIB  # of each: code, output, prompt
LEFT = "left"  # the outcome of what somebody stopped waiting for
INTERNAL = "internal_error"
MAX_TOKENS = 1 << 40
MAX_CONTAINERS = 20  # that a request's own record names

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StepInProgress:
    def __init__(self, fields: dict[str, Any]):
        self.fields = fields
        self.captured: dict[str, Any] = {}
        self.outcome = "ok"
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began, without what others took."""
        return time.monotonic() - self._began

    def others_took(self, seconds: float) -> None:
        """Leaves that time out: a model is not slow because a container is, or a client that reads slowly."""
        self._began += seconds

    def first(self) -> None:
        """Something of a model's answer has come; the first time counts."""
        self.fields.setdefault("first_seconds", self.seconds)

    def finished(self, finished: Finished) -> None:
        """A model's answer is whole."""
        tokens = finished.tokens
        self.fields["input_tokens"] = _count(tokens.input)
        self.fields["output_tokens"] = _count(tokens.output)
        self.fields["cached_tokens"] = _count(tokens.cached)
        self.fields["upstream_status"] = 200
        if finished.status != "completed":
            self.outcome = finished.status
            self.fields["error"] = _word(finished.reason)

    def ended(self, ended: Ended) -> None:
        """A program has ended."""
        self.outcome = ended.outcome
        self.fields.update(cpu_seconds=ended.usage.cpu_seconds, memory_peak_bytes=ended.usage.memory_peak_bytes)

    def failed(self, error: BaseException) -> None:
        """Only words of ours and of a server's code are kept: messages may hold what a user typed."""
        if isinstance(error, errors.ClocheError):
            self.outcome = error.code
        elif self.outcome == "ok":
            self.outcome = INTERNAL if isinstance(error, Exception) else LEFT
        cause = getattr(error, "error", error)  # what a dialect wraps
        if isinstance(cause, errors.UpstreamFailed):
            self.fields.update(upstream_status=cause.status, error=_word(cause.reason) or _word(cause.kind))


class Trace:
    """The records of one request. `write` takes each as it is done."""

    def __init__(self, request: str, owner: str, write: Callable[[Step], None], *, capture: bool = False):
        self.request = request
        self.owner = owner
        self.capture = capture
        self.root = new_id("t")
        self._write = write
        self._sums = Sums()

    @contextmanager
    def step(self, kind: Kind, **fields: Any) -> Iterator[StepInProgress]:
        """Measures the block and records how it ended, also if it raised.

        The one of kind `request` is around all others, and says what they were in all.
        """
        step, started_at = StepInProgress(dict(fields)), time.time()
        try:
            yield step
        except BaseException as error:
            step.failed(error)
            raise
        finally:
            self._record(kind, step, started_at)

    def capture_prompt(self, step: StepInProgress, items: list[Item]) -> None:
        """Keeps what a model is asked, if capture is on."""
        if self.capture and items:
            known = [without_credentials(item) if isinstance(item, dict) else item for item in items]
            step.captured["prompt"] = abridged(_text(known), CAPTURED_BYTES)

    def capture_run(self, step: StepInProgress, code: str, sight: Sight) -> None:
        """Keeps what has run and what it printed, if capture is on."""
        if self.capture:
            step.captured.update(code=abridged(code, CAPTURED_BYTES), output=sight.text(CAPTURED_BYTES))

    def _record(self, kind: Kind, step: StepInProgress, started_at: float) -> None:
        is_request = kind == "request"
        if is_request:
            step.fields.update({name: value for name, value in self._sums.fields().items() if value is not None})
        else:
            self._sums.add(kind, step)
        self._write(
            Step(
                id=self.root if is_request else new_id("t"),
                request=self.request,
                owner=self.owner,
                kind=kind,
                started_at=started_at,
                seconds=step.seconds,
                outcome=step.outcome,
                parent=None if is_request else self.root,
                fields={name: value for name, value in step.fields.items() if value is not None},
                captured=step.captured,
            )
        )


class Sums:
    """What the steps of a request were in all."""

    def __init__(self) -> None:
        self._counts = {"model_calls": 0, "executions": 0, "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}
        self._containers: dict[str, None] = {}
        self._model: str | None = None

    def add(self, kind: Kind, step: StepInProgress) -> None:
        self._counts["model_calls"] += kind == "model_call"
        self._counts["executions"] += kind == "execution"
        for name in ("input_tokens", "output_tokens", "cached_tokens"):
            self._counts[name] += step.fields.get(name) or 0
        self._model = self._model or step.fields.get("model")
        container = step.fields.get("container")
        if container and len(self._containers) < MAX_CONTAINERS:
            self._containers[container] = None

    def fields(self) -> dict[str, Any]:
        return {"model": self._model, **self._counts, "containers": list(self._containers)}


def _text(items: list[Item]) -> str:
    try:
        return msgspec.json.encode(items).decode()
    except UnicodeEncodeError:  # halves of surrogates, which UTF-8 has not
        return ascii(items)


def _count(tokens: int) -> int:
    """An upstream may claim any number."""
    return min(max(tokens, 0), MAX_TOKENS)


def _word(text: str | None) -> str | None:
    """A code, if it is one: an upstream may say anything."""
    return text if text and _WORD.fullmatch(text) else None
