"""Sandboxes and their contexts: create, find, list and end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from cloche import errors
from cloche.api.dialect import json_reply
from cloche.api.http import (
    MAX_INLINE_BYTES,
    StreamResponse,
    create_unless_disconnected,
    has_client_disconnected,
    read_whole_body,
    run_unless_disconnected,
)
from cloche.api.native.context import NativeContext, decode_request_body, decode_request_query
from cloche.api.native.runs import event_stream_response
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.history import export_notebook, read_history
from cloche.engine.sandboxes.create import require_all_forks
from cloche.engine.sandboxes.endings import CLIENT_DISCONNECTED
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.events import Event
from cloche.model import Limits, SandboxSpec, check_seconds
from cloche.network_policy import NetworkPolicy, with_usable_secrets
from cloche.notebook import NOTEBOOK_MIME
from cloche.protocol import requests, responses


class NativeSandboxes:
    def __init__(self, api: NativeContext):
        self._api = api

    async def create(self, request: Request) -> Response:
        principal = self._api.admit(request)
        message = await decode_request_body(request, requests.CreateSandbox)
        engine, spec = self._api.engine, await self._spec_from_request(message, principal.owner)
        sandbox = await create_unless_disconnected(request, engine, engine.create(spec))
        if has_client_disconnected(request):
            await sandbox.kill(CLIENT_DISCONNECTED)  # no client would ever know its id
            raise ClientDisconnect
        return json_reply(sandbox.info, 201)

    async def _spec_from_request(self, message: requests.CreateSandbox, owner: str) -> SandboxSpec:
        check_seconds("timeout_seconds", message.timeout_seconds)
        spec = SandboxSpec(
            template=message.template,
            env=message.env,
            metadata=message.metadata,
            lifetime_seconds=message.timeout_seconds or self._api.config.lifetime.max_seconds,
            network=_network_from_request(message),
            owner=owner,
            on_deadline=message.on_timeout,
            pause_memory=message.pause_memory,
            auto_resume=message.auto_resume,
            volumes=message.volumes,
        )
        if message.limits is None:
            return spec
        return msgspec.structs.replace(spec, limits=await self._limits_from_request(message.limits, spec))

    async def _limits_from_request(self, request: requests.LimitsRequest, spec: SandboxSpec) -> Limits:
        given = {name: value for name in Limits.__struct_fields__ if (value := getattr(request, name)) is not None}
        return msgspec.structs.replace(await self._api.engine.limits_of(spec.template, spec.owner), **given)

    async def list(self, request: Request) -> Response:
        principal = self._api.admit(request)
        query = decode_request_query(request, requests.SandboxesQuery)
        if query.all and not self._api.is_operator(request):
            raise errors.Forbidden("all sandboxes are for the server's operator, on its control socket")
        found = self._api.engine.list(None if query.all else principal.owner)
        return json_reply([each for each in found if query.state in (None, each.state)])

    async def get(self, request: Request) -> Response:
        if decode_request_query(request, requests.SandboxQuery).running:
            return json_reply((await self._api.sandbox(request)).info)
        owner = self._api.visible_owner(request)
        return json_reply(await self._api.engine.describe(request.path_params["id"], owner))

    async def renew(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        message = await decode_request_body(request, requests.RenewRequest)
        return json_reply(sandbox.renew(message.seconds))

    async def kill(self, request: Request) -> Response:
        await (await self._api.handle(request)).kill()
        return Response(status_code=204)

    async def pause(self, request: Request) -> Response:
        handle = await self._api.handle(request)
        message = await decode_request_body(request, requests.PauseRequest)
        return json_reply(await handle.pause(memory=message.memory))

    async def resume(self, request: Request) -> Response:
        handle = await self._api.handle(request)
        seconds = (await decode_request_body(request, requests.ResumeRequest)).timeout_seconds
        check_seconds("timeout_seconds", seconds)
        sandbox = await handle.resume(seconds=seconds)
        return json_reply(sandbox.info if seconds is None else sandbox.renew(seconds))  # it may have been running

    async def hold(self, request: Request) -> StreamResponse:
        sandbox = await self._api.sandbox(request)
        return event_stream_response(request, _hold_until_disconnected(self._api.engine, sandbox))

    # -- contexts

    async def list_contexts(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        return json_reply([encode_context_info(each) for each in sandbox.contexts])

    async def create_context(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        message = await decode_request_body(request, requests.CreateContextRequest)
        return json_reply(
            encode_context_info(await sandbox.create_context(language=message.language, cwd=message.cwd)), 201
        )

    async def get_context(self, request: Request) -> Response:
        return json_reply(encode_context_info(await self._context_from_path(request)))

    async def restart_context(self, request: Request) -> Response:
        await (await self._context_from_path(request)).restart()
        return Response(status_code=204)

    async def interrupt_context(self, request: Request) -> Response:
        return json_reply(
            responses.InterruptedResponse(interrupted=(await self._context_from_path(request)).interrupt())
        )

    async def remove_context(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        sandbox.remove_context(request.path_params["context"])
        return Response(status_code=204)

    async def _context_from_path(self, request: Request) -> Context:
        return (await self._api.sandbox(request)).context(request.path_params["context"])


def _network_from_request(message: requests.CreateSandbox) -> NetworkPolicy | None:
    if message.network is not None:
        return requests.request_to_policy(message.network, message.secrets)
    if message.secrets:
        raise errors.InvalidRequest("secrets need a network that allows their domains: send network with allow, too")
    return None


async def _hold_until_disconnected(engine: Engine, sandbox: Sandbox) -> AsyncGenerator[Event, None]:
    try:
        yield responses.WatchingMessage()
        await sandbox.wait_ended()
        if sandbox.record.state == "paused":  # without its memory: it may yet live in another cell
            await asyncio.Event().wait()
    finally:
        with contextlib.suppress(errors.ClocheError):
            await engine.kill(sandbox.id, sandbox.spec.owner, "the client that held it disconnected")


def encode_context_info(context: Context) -> responses.ContextInfo:
    return responses.ContextInfo(id=context.id, language=context.language, cwd=context.cwd)


# Snapshots of sandboxes, and forks of them.


class NativeSnapshots:
    def __init__(self, api: NativeContext):
        self._api = api

    async def make(self, request: Request) -> Response:
        handle = await self._api.handle(request)
        message = await decode_request_body(request, requests.MakeSnapshotRequest)
        return json_reply((await handle.snapshot(name=message.name)).info, 201)

    async def fork(self, request: Request) -> Response:
        handle = await self._api.handle(request)
        message = await decode_request_body(request, requests.ForkSandboxRequest)
        check_seconds("timeout_seconds", message.timeout_seconds)
        made = await require_all_forks(await handle.fork(message.count, seconds=message.timeout_seconds))
        if has_client_disconnected(request):
            await asyncio.gather(*(each.kill(CLIENT_DISCONNECTED) for each in made))
            raise ClientDisconnect
        return json_reply([each.info for each in made], 201)

    async def list(self, request: Request) -> Response:
        principal = self._api.admit(request)
        query = decode_request_query(request, requests.SnapshotsQuery)
        if query.all and not self._api.is_operator(request):
            raise errors.Forbidden("all snapshots are for the server's operator, on its control socket")
        found = await self._api.engine.snapshots.list(None if query.all else principal.owner, query.sandbox)
        return json_reply([each.info for each in found])

    async def get(self, request: Request) -> Response:
        owner = self._api.visible_owner(request)
        return json_reply((await self._api.engine.snapshots.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._api.visible_owner(request)
        found = await self._api.engine.snapshots.get(request.path_params["ref"], owner)
        await self._api.engine.snapshots.remove(found.id, found.owner)
        return Response(status_code=204)


# Named volumes: create, list, show and remove. Their files are accessed from sandboxes.


class NativeVolumes:
    def __init__(self, api: NativeContext):
        self._api = api

    async def make(self, request: Request) -> Response:
        owner = self._api.owner(request)
        message = await decode_request_body(request, requests.MakeVolumeRequest)
        return json_reply((await self._api.engine.volumes.create(message.name, owner)).info, 201)

    async def list(self, request: Request) -> Response:
        return json_reply([each.info for each in await self._api.engine.volumes.list(self._api.owner(request))])

    async def get(self, request: Request) -> Response:
        owner = self._api.owner(request)
        return json_reply((await self._api.engine.volumes.get(request.path_params["ref"], owner)).info)

    async def remove(self, request: Request) -> Response:
        owner = self._api.owner(request)
        await self._api.engine.volumes.remove(request.path_params["ref"], owner)
        return Response(status_code=204)


# Checkpoints, rollback and forks of contexts. Each waits for its turn, unless its client disconnects.


class NativeCheckpoints:
    def __init__(self, api: NativeContext):
        self._api = api

    async def checkpoint(self, request: Request) -> Response:
        context = await self._context_from_path(request)
        await read_whole_body(request, MAX_INLINE_BYTES)
        mark = await run_unless_disconnected(request, context.checkpoint())
        if has_client_disconnected(request):
            with contextlib.suppress(errors.ClocheError):
                context.forget(mark.id)  # no client would ever know its id
            raise ClientDisconnect
        return json_reply(mark, 201)

    async def list(self, request: Request) -> Response:
        return json_reply((await self._context_from_path(request)).marks())

    async def forget(self, request: Request) -> Response:
        (await self._context_from_path(request)).forget(request.path_params["checkpoint"])
        return Response(status_code=204)

    async def rollback(self, request: Request) -> Response:
        context = await self._context_from_path(request)
        mark = (await decode_request_body(request, requests.RollbackRequest)).checkpoint
        await run_unless_disconnected(request, context.rollback(mark))
        return Response(status_code=204)

    async def fork(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        context = sandbox.context(request.path_params["context"])
        message = await decode_request_body(request, requests.ForkContextRequest)
        made = await run_unless_disconnected(request, context.fork(message.count))
        if has_client_disconnected(request):
            for each in made:
                with contextlib.suppress(errors.ClocheError):
                    sandbox.remove_context(each.id)
            raise ClientDisconnect
        return json_reply([encode_context_info(each) for each in made], 201)

    async def _context_from_path(self, request: Request) -> Context:
        return (await self._api.sandbox(request)).context(request.path_params["context"])


# Variables of a context, history and notebook of a sandbox.


class NativeHistory:
    def __init__(self, api: NativeContext):
        self._api = api

    async def variables(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        found = await sandbox.context(request.path_params["context"]).variables()
        return json_reply(responses.VariablesInfo(variables=found, more=found.more))

    async def complete(self, request: Request) -> Response:
        context, asked = await self._code_question(request)
        return json_reply(await context.complete(asked.code, asked.cursor))

    async def describe(self, request: Request) -> Response:
        context, asked = await self._code_question(request)
        return json_reply(await context.describe(asked.code, asked.cursor, detail=asked.detail))

    async def check(self, request: Request) -> Response:
        context, asked = await self._code_question(request)
        return json_reply(await context.check(asked.code))

    async def _code_question(self, request: Request) -> tuple[Context, requests.CodeQuestionRequest]:
        context = (await self._api.sandbox(request)).context(request.path_params["context"])
        return context, await decode_request_body(request, requests.CodeQuestionRequest)

    async def history(self, request: Request) -> Response:
        sandbox, context = await self._requested_history(request)
        found = read_history(sandbox, context)
        return json_reply(responses.HistoryInfo(cells=found, dropped=found.dropped))

    async def notebook(self, request: Request) -> Response:
        sandbox, context = await self._requested_history(request)
        return Response(await export_notebook(sandbox, context), media_type=NOTEBOOK_MIME)

    async def _requested_history(self, request: Request) -> tuple[Sandbox, str | None]:
        return await self._api.sandbox(request), decode_request_query(request, requests.HistoryQuery).context


# The network policy of a sandbox, and the log of its connections.


class NativeNetwork:
    def __init__(self, api: NativeContext):
        self._api = api

    async def get(self, request: Request) -> Response:
        return _network_response(await self._api.sandbox(request))

    async def replace(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        message = await decode_request_body(request, requests.SetNetworkRequest)
        await self._api.engine.networks.replace(sandbox, _policy_from_request(message, sandbox.network.policy))
        return _network_response(sandbox)

    async def log(self, request: Request) -> Response:
        network = (await self._api.sandbox(request)).network
        return json_reply(responses.NetworkLogResponse(entries=network.log, dropped=network.dropped))


def _policy_from_request(request: requests.SetNetworkRequest, present: NetworkPolicy) -> NetworkPolicy:
    """The requested policy. Omitted secrets stay: their values cannot be read to be sent again."""
    policy = requests.request_to_policy(request, request.secrets or ())
    return policy if request.secrets is not None else with_usable_secrets(policy, present.secrets)


def _network_response(sandbox: Sandbox) -> Response:
    return json_reply(requests.policy_to_info(sandbox.network.policy))
