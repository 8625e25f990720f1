"""FastGPT's code sandbox: `CODE_SANDBOX_URL`, with `CODE_SANDBOX_TOKEN` as the bearer token."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.http import Handler
from cloche.api.run_apis.calls import RESULT_FILE, call_program, decode_value
from cloche.api.run_apis.runner import RunApiContext, RunOutcome, RunRequest, run_api_status
from cloche.model import MIB, Struct

MAX_CODE_CHARACTERS = 5 * MIB
GLOBALS = ("SystemHelper.httpRequest",)
NODE_MODULES = ("buffer", "crypto", "events", "path", "querystring", "stream", "url", "util", "zlib")

Limit = Annotated[float, msgspec.Meta(gt=0)]


class FastGptLimits(Struct, rename="camel"):
    """What older releases send."""

    timeout_ms: Limit | None = None
    memory_mb: Limit | None = msgspec.field(default=None, name="memoryMB")


class FastGptRun(Struct, rename="camel"):
    """`queueId` is accepted: the quotas of the key bound how many programs run at once."""

    code: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_CODE_CHARACTERS)]
    variables: dict[str, Any] = {}
    limits: FastGptLimits = FastGptLimits()


class FastGptApi(RunApiContext):
    prefix = "fastgpt"

    def routes(self) -> list[Route]:
        return [
            self.route("POST", "/sandbox/js", self._runner_of("js")),
            self.route("POST", "/sandbox/python", self._runner_of("py")),
            self.route("GET", "/sandbox/modules", self.list_modules),
            self.route("GET", "/health", self.report_health),
        ]

    def _runner_of(self, name: str) -> Handler:
        async def run_code(request: Request) -> Response:
            self.admit(request)
            message = await self.json_body(request, FastGptRun)
            limits = message.limits
            program = RunRequest(
                language=await self.runs.find_language(name),
                code=call_program(name, "fastgpt", message.code, message.variables),
                fetch=(RESULT_FILE,),
                run_seconds=limits.timeout_ms and limits.timeout_ms / 1000,
                memory_bytes=int((limits.memory_mb or 0) * MIB),
            )
            return json_reply(encode_run(await self.run(request, program)))

        return run_code

    async def list_modules(self, request: Request) -> Response:
        packages = (await self.runs.template(self.owner(request))).packages
        names = sorted(each.partition("==")[0] for each in packages)
        return json_reply({"success": True, "data": {"js": NODE_MODULES, "python": names, "builtinGlobals": GLOBALS}})

    async def report_health(self, request: Request) -> Response:
        ready = {"total": 1, "ready": True}
        return json_reply({"status": "ok", "pools": {"js": ready, "python": ready}})

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        prefix = "Invalid request: " if isinstance(error, errors.InvalidRequest) else ""
        return json_reply({"success": False, "message": prefix + str(error)}, run_api_status(error))

    def missing_reply(self, status: int, message: str) -> Response:
        return json_reply({"success": False, "message": message}, status)


def encode_run(outcome: RunOutcome) -> Json:
    stage, result = outcome.last, decode_value(outcome.files)
    if result.present and stage.exited.exit_code == 0:
        return {"success": True, "data": {"codeReturn": result.value, "log": stage.stdout.removesuffix("\n")}}
    if stage.timed_out:
        return {"success": False, "message": f"Script execution timed out: {stage.exited.reason}"}
    last_line = stage.stderr.strip().rpartition("\n")[2]
    message = result.message or stage.exited.reason or last_line or f"exit code {stage.exited.exit_code}"
    return {"success": False, "message": message}
