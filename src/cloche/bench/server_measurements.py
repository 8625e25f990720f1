"""Measurements through a server: E2B's own client, and turns of the gateway."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx2

from cloche.bench import instant_model, programs
from cloche.bench.lab import SETTLE_SECONDS, TRANSPORTS, IpykernelProcess, SampleCounts, missing_packages
from cloche.bench.measurements import TURNS, measure_kernel_start, measure_peer_turn
from cloche.bench.samples import SampleBook, expect_answer, split_evenly
from cloche.config import Config

E2B_CLIENT_PACKAGE = "e2b_code_interpreter"
REFILL_SECONDS = 0.2  # between two creations, so that each finds the pool full, as a user does
STOP_SECONDS = 60.0


def is_client_missing() -> bool:
    """Whether the client is not installed."""
    return importlib.util.find_spec(E2B_CLIENT_PACKAGE) is None


class ServerLab:
    """A server, and E2B's client for it. Use with `with`."""

    def __init__(self, config: Config, counts: SampleCounts, *, peer: bool = True):
        self.counts = counts
        self.book = SampleBook()
        self.peer = peer and not missing_packages()
        self._config = config
        self._key = "e2b_" + secrets.token_hex(20)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ServerLab:
        program = "from cloche.cli import main; main()"
        command = [sys.executable, "-c", program, "--data-dir", self._config.data_dir, "serve", "--port", "0"]
        environ = {**os.environ, "CLOCHE_API_KEY": self._key, "CLOCHE_CONFIG": self._write_config()}
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._url = next((line.split()[1] for line in self._process.stdout if line.startswith("ready ")), "")
        if not self._url:
            raise RuntimeError("the server ended before it was ready")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait(STOP_SECONDS)
        self._stack.close()

    @property
    def url(self) -> str:
        return self._url

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._key}"}

    def _write_config(self) -> str:
        """Writes a configuration file with the instant model as its upstream."""
        place = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        url = self._stack.enter_context(instant_model.run_instant_model())
        file = place / "cloche.toml"
        file.write_text(f'[[upstream]]\nmodels = ["{instant_model.INSTANT_MODEL}"]\nbase_url = "{url}"\n')
        return str(file)

    def create(self) -> Any:
        from e2b_code_interpreter import Sandbox

        url = f"{self._url}/e2b"
        return Sandbox.create(api_key=self._key, api_url=url, sandbox_url=url)


def measure_first_answers(lab: ServerLab) -> None:
    """`Sandbox.create()` and the first `run_code`; the peer's start in turns."""
    lab.create().kill()  # imports the client, opens its connections
    for count in split_evenly(lab.counts.fast, lab.counts.peer):
        measure_kernel_start(lab, "kernel_one", programs.ONE, "text/plain")
        for _ in range(count):
            with lab.book.attempt("e2b_one", "e2b_ready"):
                time.sleep(REFILL_SECONDS)
                _create_and_answer(lab)


def _create_and_answer(lab: ServerLab) -> None:
    began = time.perf_counter()
    box = lab.create()
    ready = time.perf_counter()
    try:
        text = box.run_code(programs.ONE).text
        ended = time.perf_counter()
    finally:
        box.kill()
    expect_answer(text == "2", text)
    lab.book.add("e2b_ready", ready - began)
    lab.book.add("e2b_one", ended - began)


def measure_round_trips(lab: ServerLab) -> None:
    """`run_code` in a context that is there; the peer's two transports in turns."""
    with contextlib.ExitStack() as stack:
        box = lab.create()
        stack.callback(box.kill)
        kernels = {name: stack.enter_context(IpykernelProcess(name)) for name in TRANSPORTS} if lab.peer else {}
        time.sleep(SETTLE_SECONDS)
        for count in split_evenly(lab.counts.warm, min(TURNS, lab.counts.warm)):
            for _ in range(count):
                with lab.book.attempt("e2b_warm"):
                    began = time.perf_counter()
                    text = box.run_code(programs.ONE).text
                    lab.book.add("e2b_warm", time.perf_counter() - began)
                    expect_answer(text == "2", text)
            for transport, kernel in kernels.items():
                measure_peer_turn(lab, kernel, f"kernel_warm_{transport}", programs.ONE, max(count // 2, 1))


# --- Measurement: turns of the gateway, `/v1/responses` with code, beside executions over our own protocol.

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
