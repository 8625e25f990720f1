"""Sandboxes and their contexts are made, found, listed and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import Stream, has_left, while_wanted
from cloche.api.native.door import Door, body_of, query_of, reply
from cloche.api.native.sse import event_stream
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import Limits, SandboxSpec, check_seconds
from cloche.network_policy import NetworkPolicy
from cloche.protocol import requests, responses


class Sandboxes:
    def __init__(self, door: Door):
        self._door = door

    async def create(self, request: Request) -> Response:
        principal = self._door.admit(request)
        asked = await body_of(request, requests.CreateSandbox)
        engine, spec = self._door.engine, await self._spec(asked, principal.owner)
        sandbox = await while_wanted(request, engine, engine.create(spec))
        if has_left(request):
            await sandbox.kill("whoever asked for it left")  # nobody would ever know its id
            raise ClientDisconnect
        return reply(sandbox.info, 201)

    async def _spec(self, asked: requests.CreateSandbox, owner: str) -> SandboxSpec:
        check_seconds("timeout_seconds", asked.timeout_seconds)
        spec = SandboxSpec(
            template=asked.template,
            env=asked.env,
            metadata=asked.metadata,
            lifetime_seconds=asked.timeout_seconds or self._door.config.lifetime.max_seconds,
            network=_network(asked),
            owner=owner,
            on_deadline=asked.on_timeout,
            pause_memory=asked.pause_memory,
            auto_resume=asked.auto_resume,
            volumes=asked.volumes,
        )
        if asked.limits is None:
            return spec
        return msgspec.structs.replace(spec, limits=await self._limits(asked.limits, spec))

    async def _limits(self, asked: requests.LimitsAsked, spec: SandboxSpec) -> Limits:
        given = {name: value for name in Limits.__struct_fields__ if (value := getattr(asked, name)) is not None}
        return msgspec.structs.replace(await self._door.engine.limits_of(spec.template, spec.owner), **given)

    async def list(self, request: Request) -> Response:
        principal = self._door.admit(request)
        asked = query_of(request, requests.SandboxesQuery)
        if asked.all and not self._door.is_operator(request):
            raise errors.Forbidden("all sandboxes are for the server's operator, on its control socket")
        found = self._door.engine.list(None if asked.all else principal.owner)
        return reply([each for each in found if asked.state in (None, each.state)])

    async def get(self, request: Request) -> Response:
        if query_of(request, requests.SandboxQuery).running:
            return reply((await self._door.sandbox(request)).info)
        owner = self._door.owner(request)
        return reply(await self._door.engine.describe(request.path_params["id"], owner))

    async def renew(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.Renew)
        return reply(sandbox.renew(asked.seconds))

    async def kill(self, request: Request) -> Response:
        await self._door.engine.kill(*await self._door.named(request))
        return Response(status_code=204)

    async def hold(self, request: Request) -> Stream:
        sandbox = await self._door.sandbox(request)
        return event_stream(request, _held(self._door.engine, sandbox))

    # -- contexts

    async def list_contexts(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        return reply([described(each) for each in sandbox.contexts])

    async def create_context(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.CreateContext)
        return reply(described(await sandbox.create_context(language=asked.language, cwd=asked.cwd)), 201)

    async def get_context(self, request: Request) -> Response:
        return reply(described(await self._context(request)))

    async def restart_context(self, request: Request) -> Response:
        await (await self._context(request)).restart()
        return Response(status_code=204)

    async def interrupt_context(self, request: Request) -> Response:
        return reply(responses.Interrupted(interrupted=(await self._context(request)).interrupt()))

    async def remove_context(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        sandbox.remove_context(request.path_params["context"])
        return Response(status_code=204)

    async def _context(self, request: Request) -> Context:
        return (await self._door.sandbox(request)).context(request.path_params["context"])


def _network(asked: requests.CreateSandbox) -> NetworkPolicy | None:
    if asked.network is not None:
        return requests.policy_asked(asked.network, asked.secrets)
    if asked.secrets:
        raise errors.InvalidRequest("secrets need a network that allows their domains: send network with allow, too")
    return None


async def _held(engine: Engine, sandbox: Sandbox) -> AsyncGenerator[Event, None]:
    try:
        yield responses.Watching()
        await sandbox.wait_ended()
        if sandbox.record.state == "paused":  # without its memory: it may yet live in another cell
            await asyncio.Event().wait()
    finally:
        with contextlib.suppress(errors.ClocheError):
            await engine.kill(sandbox.id, sandbox.spec.owner, "whoever held it left")


def described(context: Context) -> responses.ContextInfo:
    return responses.ContextInfo(id=context.id, language=context.language, cwd=context.cwd)
