"""The Jupyter dialect as one ASGI application."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import DialectRouter, json_reply
from cloche.api.http import create_unless_disconnected, strip_prefix
from cloche.api.jupyter.channels import KernelSockets
from cloche.api.jupyter.contents import ContentRoutes
from cloche.api.jupyter.context import JUPYTER_PREFIX, JupyterContext
from cloche.api.jupyter.kernels import DEFAULT_KERNEL, format_time, kernel_model
from cloche.api.jupyter.login import JupyterLogins
from cloche.api.jupyter.sessions import SessionRoutes
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.languages import LANGUAGES
from cloche.model import Struct

BASES = ("", "/in/{sandbox}")  # of all routes: kernels and sessions are found by their ids alone
JUPYTER_VERSION = "2.21.1"  # of the Jupyter Server whose routes these are


class KernelRequest(Struct):
    """The body of `POST /api/kernels`, which may be empty."""

    name: str | None = None
    path: str | None = None
    env: dict[str, str] = {}


class KernelRoutes:
    def __init__(self, api: JupyterContext):
        self._api = api

    def routes_at(self, base: str) -> list[BaseRoute]:
        route, kernel = self._api.route, base + "/api/kernels/{kernel}"
        return [
            route("GET", base + "/api/kernels", self.list),
            route("POST", base + "/api/kernels", self.start),
            route("GET", kernel, self.get),
            route("DELETE", kernel, self.delete),
            route("POST", kernel + "/interrupt", self.interrupt),
            route("POST", kernel + "/restart", self.restart),
            WebSocketRoute(kernel + "/channels", KernelSockets(self._api)),
            route("GET", base + "/api", self.tell_version),
            route("GET", base + "/api/kernelspecs", self.list_specs),
            route("GET", base + "/api/kernelspecs/{name}", self.get_spec),
            route("GET", base + "/api/me", self.tell_identity),
            route("GET", base + "/api/status", self.tell_status),
        ]

    async def list(self, request: Request) -> Response:
        return json_reply([kernel_model(each) for each in self._api.kernels.list(self._api.owner(request))])

    async def start(self, request: Request) -> Response:
        self._api.admit(request)
        message = await self._api.json_body(request, KernelRequest)
        making = self._api.start_kernel(request, message.name or DEFAULT_KERNEL, message.env)
        kernel = await create_unless_disconnected(request, self._api.engine, making)
        return json_reply(kernel_model(kernel), 201, {"location": f"{JUPYTER_PREFIX}/api/kernels/{kernel.id}"})

    async def get(self, request: Request) -> Response:
        return json_reply(kernel_model(self._api.kernel(request)))

    async def delete(self, request: Request) -> Response:
        await self._api.kernels.end(self._api.kernel(request))
        return Response(status_code=204)

    async def interrupt(self, request: Request) -> Response:
        await self._api.kernel(request).interrupt()
        return Response(status_code=204)

    async def restart(self, request: Request) -> Response:
        kernel = self._api.kernel(request)
        await kernel.restart()
        return json_reply(kernel_model(kernel))

    # -- the server

    async def tell_version(self, request: Request) -> Response:
        return json_reply({"version": JUPYTER_VERSION})

    async def list_specs(self, request: Request) -> Response:
        self._api.admit(request)
        return json_reply({"default": DEFAULT_KERNEL, "kernelspecs": kernelspecs()})

    async def get_spec(self, request: Request) -> Response:
        self._api.admit(request)
        name = request.path_params["name"]
        if (spec := kernelspecs().get(name)) is None:
            raise errors.NotFound(f"Kernel spec {name} not found")
        return json_reply(spec)

    async def tell_identity(self, request: Request) -> Response:
        owner = self._api.owner(request)
        identity = {"username": owner, "name": owner, "display_name": owner, "initials": owner[:2].upper()}
        return json_reply({"identity": {**identity, "avatar_url": None, "color": None}, "permissions": {}})

    async def tell_status(self, request: Request) -> Response:
        kernels = self._api.kernels.list(self._api.owner(request))
        last = max((each.last_activity for each in kernels), default=self._api.started_at)
        return json_reply(
            {
                "connections": sum(each.connections for each in kernels),
                "kernels": len(kernels),
                "last_activity": format_time(last),
                "started": format_time(self._api.started_at),
            }
        )


def kernelspecs() -> dict[str, Any]:
    """One kernelspec for each language of kernels."""
    return {
        about.kernel_name: {
            "name": about.kernel_name,
            "spec": {
                "argv": [],
                "env": {},
                "display_name": f"{about.kernel_title} (Cloche)",
                "language": language,
                "interrupt_mode": "message",
                "metadata": {},
            },
            "resources": {},
        }
        for language, about in LANGUAGES.items()
    }


class Jupyter:
    """Serves requests under `/jupyter`, and `/jupyter/in/NAME`."""

    def __init__(self, engine: Engine, gatekeeper: Gatekeeper, config: Config):
        api = JupyterContext(engine, gatekeeper, config)
        self._logins = JupyterLogins(gatekeeper)
        parts = (KernelRoutes(api), SessionRoutes(api), ContentRoutes(api))
        routes = [
            *(route for base in BASES for part in parts for route in part.routes_at(base)),
            *(route for base in BASES for route in self._login_routes(api, base)),
        ]
        self._router = DialectRouter(routes, _missing_route_reply)

    def _login_routes(self, api: JupyterContext, base: str) -> list[BaseRoute]:
        return [
            api.route("GET", base + "/login", self._logins.show),
            api.route("POST", base + "/login", self._logins.enter),
            api.route("GET", base + "/logout", self._logins.leave),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        strip_prefix(scope, (JUPYTER_PREFIX,))
        self._logins.present_key(scope)
        await self._router(scope, receive, send)


def _missing_route_reply(status: int, what: str) -> Response:
    return json_reply({"message": what, "reason": None}, status)
