"""Measurement: turns of the gateway, `/v1/responses` with code, beside executions over our own protocol."""

from __future__ import annotations

import time
from typing import Any

import httpx2

from cloche.bench import instant_model
from cloche.bench.lab import SETTLE_SECONDS
from cloche.bench.samples import expect_answer, split_evenly
from cloche.bench.serving import REFILL_SECONDS, ServerLab

TURN_CODE = "pass"
ECHO_MODEL = "cloche/echo"
CODE_TOOL = {"type": "code_interpreter", "container": {"type": "auto"}}


def measure_gateway_turns(lab: ServerLab) -> None:
    """One model call with code and one with text, in a pooled container; the baseline is a warm execution."""
    with httpx2.Client(base_url=lab.url, headers=lab.headers, timeout=60) as client:
        sandbox = client.post("/api/v1/sandboxes", json={}).json()["id"]
        for model in (instant_model.INSTANT_MODEL, ECHO_MODEL):
            _turn_seconds(lab, client, model)  # opens connections, imports what is imported late
        time.sleep(SETTLE_SECONDS)
        for count in split_evenly(lab.counts.warm, lab.counts.fast):
            _measure_executions(lab, client, sandbox, count)
            for key, model in (("gateway_turn", instant_model.INSTANT_MODEL), ("gateway_echo", ECHO_MODEL)):
                with lab.book.attempt(key):
                    time.sleep(REFILL_SECONDS)
                    lab.book.add(key, _turn_seconds(lab, client, model))
        client.delete(f"/api/v1/sandboxes/{sandbox}")


def _measure_executions(lab: ServerLab, client: httpx2.Client, sandbox: str, count: int) -> None:
    for _ in range(count):
        with lab.book.attempt("native_warm"):
            began = time.perf_counter()
            run = client.post(f"/api/v1/sandboxes/{sandbox}/run", json={"code": TURN_CODE}).json()
            lab.book.add("native_warm", time.perf_counter() - began)
            expect_answer(run.get("outcome") == "ok", run)


def _turn_seconds(lab: ServerLab, client: httpx2.Client, model: str) -> float:
    asked: dict[str, Any] = {"model": model, "input": f"```python\n{TURN_CODE}\n```", "tools": [CODE_TOOL]}
    began = time.perf_counter()
    answer = client.post("/v1/responses", json=asked).json()
    took = time.perf_counter() - began
    kinds = [item["type"] for item in answer.get("output", [])]
    expect_answer(kinds == ["code_interpreter_call", "message"], answer)
    client.delete(f"/v1/containers/{answer['output'][0]['container_id']}")
    return took
