"""SandboxFusion: `/run_code` and `/run_jupyter`. Its clients send no key: it is in the URL."""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from typing import Annotated, Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.encoding import to_json_value
from cloche.api.http import run_unless_disconnected
from cloche.api.run_apis.runner import (
    MAX_FILES,
    RunApiContext,
    RunOutcome,
    RunRequest,
    StageOutcome,
    fetch_files,
    run_api_status,
    write_files,
)
from cloche.engine.executions.context import Context
from cloche.events import Display, Ended, Output, Raised
from cloche.model import MIB, Struct

DEFAULT_SECONDS = 10.0
TOTAL_SECONDS = 45.0
MAX_CELLS = 1000
OTHER_NAMES = {"D_ut": "d", "R": "r"}

Seconds = Annotated[float, msgspec.Meta(ge=0)]


class FusionRun(Struct):
    code: str
    language: str
    stdin: str | None = None
    compile_timeout: Seconds = DEFAULT_SECONDS
    run_timeout: Seconds = DEFAULT_SECONDS
    memory_limit_mb: int = msgspec.field(default=-1, name="memory_limit_MB")
    files: dict[str, str | None] = {}
    fetch_files: tuple[str, ...] = ()


class FusionCells(Struct):
    cells: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_CELLS)]
    cell_timeout: Seconds = 0
    total_timeout: Seconds = TOTAL_SECONDS
    memory_limit_mb: int = msgspec.field(default=-1, name="memory_limit_MB")
    kernel: Literal["python3"] = "python3"
    files: dict[str, str | None] = {}
    fetch_files: tuple[str, ...] = ()


class SandboxFusionApi(RunApiContext):
    prefix = "sandboxfusion"

    def routes(self) -> list[Route]:
        return [
            self.route("POST", "/run_code", self.run_code),
            self.route("POST", "/run_jupyter", self.run_jupyter),
            self.route("GET", "/v1/ping", self.report_health),
        ]

    async def run_code(self, request: Request) -> Response:
        self.admit(request)
        message = await self.json_body(request, FusionRun)
        files = decode_files(message.files)
        try:
            language = await self.runs.find_language(OTHER_NAMES.get(message.language, message.language))
        except errors.InvalidRequest as error:
            return json_reply({"status": "SandboxError", "message": str(error), **_NO_RESULTS})
        program = RunRequest(
            language=language,
            code=message.code,
            stdin=(message.stdin or "").encode("utf-8", "replace"),
            files=files,
            fetch=message.fetch_files,
            compile_seconds=message.compile_timeout,
            run_seconds=message.run_timeout,
            memory_bytes=message.memory_limit_mb * MIB,
        )
        return json_reply(encode_run(await self.run(request, program)))

    async def run_jupyter(self, request: Request) -> Response:
        self.admit(request)
        message = await self.json_body(request, FusionCells)
        if len(message.files) > MAX_FILES or len(message.fetch_files) > MAX_FILES:
            raise errors.InvalidRequest(f"a request can have {MAX_FILES} files")
        return json_reply(await run_unless_disconnected(request, self._run_cells(self.owner(request), message)))

    async def _run_cells(self, owner: str, message: FusionCells) -> Json:
        began_at, seconds = time.monotonic(), self.runs.bound_seconds(message.total_timeout)
        outputs = CellOutputs(self.config.run_apis.output_bytes)
        spec = await self.runs.make_spec(owner, (seconds,), message.memory_limit_mb * MIB)
        async with self.runs.sandbox(spec) as sandbox:
            await write_files(sandbox, decode_files(message.files))
            try:
                async with asyncio.timeout(seconds):
                    finished = await run_cells(sandbox.context(), message, outputs)
            except TimeoutError:
                finished = False
            driver = _encode_driver(finished, time.monotonic() - began_at)
            if not finished:
                return {"status": "Failed", "message": "", "driver": driver, "cells": [], "files": {}}
            files = encode_files(await fetch_files(sandbox, message.fetch_files))
        return {"status": "Success", "message": "", "driver": driver, "cells": outputs.cells, "files": files}

    async def report_health(self, request: Request) -> Response:
        return json_reply("pong")

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return json_reply({"detail": str(error)}, 422 if run_api_status(error) == 400 else run_api_status(error))

    def missing_reply(self, status: int, message: str) -> Response:
        return json_reply({"detail": message}, status)


_NO_RESULTS: Json = {"compile_result": None, "run_result": None, "executor_pod_name": None, "files": {}}


def decode_files(files: dict[str, str | None]) -> tuple[tuple[str, bytes], ...]:
    """Raises InvalidRequest for content that is not base64."""
    try:
        return tuple((name, base64.b64decode(each)) for name, each in files.items() if each is not None)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("files must be base64") from None


def encode_files(files: dict[str, bytes]) -> dict[str, str]:
    return {name: base64.b64encode(content).decode() for name, content in files.items()}


def encode_run(outcome: RunOutcome) -> Json:
    stages = [each for each in (outcome.compile, outcome.run) if each is not None]
    failed = any(each.timed_out or each.exited.exit_code for each in stages)
    results = {
        "compile_result": None if outcome.compile is None else _encode_stage(outcome.compile),
        "run_result": None if outcome.run is None else _encode_stage(outcome.run),
        "files": encode_files(outcome.files),
    }
    return {"status": "Failed" if failed else "Success", "message": "", **_NO_RESULTS, **results}


def _encode_stage(stage: StageOutcome) -> Json:
    return {
        "status": "TimeLimitExceeded" if stage.timed_out else "Finished",
        "execution_time": stage.usage.wall_seconds,
        "return_code": None if stage.timed_out else stage.exited.exit_code,
        "stdout": stage.stdout,
        "stderr": stage.stderr,
    }


def _encode_driver(finished: bool, seconds: float) -> Json:
    status = "Finished" if finished else "TimeLimitExceeded"
    return {
        "status": status,
        "execution_time": seconds,
        "return_code": 0 if finished else None,
        "stdout": "",
        "stderr": "",
    }


class CellOutputs:
    """The outputs of cells as they are sent; of all together, `room` bytes of text and displays are kept."""

    def __init__(self, room: int):
        self.cells: list[Json] = []
        self._room = room

    def begin(self) -> None:
        self.cells.append({"stdout": "", "stderr": "", "display": [], "error": []})

    def add(self, event: Any) -> None:
        cell = self.cells[-1]
        match event:
            case Output():
                cell[event.stream] += event.text[: max(self._room, 0)]
                self._room -= len(event.text)
            case Display():
                shown = {mime: to_json_value(value) for mime, value in event.data.items() if "vnd.cloche" not in mime}
                self._room -= len(msgspec.json.encode(shown))
                if shown and self._room >= 0:
                    cell["display"].append(shown)
            case Raised():
                traceback = event.traceback.rstrip("\n").split("\n")
                cell["error"].append({"ename": event.name, "evalue": event.value, "traceback": traceback})


async def run_cells(context: Context, message: FusionCells, outputs: CellOutputs) -> bool:
    """Runs the cells one after another, also after an error. Whether each ended within its time."""
    for code in message.cells:
        outputs.begin()
        async with context.execute(code, timeout_seconds=message.cell_timeout or None) as cell:
            while events := await cell.next_events():
                for event in events:
                    if isinstance(event, Ended) and event.outcome in ("timed_out", "died", "out_of_memory"):
                        return False
                    outputs.add(event)
    return True
