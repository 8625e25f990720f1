"""Dify's sandbox: `CODE_EXECUTION_ENDPOINT`, with `CODE_EXECUTION_API_KEY` as `X-Api-Key`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cloche import errors
from cloche.api.dialect import Json, json_reply
from cloche.api.programs import ProgramLanguage
from cloche.api.run_apis.runner import RunApiContext, RunOutcome, RunRequest, run_api_status
from cloche.model import Struct

LANGUAGES = ("python3", "nodejs")


class DifyRun(Struct):
    language: str
    code: str
    preload: str = ""  # prepares Dify's own workers; that server ignores it, too, unless it is configured
    enable_network: bool = False


class DifyApi(RunApiContext):
    prefix = "dify"

    def routes(self) -> list[Route]:
        return [
            self.route("POST", "/v1/sandbox/run", self.run_code),
            self.route("GET", "/v1/sandbox/dependencies", self.list_dependencies),
            self.route("GET", "/v1/sandbox/dependencies/refresh", self.list_dependencies),
            self.route("POST", "/v1/sandbox/dependencies/update", self.unsupported("packages belong to the template")),
            self.route("GET", "/health", self.report_health),
        ]

    async def run_code(self, request: Request) -> Response:
        self.admit(request)
        message = await self.json_body(request, DifyRun)
        program = RunRequest(
            language=await self._find_language(message.language), code=message.code, network=message.enable_network
        )
        return json_reply(_success(encode_run(await self.run(request, program))))

    async def list_dependencies(self, request: Request) -> Response:
        packages = (await self.runs.template(self.owner(request))).packages
        pairs = (each.partition("==") for each in packages)
        return json_reply(_success({"dependencies": [{"name": name, "version": each} for name, _, each in pairs]}))

    async def report_health(self, request: Request) -> Response:
        return json_reply("ok")

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        status = run_api_status(error)
        answered = 200 if status == 400 else 503 if status == 429 else status
        return json_reply({"code": -status, "message": str(error), "data": None}, answered)

    def missing_reply(self, status: int, message: str) -> Response:
        return json_reply({"code": -status, "message": message, "data": None}, status)

    async def _find_language(self, name: str) -> ProgramLanguage:
        if name not in LANGUAGES:
            raise errors.InvalidRequest("unsupported language")
        return await self.runs.find_language(name)


def _success(data: Json) -> Json:
    return {"code": 0, "message": "success", "data": data}


def encode_run(outcome: RunOutcome) -> Json:
    """`error` is empty where the program ended with 0, whatever it wrote to stderr."""
    stage = outcome.last
    code, reason = stage.exited.exit_code, stage.exited.reason
    failed = f"process exited with code {code}"
    error = "\n".join(filter(None, (failed, reason, stage.stderr))) if code else ""
    return {"stdout": stage.stdout, "stderr": stage.stderr, "error": error, "exit_code": code}
