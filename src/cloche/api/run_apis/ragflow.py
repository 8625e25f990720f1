"""RAGFlow's sandbox executor, for its provider `self_managed`. The client sends no key: it is in the URL."""

from __future__ import annotations

import base64
import binascii
import posixpath
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.run_apis.calls import ARTIFACTS, RESULT_FILE, call_program, decode_value
from cloche.api.run_apis.runner import RunApiContext, RunOutcome, RunRequest, run_api_status
from cloche.model import Struct

LANGUAGES = {"python": "py", "nodejs": "js"}
ARTIFACT_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".svg": "image/svg+xml",
    ".pdf": "application/pdf",
    ".csv": "text/csv",
    ".json": "application/json",
    ".html": "text/html",
}


class RagFlowRun(Struct):
    code_b64: str
    language: Literal["python", "nodejs"] = "python"
    arguments: dict[str, Any] | None = None


class RagFlowApi(RunApiContext):
    prefix = "ragflow"

    def routes(self) -> list[Route]:
        return [
            self.route("POST", "/run", self.run_code),
            self.route("GET", "/healthz", self.report_health),
            self.route("GET", "/", self.report_health),
        ]

    async def run_code(self, request: Request) -> Response:
        self.admit(request)
        message = await self.json_body(request, RagFlowRun)
        name = LANGUAGES[message.language]
        code = call_program(name, "ragflow", _decode_code(message.code_b64), message.arguments or {})
        program = RunRequest(
            language=await self.runs.find_language(name),
            code=code,
            name="runner.py",
            fetch=(RESULT_FILE,),
            fetch_below=ARTIFACTS,
        )
        return json_reply(encode_run(await self.run(request, program)))

    async def report_health(self, request: Request) -> Response:
        return json_reply({"status": "ok"})

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, (errors.QuotaExceeded, errors.Busy)):
            refused = {"status": "program_runner_error", "stdout": "", "stderr": str(error), "exit_code": -429}
            return json_reply({**refused, "detail": "Too many requests"})  # with 200, as that server does
        return json_reply({"detail": str(error)}, 422 if run_api_status(error) == 400 else run_api_status(error))

    def missing_reply(self, status: int, message: str) -> Response:
        return json_reply({"detail": message}, status)


def _decode_code(encoded: str) -> str:
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("code_b64 must be base64 of UTF-8") from None


def encode_run(outcome: RunOutcome) -> Json:
    stage = outcome.last
    usage = {
        "time_used_ms": stage.usage.wall_seconds * 1000,
        "memory_used_kb": stage.usage.memory_peak_bytes / 1024,
        "artifacts": [],
        "result": None,
    }
    if stage.timed_out:
        return {**_limit_reply("time", "Execution timeout", -124), **usage}
    if stage.out_of_memory or stage.exited.exit_code == 137:
        return {**_limit_reply("memory", "Memory limit exceeded (killed by OOM)", -137), **usage}
    output = {"stdout": stage.stdout, "stderr": stage.stderr, "exit_code": stage.exited.exit_code}
    if stage.exited.exit_code:
        return {"status": "program_error", **output, "stdout": "", "runtime_error_type": "nonzero_exit", **usage}
    result = decode_value(outcome.files)
    structured = {"present": True, "value": result.value, "type": "json"} if result.present else None
    return {"status": "success", **output, **usage, "artifacts": _encode_artifacts(outcome.files), "result": structured}


def _limit_reply(kind: str, message: str, code: int) -> Json:
    """A program that was stopped at a limit."""
    stopped = {"status": "resource_limit_exceeded", "resource_limit_type": kind}
    return {**stopped, "stdout": "", "stderr": message, "exit_code": code}


def _encode_artifacts(files: dict[str, bytes]) -> list[Json]:
    found = []
    for path, content in files.items():
        directory, _, name = path.rpartition("/")
        mime = ARTIFACT_TYPES.get(posixpath.splitext(name)[1].lower())
        if directory == ARTIFACTS and mime is not None and content:
            encoded = base64.b64encode(content).decode()
            found.append({"name": name, "mime_type": mime, "size": len(content), "content_b64": encoded})
    return found
