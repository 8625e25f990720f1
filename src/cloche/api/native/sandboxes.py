"""Sandboxes and their contexts are made, found, listed and ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.http import Stream, has_left, unless_disconnected, while_wanted, whole_body
from cloche.api.native.context import Door, body_of, query_of, reply
from cloche.api.native.runs import event_stream
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.history import history_of, notebook_of
from cloche.engine.sandboxes.create import all_made
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import Limits, SandboxSpec, check_seconds
from cloche.network_policy import NetworkPolicy, with_secrets
from cloche.notebook import MIME
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


# Sandboxes are paused and resumed.


class Pausing:
    def __init__(self, door: Door):
        self._door = door

    async def pause(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.Pause)
        return reply(await self._door.engine.pause(id, owner, memory=asked.memory))

    async def resume(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        seconds = (await body_of(request, requests.Resume)).timeout_seconds
        check_seconds("timeout_seconds", seconds)
        sandbox = await self._door.engine.resume(id, owner, seconds=seconds)
        return reply(sandbox.info if seconds is None else sandbox.renew(seconds))  # it may have been running


# Snapshots of sandboxes, and forks of them.


class Snapshots:
    def __init__(self, door: Door):
        self._door = door

    async def make(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.MakeSnapshot)
        return reply((await self._door.engine.snapshot(id, owner, name=asked.name)).info, 201)

    async def fork(self, request: Request) -> Response:
        id, owner = await self._door.named(request)
        asked = await body_of(request, requests.Fork)
        check_seconds("timeout_seconds", asked.timeout_seconds)
        made = await all_made(await self._door.engine.fork(id, owner, asked.count, seconds=asked.timeout_seconds))
        if has_left(request):
            await asyncio.gather(*(each.kill("whoever asked for it left") for each in made))
            raise ClientDisconnect
        return reply([each.info for each in made], 201)

    async def list(self, request: Request) -> Response:
        principal = self._door.admit(request)
        asked = query_of(request, requests.SnapshotsQuery)
        if asked.all and not self._door.is_operator(request):
            raise errors.Forbidden("all snapshots are for the server's operator, on its control socket")
        found = await self._door.engine.snapshots.list(None if asked.all else principal.owner, asked.sandbox)
        return reply([each.info for each in found])

    async def get(self, request: Request) -> Response:
        owner = self._door.owner(request)
        return reply((await self._door.engine.snapshots.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._door.owner(request)
        found = await self._door.engine.snapshots.get(request.path_params["ref"], owner)
        await self._door.engine.snapshots.remove(found.id, found.owner)
        return Response(status_code=204)


# Named volumes: made, listed, looked at and removed. What is in them, sandboxes read and write.


class Volumes:
    def __init__(self, door: Door):
        self._door = door

    async def make(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        asked = await body_of(request, requests.MakeVolume)
        return reply((await self._door.engine.volumes.create(asked.name, owner)).info, 201)

    async def list(self, request: Request) -> Response:
        return reply([each.info for each in await self._door.engine.volumes.list(self._door.admit(request).owner)])

    async def get(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        return reply((await self._door.engine.volumes.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._door.admit(request).owner
        await self._door.engine.volumes.remove(request.path_params["ref"], owner)
        return Response(status_code=204)


# Contexts are taken back to checkpoints, and copied. All of it waits for its turn, unless its client leaves.


class Branching:
    def __init__(self, door: Door):
        self._door = door

    async def checkpoint(self, request: Request) -> Response:
        context = await self._context(request)
        await whole_body(request)
        mark = await unless_disconnected(request, context.checkpoint())
        if has_left(request):
            with contextlib.suppress(errors.ClocheError):
                context.forget(mark.id)  # nobody would ever know its id
            raise ClientDisconnect
        return reply(mark, 201)

    async def list(self, request: Request) -> Response:
        return reply((await self._context(request)).marks())

    async def forget(self, request: Request) -> Response:
        (await self._context(request)).forget(request.path_params["checkpoint"])
        return Response(status_code=204)

    async def rollback(self, request: Request) -> Response:
        context = await self._context(request)
        mark = (await body_of(request, requests.Rollback)).checkpoint
        await unless_disconnected(request, context.rollback(mark))
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        context = sandbox.context(request.path_params["context"])
        asked = await body_of(request, requests.ForkContext)
        made = await unless_disconnected(request, context.fork(asked.count))
        if has_left(request):
            for each in made:
                with contextlib.suppress(errors.ClocheError):
                    sandbox.remove_context(each.id)
            raise ClientDisconnect
        return reply([described(each) for each in made], 201)

    async def _context(self, request: Request) -> Context:
        return (await self._door.sandbox(request)).context(request.path_params["context"])


# What is in a context, and what ran in a sandbox: variables, history, notebook.


class Inspecting:
    def __init__(self, door: Door):
        self._door = door

    async def variables(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        found = await sandbox.context(request.path_params["context"]).variables()
        return reply(responses.VariablesInfo(variables=found, more=found.more))

    async def history(self, request: Request) -> Response:
        sandbox, context = await self._asked(request)
        found = history_of(sandbox, context)
        return reply(responses.HistoryInfo(cells=found, dropped=found.dropped))

    async def notebook(self, request: Request) -> Response:
        sandbox, context = await self._asked(request)
        return Response(await notebook_of(sandbox, context), media_type=MIME)

    async def _asked(self, request: Request) -> tuple[Sandbox, str | None]:
        return await self._door.sandbox(request), query_of(request, requests.HistoryQuery).context


# What a sandbox may reach, and what its programs tried.


class Network:
    def __init__(self, door: Door):
        self._door = door

    async def get(self, request: Request) -> Response:
        return _described(await self._door.sandbox(request))

    async def replace(self, request: Request) -> Response:
        sandbox = await self._door.sandbox(request)
        asked = await body_of(request, requests.SetNetwork)
        await self._door.engine.networks.replace(sandbox, _policy(asked, sandbox.network.policy))
        return _described(sandbox)

    async def log(self, request: Request) -> Response:
        network = (await self._door.sandbox(request)).network
        return reply(responses.NetworkLogged(entries=network.log, dropped=network.dropped))


def _policy(asked: requests.SetNetwork, present: NetworkPolicy) -> NetworkPolicy:
    """Secrets that nobody speaks of stay: their values cannot be read to be sent again."""
    policy = requests.policy_asked(asked, asked.secrets or ())
    return policy if asked.secrets is not None else with_secrets(policy, present.secrets)


def _described(sandbox: Sandbox) -> Response:
    return reply(requests.info_of(sandbox.network.policy))
