"""The control plane's sandboxes: create, find, list and kill."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from cloche import errors
from cloche.api.dialect import (
    Conflict,
    Json,
    NotSupported,
    format_timestamp,
    json_reply,
    to_microseconds,
)
from cloche.api.e2b import network
from cloche.api.e2b.context import E2bContext, error_body
from cloche.api.e2b.port_target import strip_client_id
from cloche.api.e2b.registry import (
    E2bSandbox,
    encode_sandbox_notes,
    template_alias_of,
    template_id_of,
    template_name_of,
)
from cloche.api.e2b.sandboxes_schema import (
    MAX_REFRESH_SECONDS,
    ConnectSandboxBody,
    E2bCreateRequest,
    E2bSandboxQuery,
    ForkSandboxBody,
    PauseSandboxBody,
    RefreshSandboxBody,
    ResumeSandboxBody,
    SetTimeoutBody,
    decode_create_request,
    decode_metadata_filter,
    decode_sandbox_query,
    encode_created_sandbox,
    encode_listed_sandbox,
    encode_log_entries,
    encode_log_line,
    encode_metric_sample,
    encode_page_token,
    encode_sandbox_detail,
    parse_whole_number,
)
from cloche.api.http import create_unless_disconnected, status_of
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxInfo, SandboxSpec, Template, new_id

# Sandbox timeouts: set and refresh the deadline.

REFRESH_SECONDS = 15


def timeout_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlTimeouts(api)
    return [
        api.route("POST", "/sandboxes/{id}/timeout", plane.set_timeout),
        api.route("POST", "/sandboxes/{id}/refreshes", plane.refresh),
    ]


class ControlTimeouts:
    def __init__(self, api: E2bContext):
        self._api = api

    async def set_timeout(self, request: Request) -> Response:
        """Moves the deadline, also to an earlier time; 0 ends the sandbox now."""
        sandbox = await self._api.sandbox(request)
        seconds = self._api.seconds((await self._api.json_body(request, SetTimeoutBody)).timeout, None)
        if seconds == 0:
            sandbox.expire_now()
        else:
            sandbox.renew(seconds)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        message = await self._api.json_body(request, RefreshSandboxBody)
        seconds = REFRESH_SECONDS if message.duration is None else message.duration
        if not 0 <= seconds <= MAX_REFRESH_SECONDS:
            raise errors.InvalidRequest(f"duration: it must be from 0 to {MAX_REFRESH_SECONDS} s, not {seconds}")
        if seconds > 0:
            sandbox.extend(min(seconds, self._api.max_seconds))
        return Response(status_code=204)


# Pausing, resuming, connecting to and forking sandboxes.

CONNECT_SECONDS = 300
RESUME_SECONDS = 15
FORK_SECONDS = 15


def pause_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlPauses(api)
    return [
        api.route("POST", "/sandboxes/{id}/pause", plane.pause),
        api.route("POST", "/v2/sandboxes/{id}/connect", partial(plane.connect, default_seconds=CONNECT_SECONDS)),
        api.route("POST", "/sandboxes/{id}/connect", partial(plane.connect, default_seconds=None)),
        api.route("POST", "/sandboxes/{id}/resume", plane.resume),
        api.route("POST", "/sandboxes/{id}/fork", plane.fork),
    ]


class ControlPauses:
    def __init__(self, api: E2bContext):
        self._api = api

    async def pause(self, request: Request) -> Response:
        """Pauses with memory, unless the client declines it. A paused sandbox is a conflict."""
        owner = self._api.owner(request)
        message = await self._api.json_body(request, PauseSandboxBody)
        await self._api.engine.pause(self._api.sandbox_id(request), owner, memory=message.memory is not False)
        return Response(status_code=204)

    async def connect(self, request: Request, *, default_seconds: int | None) -> Response:
        """Extends a running sandbox to at least that many seconds from now, never less; resumes a paused one."""
        owner, id = self._api.owner(request), self._api.sandbox_id(request)
        message = await self._api.json_body(request, ConnectSandboxBody)
        seconds = self._api.seconds(message.timeout, default_seconds)
        known = await self._api.engine.describe(id, owner)
        if known.state == "paused" and known.pause_memory and message.memory is False:
            raise NotSupported("memory: this sandbox was paused with its memory and goes on with it; leave it out")
        sandbox = await self._api.engine.resume(id, owner, seconds=max(seconds, 1))
        if seconds > 0:
            sandbox.extend(seconds)
        return self._connected_response(request, sandbox, 201 if known.state == "paused" else 200)

    async def resume(self, request: Request) -> Response:
        """The predecessor of `connect`, for old clients. A running sandbox is a conflict."""
        owner, id = self._api.owner(request), self._api.sandbox_id(request)
        message = await self._api.json_body(request, ResumeSandboxBody)
        seconds = self._api.seconds(message.timeout, RESUME_SECONDS)
        known = await self._api.engine.describe(id, owner)
        if known.state == "running":
            raise Conflict(f"sandbox {id} is already running")
        if message.autoPause and known.on_deadline != "pause":
            raise NotSupported("autoPause: it is settled when a sandbox is made; leave it out, or set a longer timeout")
        resumed = await self._api.engine.resume(id, owner, seconds=max(seconds, 1))
        return self._connected_response(request, resumed, 201)

    async def fork(self, request: Request) -> Response:
        """Creates sandboxes with the files and the environment of this one, which continues to run."""
        owner, id = self._api.owner(request), self._api.sandbox_id(request)
        message = await self._api.json_body(request, ForkSandboxBody)
        seconds = self._api.seconds(message.timeout, FORK_SECONDS)
        count = 1 if message.count is None else message.count
        forks = await self._api.engine.fork(id, owner, count, seconds=max(seconds, 1))
        return json_reply([self._encode_fork_result(each, self._api.domain(request)) for each in forks], 201)

    def _encode_fork_result(self, fork: Sandbox | errors.ClocheError, domain: str) -> Json:
        """One of the requested forks, or the error that prevented it."""
        if isinstance(fork, Sandbox):
            return {"sandbox": encode_created_sandbox(self._api.registry.of(fork), domain)}
        return {"error": error_body(status_of(fork), str(fork))}

    def _connected_response(self, request: Request, sandbox: Sandbox, status: int) -> Response:
        domain = self._api.domain(request)
        return json_reply(encode_created_sandbox(self._api.registry.of(sandbox), domain), status)


# Metrics and lifecycle logs of sandboxes.

MAX_IDS = 100
MAX_LINES = 1000
REPORT_LOG_LEVELS = ("debug", "info", "warn", "error")
_LATEST_SECONDS = 10_000_000_000
_LATEST_MILLISECONDS = _LATEST_SECONDS * 1000


def report_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlReports(api)
    return [
        api.route("GET", "/sandboxes/metrics", plane.all_metrics),
        api.route("GET", "/sandboxes/{id}/metrics", plane.metrics),
        api.route("GET", "/sandboxes/{id}/logs", plane.logs),
        api.route("GET", "/v2/sandboxes/{id}/logs", plane.log_entries),
    ]


class ControlReports:
    def __init__(self, api: E2bContext):
        self._api = api

    async def metrics(self, request: Request) -> Response:
        sandbox = await self._api.sandbox(request)
        start = parse_whole_number("start", request.query_params.get("start"), 0, _LATEST_SECONDS)
        end = parse_whole_number("end", request.query_params.get("end"), 0, _LATEST_SECONDS)
        through = None if end is None else end + 0.999999  # a client's clock has only seconds here
        samples = await sandbox.meter.samples_between(start, through)
        return json_reply([encode_metric_sample(each, sandbox.limits) for each in samples])

    async def all_metrics(self, request: Request) -> Response:
        """The newest sample of each sandbox. Unknown ids, and those of other owners, are left out."""
        owner = self._api.owner(request)
        ids = [strip_client_id(each) for each in request.query_params.get("sandbox_ids", "").split(",") if each]
        if not 0 < len(ids) <= MAX_IDS:
            raise errors.InvalidRequest(f"sandbox_ids: it must be 1 to {MAX_IDS} ids, joined by commas")
        found = [sandbox for id in dict.fromkeys(ids) if (sandbox := await self._find_running_sandbox(id, owner))]
        return json_reply(
            {
                "sandboxes": {
                    each.id: encode_metric_sample(await each.meter.latest_sample(), each.limits) for each in found
                }
            }
        )

    async def logs(self, request: Request) -> Response:
        start = parse_whole_number("start", request.query_params.get("start"), 0, _LATEST_MILLISECONDS) or 0
        entries = [
            each for each in await self._log_entries_of(request) if each["timestamp"] >= format_timestamp(start / 1000)
        ]
        entries = entries[: _log_line_limit(request.query_params)]
        return json_reply({"logs": [encode_log_line(each) for each in entries], "logEntries": entries})

    async def log_entries(self, request: Request) -> Response:
        query = request.query_params
        entries = [each for each in await self._log_entries_of(request) if _matches_log_query(each, query)]
        backward = query.get("direction") == "backward"
        cursor = parse_whole_number("cursor", query.get("cursor"), 0, _LATEST_MILLISECONDS)
        if cursor is not None:
            moment = format_timestamp(cursor / 1000)
            entries = [
                each for each in entries if each["timestamp"] == moment or (each["timestamp"] < moment) == backward
            ]
        return json_reply({"logs": (entries[::-1] if backward else entries)[: _log_line_limit(query)]})

    async def _log_entries_of(self, request: Request) -> list[Json]:
        """The log entries, also of a sandbox that has ended."""
        owner = self._api.owner(request)
        return encode_log_entries(await self._api.engine.describe(self._api.sandbox_id(request), owner))

    async def _find_running_sandbox(self, id: str, owner: str) -> Sandbox | None:
        """The sandbox if it runs. None also for a paused one: metrics never resume a sandbox."""
        try:
            e2b_sandbox = await self._api.registry.find(id, owner)
        except (errors.NotFound, errors.Gone):
            return None
        return None if e2b_sandbox.is_paused else e2b_sandbox.sandbox


def _matches_log_query(entry: Json, query: Mapping[str, str]) -> bool:
    level = query.get("level") or REPORT_LOG_LEVELS[0]
    if level not in REPORT_LOG_LEVELS:
        raise errors.InvalidRequest(f"level: it is one of {', '.join(REPORT_LOG_LEVELS)}, not {level[:40]!r}")
    return (
        REPORT_LOG_LEVELS.index(entry["level"]) >= REPORT_LOG_LEVELS.index(level)
        and query.get("search", "") in entry["message"]
    )


def _log_line_limit(query: Mapping[str, str]) -> int:
    limit = parse_whole_number("limit", query.get("limit"), 0, MAX_LINES)
    return MAX_LINES if limit is None else limit


# `Idempotency-Key`: a creation that is sent twice makes one sandbox.

MAX_IDEMPOTENCY_KEY = 255


class _KeyedCreation(NamedTuple):
    digest: bytes
    creation: asyncio.Task[E2bSandbox]

    @property
    def counts(self) -> bool:
        """Whether a repetition gets this sandbox: during its creation, and as long as it has its cell."""
        if not self.creation.done():
            return True
        if self.creation.cancelled() or self.creation.exception() is not None:
            return False
        here = self.creation.result().handle.here
        return here is not None and here.ending is None


class IdempotentCreations:
    """The creations of this process that carried a key, as long as their sandboxes live."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _KeyedCreation] = {}

    async def create_once(
        self, owner: str, key: str, asked: bytes, make: Callable[[], Awaitable[E2bSandbox]]
    ) -> E2bSandbox:
        """Returns the result of `make`, or its earlier result for that key.

        Waits for a creation in progress, also if it fails. Raises Conflict if the key was used for another
        request, and everything that `make` raises.
        """
        _check_idempotency_key(key)
        self._remove_ended_creations()
        digest = hashlib.sha256(asked).digest()
        made = self._made.get((owner, key))
        if made is None:
            made = self._made[owner, key] = _KeyedCreation(digest, asyncio.ensure_future(_await_creation(make)))
        elif made.digest != digest:
            raise Conflict("Idempotency-Key: it was used for another request; choose a new key for each sandbox")
        return await asyncio.shield(made.creation)  # the client that leaves does not take it from the others

    async def end(self, owner: str) -> None:
        """Cancels that owner's creations in progress, and removes the finished ones."""
        theirs = [self._made.pop(each).creation for each in list(self._made) if each[0] == owner]
        for creation in theirs:
            creation.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    def _remove_ended_creations(self) -> None:
        for each in [each for each, made in self._made.items() if not made.counts]:
            del self._made[each]


async def _await_creation(make: Callable[[], Awaitable[E2bSandbox]]) -> E2bSandbox:
    return await make()


def _check_idempotency_key(key: str) -> None:
    if not (0 < len(key) <= MAX_IDEMPOTENCY_KEY and key.isascii() and key.isprintable()):
        raise errors.InvalidRequest(f"Idempotency-Key: it must have 1 to {MAX_IDEMPOTENCY_KEY} characters of ASCII")


def sandbox_routes(api: E2bContext) -> list[BaseRoute]:
    plane = ControlSandboxes(api)
    return [
        api.route("POST", "/v2/sandboxes", partial(plane.create, version=2)),
        api.route("POST", "/sandboxes", partial(plane.create, version=1)),
        api.route("GET", "/v2/sandboxes", plane.list_page),
        api.route("GET", "/sandboxes", plane.list_all),
        api.route("GET", "/sandboxes/{id}", plane.get),
        api.route("DELETE", "/sandboxes/{id}", plane.kill),
    ]


class ControlSandboxes:
    def __init__(self, api: E2bContext):
        self._api = api
        self._repeats = IdempotentCreations()
        api.engine.cell_supply.admission.lockout.add_listener(self._repeats.end)

    async def create(self, request: Request, *, version: int) -> Response:
        owner = self._api.owner(request)
        body, wanted = await self._api.decoded(
            request, lambda body: (body, decode_create_request(body, version=version))
        )
        make = partial(self._create_sandbox, owner, wanted)
        key = request.headers.get("idempotency-key")
        asked = b"%d:%s" % (version, body)
        making = make() if key is None else self._repeats.create_once(owner, key, asked, make)
        e2b_sandbox = await create_unless_disconnected(request, self._api.engine, making)
        return json_reply(encode_created_sandbox(e2b_sandbox, self._api.domain(request)), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(encode_sandbox_detail(await self._api.e2b_sandbox(request), self._api.domain(request)))

    async def kill(self, request: Request) -> Response:
        await self._api.engine.kill(self._api.sandbox_id(request), self._api.owner(request))
        return Response(status_code=204)

    async def list_page(self, request: Request) -> Response:
        query = decode_sandbox_query(request.query_params)
        found = self._find_matching_sandboxes(self._api.owner(request), query)
        page, rest = found[: query.limit], found[query.limit :]
        headers = {"X-Next-Token": encode_page_token(*_page_position_of(page[-1]))} if rest else {}
        return json_reply([encode_listed_sandbox(each) for each in page], headers=headers)

    async def list_all(self, request: Request) -> Response:
        """Version 1: without pages and without paused sandboxes."""
        query = E2bSandboxQuery(
            metadata=decode_metadata_filter(request.query_params.get("metadata", "")), states=("running",)
        )
        return json_reply(
            [encode_listed_sandbox(each) for each in self._find_matching_sandboxes(self._api.owner(request), query)]
        )

    async def _create_sandbox(self, owner: str, request: E2bCreateRequest) -> E2bSandbox:
        self._api.check_timeout("timeout", request.timeout_seconds, least=1)
        template = await self._find_template(request.template, owner)
        built = await self._built_template_id(request.template, template, owner)
        id = new_id()
        own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": id, "E2B_TEMPLATE_ID": built or template.ref}
        spec = SandboxSpec(
            template=request.template,
            env={**request.env, **own},
            metadata=request.metadata,
            lifetime_seconds=request.timeout_seconds,
            network=network.policy_for_new_sandbox(request.egress, template, self._api.engine.networks),
            user="root",
            sudo=True,
            cwd="/home/user",
            owner=owner,
            on_deadline=request.on_deadline,
            pause_memory=request.pause_memory,
            auto_resume=request.auto_resume,
            notes=_notes_for_request(request, built),
            volumes=request.volumes,
        )
        return self._api.registry.of(await self._api.engine.create(spec, id=id))

    async def _find_template(self, ref: str, owner: str) -> Template:
        """Finds a template, also that of a snapshot of this owner."""
        try:
            return await self._api.engine.template(ref, owner)
        except errors.TemplateNotFound as error:
            raise errors.TemplateNotFound(f"template '{ref}' not found: {error}") from None

    async def _built_template_id(self, ref: str, template: Template, owner: str) -> str | None:
        """The id of a template that the client built, else None. Skips the database where the name rules it out."""
        aliases = self._api.engine.config.aliases
        if ref.partition("@")[0] == template.name or any(fnmatchcase(ref, alias) for alias in aliases):
            return None
        return await self._api.engine.builds.find_template_id(ref, owner)

    def _find_matching_sandboxes(self, owner: str, query: E2bSandboxQuery) -> list[SandboxInfo]:
        """The matching sandboxes in order, from the end of the previous page on."""
        found = [each for each in self._api.engine.list(owner) if self._matches_query(each, query)]
        found.sort(key=_page_position_of, reverse=query.order == "desc")
        if query.after is None:
            return found
        after, ascending = query.after, query.order == "asc"
        return [
            each
            for each in found
            if (_page_position_of(each) > after if ascending else _page_position_of(each) < after)
        ]

    def _matches_query(self, info: SandboxInfo, query: E2bSandboxQuery) -> bool:
        alias = template_alias_of(info)
        names = (info.template, template_name_of(info.template), template_id_of(info), alias, alias.partition(":")[0])
        return (
            info.state in query.states
            and query.metadata.items() <= info.metadata.items()
            and (query.started_after is None or to_microseconds(info.created_at) >= query.started_after)
            and (query.template is None or query.template in names)
        )


def _notes_for_request(request: E2bCreateRequest, built: str | None) -> dict[str, str]:
    return encode_sandbox_notes(
        alias=request.template,
        template=built,
        secure=request.secure,
        public_traffic=request.public_traffic,
        host_mask=request.host_mask,
    )


def _page_position_of(info: SandboxInfo) -> tuple[int, str]:
    return to_microseconds(info.created_at), info.id
