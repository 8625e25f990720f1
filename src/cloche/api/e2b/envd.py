"""envd (port 49983): its HTTP endpoints and its two Connect services. Tokens are checked before it comes here."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cloche import errors
from cloche.api.e2b import connect, filesystem, process
from cloche.api.e2b.compose import compose
from cloche.api.e2b.files_http import FilesHttp
from cloche.api.e2b.replies import AWAY, error_reply, json_reply
from cloche.api.e2b.residents import Resident, Residents, away_reply
from cloche.api.http import Edge, Handler, status_of
from cloche.config import Config
from cloche.model import MIB


def routes(residents: Residents, config: Config) -> list[BaseRoute]:
    plane, services, files = Envd(), Services(), FilesHttp(config.server.upload_bytes)

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(path, Edge(plane, handler), methods=[method])

    return [
        route("/health", "GET", plane.health),
        route("/envs", "GET", plane.envs),
        route("/metrics", "GET", plane.metrics),
        route("/files", "GET", files.read),
        route("/files", "POST", files.write),
        route("/files/compose", "POST", compose),
        *filesystem.routes(services),
        *process.routes(services),
    ]


class Envd:
    """The HTTP endpoints that are not about files, and the errors of all of them."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        if isinstance(error, AWAY):
            return away_reply(error, request)
        return error_reply(status_of(error), str(error))

    async def health(self, request: Request) -> Response:
        return Response(status_code=204)

    async def envs(self, request: Request) -> Response:
        return json_reply(_resident(request).sandbox.spec.env)

    async def metrics(self, request: Request) -> Response:
        sandbox = _resident(request).sandbox
        sample, limits = await sandbox.meter.latest(), sandbox.limits
        return json_reply(
            {
                "ts": int(sample.at),
                "cpu_count": max(round(limits.cpus), 1),
                "cpu_used_pct": round(sample.cpu_percent, 2),
                "mem_total": limits.memory_bytes,
                "mem_used": sample.memory_bytes,
                "mem_cache": sample.cache_bytes,
                "mem_total_mib": limits.memory_bytes // MIB,
                "mem_used_mib": sample.memory_bytes // MIB,
                "disk_used": sample.space_bytes,
                "disk_total": limits.space_bytes,
            }
        )


class Services:
    """The Connect services' errors."""

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return connect.render_error(error, request)


def _resident(request: Request) -> Resident:
    resident: Resident = request.scope["state"]["resident"]
    return resident
