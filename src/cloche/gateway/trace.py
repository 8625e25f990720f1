"""The trace of a request: step records that share its id, of model calls, containers and executions.

They hold no code, prompts or output, unless capture is switched on.
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
from cloche.gateway.events import AnswerFinished
from cloche.gateway.items import Item, without_credentials
from cloche.gateway.outputs import ExecutionOutputs, abridge_text
from cloche.model import KIB, new_id
from cloche.store.gateway import StepKind, StepRecord

CAPTURED_BYTES = 64 * KIB  # of each: code, output, prompt
LEFT_OUTCOME = "left"  # the outcome of a step after its caller stopped waiting
INTERNAL_OUTCOME = "internal_error"
MAX_TOKEN_COUNT = 1 << 40
MAX_RECORDED_CONTAINERS = 20  # that a request's own record names

_SAFE_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class StepInProgress:
    def __init__(self, fields: dict[str, Any]):
        self.fields = fields
        self.captured: dict[str, Any] = {}
        self.outcome = "ok"
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since it began, without excluded time."""
        return time.monotonic() - self._began

    def exclude_seconds(self, seconds: float) -> None:
        """Excludes that time: a slow container, or a client that reads slowly, does not make the model slow."""
        self._began += seconds

    def first(self) -> None:
        """Records the first event of a model's answer; later calls do nothing."""
        self.fields.setdefault("first_seconds", self.seconds)

    def finished(self, finished: AnswerFinished) -> None:
        """Records the end of a model's answer."""
        tokens = finished.tokens
        self.fields["input_tokens"] = _bound_count(tokens.input)
        self.fields["output_tokens"] = _bound_count(tokens.output)
        self.fields["cached_tokens"] = _bound_count(tokens.cached)
        self.fields["upstream_status"] = 200
        if finished.status != "completed":
            self.outcome = finished.status
            self.fields["error"] = _safe_code(finished.reason)

    def ended(self, ended: Ended) -> None:
        """Records the end of a program."""
        self.outcome = ended.outcome
        self.fields.update(cpu_seconds=ended.usage.cpu_seconds, memory_peak_bytes=ended.usage.memory_peak_bytes)

    def failed(self, error: BaseException) -> None:
        """Records a failure. Only our own codes and a server's code are kept: messages may hold a user's text."""
        if isinstance(error, errors.ClocheError):
            self.outcome = error.code
        elif self.outcome == "ok":
            self.outcome = INTERNAL_OUTCOME if isinstance(error, Exception) else LEFT_OUTCOME
        cause = getattr(error, "error", error)  # unwraps an error of a dialect
        if isinstance(cause, errors.UpstreamFailed):
            self.fields.update(upstream_status=cause.status, error=_safe_code(cause.reason) or _safe_code(cause.kind))


class RequestTrace:
    """The step records of one request. `write` receives each when it is done."""

    def __init__(self, request: str, owner: str, write: Callable[[StepRecord], None], *, capture: bool = False):
        self.request = request
        self.owner = owner
        self.capture = capture
        self.root = new_id("t")
        self._write = write
        self._sums = StepTotals()

    @contextmanager
    def step(self, kind: StepKind, **fields: Any) -> Iterator[StepInProgress]:
        """Measures the block and records how it ended, also if it raised.

        The step of kind `request` encloses all others, and has their totals.
        """
        step, started_at = StepInProgress(dict(fields)), time.time()
        try:
            yield step
        except BaseException as error:
            step.failed(error)
            raise
        finally:
            self._write_step(kind, step, started_at)

    def capture_prompt(self, step: StepInProgress, items: list[Item]) -> None:
        """Captures the model's input, if capture is on."""
        if self.capture and items:
            known = [without_credentials(item) if isinstance(item, dict) else item for item in items]
            step.captured["prompt"] = abridge_text(_encode_items(known), CAPTURED_BYTES)

    def capture_run(self, step: StepInProgress, code: str, sight: ExecutionOutputs) -> None:
        """Captures the code and its output, if capture is on."""
        if self.capture:
            step.captured.update(code=abridge_text(code, CAPTURED_BYTES), output=sight.text(CAPTURED_BYTES))

    def _write_step(self, kind: StepKind, step: StepInProgress, started_at: float) -> None:
        is_request = kind == "request"
        if is_request:
            step.fields.update({name: value for name, value in self._sums.fields().items() if value is not None})
        else:
            self._sums.add(kind, step)
        self._write(
            StepRecord(
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


class StepTotals:
    """The totals of a request's steps."""

    def __init__(self) -> None:
        self._counts = {"model_calls": 0, "executions": 0, "input_tokens": 0, "output_tokens": 0, "cached_tokens": 0}
        self._containers: dict[str, None] = {}
        self._model: str | None = None

    def add(self, kind: StepKind, step: StepInProgress) -> None:
        self._counts["model_calls"] += kind == "model_call"
        self._counts["executions"] += kind == "execution"
        for name in ("input_tokens", "output_tokens", "cached_tokens"):
            self._counts[name] += step.fields.get(name) or 0
        self._model = self._model or step.fields.get("model")
        container = step.fields.get("container")
        if container and len(self._containers) < MAX_RECORDED_CONTAINERS:
            self._containers[container] = None

    def fields(self) -> dict[str, Any]:
        return {"model": self._model, **self._counts, "containers": list(self._containers)}


def _encode_items(items: list[Item]) -> str:
    try:
        return msgspec.json.encode(items).decode()
    except UnicodeEncodeError:  # halves of surrogates, which UTF-8 has not
        return ascii(items)


def _bound_count(tokens: int) -> int:
    """Bounds the count: an upstream may claim any number."""
    return min(max(tokens, 0), MAX_TOKEN_COUNT)


def _safe_code(text: str | None) -> str | None:
    """Returns the text if it looks like a code, else None: an upstream may send anything."""
    return text if text and _SAFE_CODE.fullmatch(text) else None
