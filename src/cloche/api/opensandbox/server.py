"""What the lifecycle API tells about the server: its templates, its health, and what happened to sandboxes."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import Json, format_timestamp, json_reply
from cloche.api.opensandbox import lifecycle_schema as wire
from cloche.api.opensandbox.context import OpenSandboxContext
from cloche.api.opensandbox.execd import require_query_parameter
from cloche.model import SandboxInfo, Template
from cloche.store.builds import BuiltTemplate

EVENT_SCOPES = ("runtime", "lifecycle", "all")


def server_routes(api: OpenSandboxContext) -> list[BaseRoute]:
    plane = ServerPlane(api)
    return [
        api.route("GET", "/health", plane.show_health),
        api.route("POST", "/metrics/events", plane.take_telemetry),
        api.route("GET", "/templates", plane.list_templates),
        api.route("GET", "/templates/{template:path}", plane.show_template),
        api.route("DELETE", "/templates/{template:path}", plane.remove_template),
        api.route("GET", "/sandboxes/{id}/diagnostics/events", plane.show_events),
        api.route("GET", "/sandboxes/{id}/diagnostics/logs", plane.show_logs),
    ]


class ServerPlane:
    def __init__(self, api: OpenSandboxContext):
        self._api = api
        self._engine = api.engine

    async def show_health(self, request: Request) -> Response:
        """Whether the server answers; it needs no key. `/health` of the server itself says more."""
        return json_reply({"status": "healthy"})

    async def take_telemetry(self, request: Request) -> Response:
        """What clients measure is not kept."""
        self._api.admit(request)
        await self._api.json_body(request, dict[str, Any])
        return Response(status_code=204)

    async def list_templates(self, request: Request) -> Response:
        query = wire.decode_list_query(request.query_params)
        items = await self._visible_templates(self._api.owner(request))
        return json_reply(wire.encode_page(items, page=query.page, size=query.size))

    async def show_template(self, request: Request) -> Response:
        owner, id = self._api.owner(request), request.path_params["template"]
        found = next((each for each in await self._visible_templates(owner) if each["templateId"] == id), None)
        if found is None:
            raise errors.NotFound(f"there is no template {id[:80]!r}")
        return json_reply(found)

    async def remove_template(self, request: Request) -> Response:
        """Removes a template that the owner built by another API."""
        owner, id = self._api.owner(request), request.path_params["template"]
        built = next((each for each in await self._engine.builds.templates(owner) if id in (each.id, each.name)), None)
        if built is None:
            raise errors.NotFound(f"you have built no template {id[:80]!r}; those of the host are its operator's")
        await self._engine.builds.remove(built)
        return Response(status_code=204)

    async def show_events(self, request: Request) -> Response:
        info, scope = await self._described(request)
        if scope not in EVENT_SCOPES:
            raise errors.InvalidRequest(f"scope: it is one of {', '.join(EVENT_SCOPES)}, not {scope[:80]!r}")
        return json_reply(encode_diagnostics(info, "events", scope, "\n".join(describe_events(info))))

    async def show_logs(self, request: Request) -> Response:
        info, scope = await self._described(request)
        warning = "this server keeps no output of programs: GET /command/{id}/logs of execd has that of a command"
        return json_reply({**encode_diagnostics(info, "logs", scope, ""), "warnings": [warning]})

    async def _described(self, request: Request) -> tuple[SandboxInfo, str]:
        """The sandbox, also one that has ended, and the requested scope."""
        owner = self._api.owner(request)
        info = await self._engine.describe(self._api.sandbox_id(request), owner)
        return info, require_query_parameter(request, "scope")

    async def _visible_templates(self, owner: str) -> list[Json]:
        """The owner's own, then those of the host."""
        own = [encode_template(each.id, each) for each in await self._engine.builds.templates(owner)]
        newest = {each.name: each for each in reversed(await self._engine.templates())}
        return [*own, *(encode_template(name, newest[name]) for name in sorted(newest))]


def encode_template(id: str, template: Template | BuiltTemplate) -> Json:
    """A template, which is always built: `POST /sandboxes` takes its id and its name."""
    made = format_timestamp(template.created_at)
    return {
        "templateId": id,
        "image": template.name,
        "publish": "",
        "format": "native",
        "status": {"phase": "Succeeded"},
        "createdAt": made,
        "updatedAt": made,
    }


def encode_diagnostics(info: SandboxInfo, kind: str, scope: str, content: str) -> Json:
    return {
        "sandboxId": info.id,
        "kind": kind,
        "scope": scope,
        "delivery": "inline",
        "contentType": "text/plain; charset=utf-8",
        "content": content,
        "contentLength": len(content.encode()),
        "truncated": False,
    }


def describe_events(info: SandboxInfo) -> list[str]:
    """A line for each change of a sandbox's state."""
    lines = [f"{format_timestamp(info.created_at)} created from {info.template}"]
    if info.paused_at is not None:
        lines.append(f"{format_timestamp(info.paused_at)} paused")
    if info.ended_at is not None:
        lines.append(f"{format_timestamp(info.ended_at)} ended: {info.end_reason or 'its host process died'}")
    return lines
