"""The server application: one port, one id space, all dialects over one engine."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cloche import errors
from cloche.api.aca import AzureSessions
from cloche.api.admin import AdminApi, OwnerErasure
from cloche.api.auth import Gatekeeper, is_loopback
from cloche.api.body_memory import BODY_MEMORY_STATE, BodyMemory
from cloche.api.console import Console, ConsoleContext
from cloche.api.e2b import E2b
from cloche.api.e2b.port_target import ID_HEADER, PORT_HEADER, is_port_health, is_sandbox_host
from cloche.api.jupyter import Jupyter
from cloche.api.librechat import LibreChatApi
from cloche.api.native import NativeApi
from cloche.api.open_terminal import OpenTerminal
from cloche.api.openai import OpenAi
from cloche.api.opensandbox import OpenSandbox
from cloche.api.requests import RateLimitHeaders, RequestAudit, RequestTracker
from cloche.api.run_apis import make_run_apis
from cloche.api.system import SystemApi, error_reply
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.operations.audit import NO_PRINCIPAL
from cloche.engine.operations.health import Health
from cloche.engine.principal import current_principal
from cloche.gateway.gateway import Gateway
from cloche.mcp.http import McpDialect
from cloche.model import Principal
from cloche.store.keys import StoredKeys

LOCAL_ADMIN = Principal(owner="local", role="admin")
UNKNOWN_DIALECT = "none"  # the dialect of requests that no dialect serves


class ServerApp:
    """The ASGI application. Each dialect has a prefix; E2B's sandboxes are also reached by Host name and headers."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        gatekeeper: Gatekeeper,
        config: Config,
        secret: bytes,
        *,
        keys: StoredKeys,
        health: Health,
    ):
        self._domain = config.server.domain
        self._body_memory = BodyMemory()
        self._max_body_bytes = config.server.upload_bytes
        self._traffic = RequestTracker(RequestAudit(engine.audit_log), RateLimitHeaders(engine.quotas))
        self.system = SystemApi(
            engine, gateway.counters, health, self._traffic, gatekeeper, local=is_loopback(config.server.host)
        )
        keys.on_event = lambda what, owner, id: engine.audit_log.record(
            what, owner, id=id, who=current_principal() or NO_PRINCIPAL
        )
        engine.quotas.on_change = lambda tenant, quota: engine.audit_log.record(
            "quota.set", tenant.owner, id=tenant.key_id, about=quota, who=current_principal() or NO_PRINCIPAL
        )
        keys.refreshed = self._traffic.keep
        self.mcp = McpDialect(engine, gatekeeper, config)
        erasing = OwnerErasure(engine, gateway, keys, self._traffic, self.mcp.end_all)
        self._e2b = E2b(engine, gatekeeper, config, secret)
        behind: dict[str, ASGIApp] = {
            "api": NativeApi(engine, gatekeeper, config),
            "v1": OpenAi(engine, gateway, gatekeeper, config),
            "admin": AdminApi(keys, gateway.gateway_store.steps, gatekeeper, engine, erasing),
        }
        house = ConsoleContext(engine, gateway, gatekeeper, config, keys=keys, health=health, traffic=self._traffic)
        self.ui = Console(house, behind)
        self._prefixes: dict[str, ASGIApp] = {
            "e2b": self._e2b,
            **behind,
            "opensandbox": OpenSandbox(engine, gatekeeper, config, secret),
            "aca": AzureSessions(engine, gatekeeper, config),
            "jupyter": Jupyter(engine, gatekeeper, config),
            "open-terminal": OpenTerminal(engine, gatekeeper, config),
            "librechat": LibreChatApi(engine, gateway.gateway_store, gatekeeper, config, secret),
            **make_run_apis(engine, gatekeeper, config),
            "mcp": self.mcp,
            "health": self.system,
            "ready": self.system,
            "metrics": self.system,
            "ui": self.ui,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return
        scope.setdefault("state", {})["max_body_bytes"] = self._max_body_bytes
        scope["state"][BODY_MEMORY_STATE] = self._body_memory
        dialect = self._dialect_of(scope)
        await self._traffic.follow(dialect, self._prefixes.get(dialect, _reply_not_found), scope, receive, send)

    def _dialect_of(self, scope: Scope) -> str:
        """The dialect. Headers never route a path of ours to a sandbox: a cache keeps one answer for a path."""
        prefix = scope["path"].lstrip("/").partition("/")[0]
        if prefix in self._prefixes:
            headers = Headers(scope=scope)
            selects = ID_HEADER in headers or PORT_HEADER in headers
            own_name = is_sandbox_host(headers.get("host", ""), self._domain, has_headers=selects)
            return "e2b" if own_name or (selects and is_port_health(scope["path"], headers)) else prefix
        return "e2b" if self._e2b.claims_request(scope) else UNKNOWN_DIALECT


class ControlSocketApp:
    """The same application for the control socket, as its admin: the file's mode is the access check."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["principal"] = LOCAL_ADMIN
        await self._app(scope, receive, send)


async def _reply_not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await error_reply(errors.NotFound("no such route"))(scope, receive, send)
