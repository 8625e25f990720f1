"""The control plane: sandboxes are made, found, listed and ended."""

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
from cloche.api.auth import Gatekeeper
from cloche.api.e2b import network, snapshots, templates, unsupported, volumes
from cloche.api.e2b.context import Desk
from cloche.api.e2b.registry import Resident, Residents, alias_of, notes_of, template_id, template_name
from cloche.api.e2b.replies import Conflict, NotOffered, bare_id, error_body, json_reply, microseconds, timestamp
from cloche.api.e2b.sandboxes_schema import (
    MAX_REFRESH_SECONDS,
    Connection,
    Fork,
    Json,
    Lifespan,
    Listing,
    Pause,
    Refresh,
    Resumption,
    Wanted,
    created,
    decode,
    detail,
    listed,
    listing,
    log_entries,
    log_line,
    metadata_filter,
    metric,
    page_token,
    wanted,
    whole_number,
)
from cloche.api.http import status_of, while_wanted
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxInfo, SandboxSpec, Template, new_id

# How long a sandbox lives.

REFRESH_SECONDS = 15


def time_routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlTime(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/timeout", plane.set_timeout),
        desk.route("POST", "/sandboxes/{id}/refreshes", plane.refresh),
    ]


class ControlTime:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def set_timeout(self, request: Request) -> Response:
        """Moves the deadline, also to an earlier moment; 0 is now."""
        sandbox = await self._desk.sandbox(request)
        seconds = self._desk.seconds(decode(await self._desk.body(request), Lifespan).timeout, None)
        if seconds == 0:
            sandbox.expire()
        else:
            sandbox.renew(seconds)
        return Response(status_code=204)

    async def refresh(self, request: Request) -> Response:
        sandbox = await self._desk.sandbox(request)
        asked = decode(await self._desk.body(request), Refresh)
        seconds = REFRESH_SECONDS if asked.duration is None else asked.duration
        if not 0 <= seconds <= MAX_REFRESH_SECONDS:
            raise errors.InvalidRequest(f"duration: it must be from 0 to {MAX_REFRESH_SECONDS} s, not {seconds}")
        if seconds > 0:
            sandbox.extend(min(seconds, self._desk.max_seconds))
        return Response(status_code=204)


# Sandboxes are paused, go on, and are forked.

CONNECT_SECONDS = 300
RESUME_SECONDS = 15
FORK_SECONDS = 15


def pause_routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlPauses(desk)
    return [
        desk.route("POST", "/sandboxes/{id}/pause", plane.pause),
        desk.route("POST", "/v2/sandboxes/{id}/connect", partial(plane.connect, default_seconds=CONNECT_SECONDS)),
        desk.route("POST", "/sandboxes/{id}/connect", partial(plane.connect, default_seconds=None)),
        desk.route("POST", "/sandboxes/{id}/resume", plane.resume),
        desk.route("POST", "/sandboxes/{id}/fork", plane.fork),
    ]


class ControlPauses:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def pause(self, request: Request) -> Response:
        """With its memory, unless that is said not to be wanted. One that is paused already is a conflict."""
        owner = self._desk.owner(request)
        asked = decode(await self._desk.body(request), Pause)
        await self._desk.engine.pause(self._desk.id(request), owner, memory=asked.memory is not False)
        return Response(status_code=204)

    async def connect(self, request: Request, *, default_seconds: int | None) -> Response:
        """Gives a sandbox that runs at least that long from now, never less than it has; one that is paused goes on."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Connection)
        seconds = self._desk.seconds(asked.timeout, default_seconds)
        known = await self._desk.engine.describe(id, owner)
        if known.state == "paused" and known.pause_memory and asked.memory is False:
            raise NotOffered("memory: this sandbox was paused with its memory and goes on with it; leave it out")
        sandbox = await self._desk.engine.resume(id, owner, seconds=max(seconds, 1))
        if seconds > 0:
            sandbox.extend(seconds)
        return self._connected(sandbox, 201 if known.state == "paused" else 200)

    async def resume(self, request: Request) -> Response:
        """What clients did before there was `connect`. One that runs is a conflict."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Resumption)
        seconds = self._desk.seconds(asked.timeout, RESUME_SECONDS)
        known = await self._desk.engine.describe(id, owner)
        if known.state == "running":
            raise Conflict(f"sandbox {id} is already running")
        if asked.autoPause and known.on_deadline != "pause":
            raise NotOffered("autoPause: it is settled when a sandbox is made; leave it out, or set a longer timeout")
        return self._connected(await self._desk.engine.resume(id, owner, seconds=max(seconds, 1)), 201)

    async def fork(self, request: Request) -> Response:
        """Sandboxes with the files and the environment of this one. It runs on."""
        owner, id = self._desk.owner(request), self._desk.id(request)
        asked = decode(await self._desk.body(request), Fork)
        seconds = self._desk.seconds(asked.timeout, FORK_SECONDS)
        count = 1 if asked.count is None else asked.count
        forks = await self._desk.engine.fork(id, owner, count, seconds=max(seconds, 1))
        return json_reply([self._fork(each) for each in forks], 201)

    def _fork(self, fork: Sandbox | errors.ClocheError) -> Json:
        """One of those that were asked for: it, or why there is none."""
        if isinstance(fork, Sandbox):
            return {"sandbox": created(self._desk.residents.of(fork), self._desk.domain)}
        return {"error": error_body(status_of(fork), str(fork))}

    def _connected(self, sandbox: Sandbox, status: int) -> Response:
        return json_reply(created(self._desk.residents.of(sandbox), self._desk.domain), status)


# What a sandbox uses and used, and what became of it.

MAX_IDS = 100
MAX_LINES = 1000
LEVELS = ("debug", "info", "warn", "error")
_LATEST_SECONDS = 10_000_000_000
_LATEST_MILLISECONDS = _LATEST_SECONDS * 1000


def report_routes(desk: Desk) -> list[BaseRoute]:
    plane = ControlReports(desk)
    return [
        desk.route("GET", "/sandboxes/metrics", plane.all_metrics),
        desk.route("GET", "/sandboxes/{id}/metrics", plane.metrics),
        desk.route("GET", "/sandboxes/{id}/logs", plane.logs),
        desk.route("GET", "/v2/sandboxes/{id}/logs", plane.log_entries),
    ]


class ControlReports:
    def __init__(self, desk: Desk):
        self._desk = desk

    async def metrics(self, request: Request) -> Response:
        sandbox = await self._desk.sandbox(request)
        start = whole_number("start", request.query_params.get("start"), 0, _LATEST_SECONDS)
        end = whole_number("end", request.query_params.get("end"), 0, _LATEST_SECONDS)
        through = None if end is None else end + 0.999999  # a client's clock has only seconds here
        samples = await sandbox.meter.between(start, through)
        return json_reply([metric(each, sandbox.limits) for each in samples])

    async def all_metrics(self, request: Request) -> Response:
        """The newest of each sandbox. Ids that are not there, or somebody else's, are left out."""
        owner = self._desk.owner(request)
        ids = [bare_id(each) for each in request.query_params.get("sandbox_ids", "").split(",") if each]
        if not 0 < len(ids) <= MAX_IDS:
            raise errors.InvalidRequest(f"sandbox_ids: it must be 1 to {MAX_IDS} ids, joined by commas")
        found = [sandbox for id in dict.fromkeys(ids) if (sandbox := await self._running(id, owner))]
        return json_reply({"sandboxes": {each.id: metric(await each.meter.latest(), each.limits) for each in found}})

    async def logs(self, request: Request) -> Response:
        start = whole_number("start", request.query_params.get("start"), 0, _LATEST_MILLISECONDS) or 0
        entries = [each for each in await self._entries(request) if each["timestamp"] >= timestamp(start / 1000)]
        entries = entries[: _line_limit(request.query_params)]
        return json_reply({"logs": [log_line(each) for each in entries], "logEntries": entries})

    async def log_entries(self, request: Request) -> Response:
        query = request.query_params
        entries = [each for each in await self._entries(request) if _is_wanted(each, query)]
        backward = query.get("direction") == "backward"
        cursor = whole_number("cursor", query.get("cursor"), 0, _LATEST_MILLISECONDS)
        if cursor is not None:
            moment = timestamp(cursor / 1000)
            entries = [
                each for each in entries if each["timestamp"] == moment or (each["timestamp"] < moment) == backward
            ]
        return json_reply({"logs": (entries[::-1] if backward else entries)[: _line_limit(query)]})

    async def _entries(self, request: Request) -> list[Json]:
        """Those of a sandbox that has ended, too."""
        owner = self._desk.owner(request)
        return log_entries(await self._desk.engine.describe(self._desk.id(request), owner))

    async def _running(self, id: str, owner: str) -> Sandbox | None:
        """None also for one that is paused: nobody is woken to be measured."""
        try:
            resident = await self._desk.residents.find(id, owner)
        except (errors.NotFound, errors.Gone):
            return None
        return None if resident.is_asleep else resident.sandbox


def _is_wanted(entry: Json, query: Mapping[str, str]) -> bool:
    level = query.get("level") or LEVELS[0]
    if level not in LEVELS:
        raise errors.InvalidRequest(f"level: it is one of {', '.join(LEVELS)}, not {level[:40]!r}")
    return LEVELS.index(entry["level"]) >= LEVELS.index(level) and query.get("search", "") in entry["message"]


def _line_limit(query: Mapping[str, str]) -> int:
    limit = whole_number("limit", query.get("limit"), 0, MAX_LINES)
    return MAX_LINES if limit is None else limit


# `Idempotency-Key`: a creation that is sent twice makes one sandbox.

MAX_KEY = 255


class _Made(NamedTuple):
    digest: bytes
    creation: asyncio.Task[Resident]

    @property
    def counts(self) -> bool:
        """Whether a repetition gets this one: while it is being made, and as long as it has its cell."""
        if not self.creation.done():
            return True
        return (
            not self.creation.cancelled()
            and self.creation.exception() is None
            and self.creation.result().sandbox.ending is None
        )


class Repeats:
    """The creations of this process that carried a key, as long as their sandboxes live."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str], _Made] = {}

    async def once(self, owner: str, key: str, asked: bytes, make: Callable[[], Awaitable[Resident]]) -> Resident:
        """What `make` gives, or gave before for that key. One that is under way is waited for, also if it fails.

        Raises Conflict where something else was asked for under that key, and what `make` raises.
        """
        _check(key)
        self._forget_ended()
        digest = hashlib.sha256(asked).digest()
        made = self._made.get((owner, key))
        if made is None:
            made = self._made[owner, key] = _Made(digest, asyncio.ensure_future(_run(make)))
        elif made.digest != digest:
            raise Conflict("Idempotency-Key: it was used for another request; choose a new key for each sandbox")
        return await asyncio.shield(made.creation)  # the client that leaves does not take it from the others

    async def end(self, owner: str) -> None:
        """What is being made for that owner is not, and nothing is known of what was."""
        theirs = [self._made.pop(each).creation for each in list(self._made) if each[0] == owner]
        for creation in theirs:
            creation.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    def _forget_ended(self) -> None:
        for each in [each for each, made in self._made.items() if not made.counts]:
            del self._made[each]


async def _run(make: Callable[[], Awaitable[Resident]]) -> Resident:
    return await make()


def _check(key: str) -> None:
    if not (0 < len(key) <= MAX_KEY and key.isascii() and key.isprintable()):
        raise errors.InvalidRequest(f"Idempotency-Key: it must have 1 to {MAX_KEY} characters of ASCII")


def sandbox_routes(
    engine: Engine, gatekeeper: Gatekeeper, residents: Residents, config: Config, secret: bytes
) -> list[BaseRoute]:
    desk = Desk(engine, gatekeeper, residents, config)
    return [
        *report_routes(desk),  # first, as `/sandboxes/metrics` could be an id as well
        *_routes(desk),
        *time_routes(desk),
        *pause_routes(desk),
        *snapshots.routes(desk),
        *network.routes(desk),
        *volumes.routes(desk, secret),
        *templates.build_routes(desk, config, secret),  # before the templates, whose names may be paths
        *templates.template_routes(desk, config),
        *unsupported.routes(desk),
    ]


def _routes(desk: Desk) -> list[BaseRoute]:
    plane = Control(desk)
    return [
        desk.route("POST", "/v2/sandboxes", partial(plane.create, version=2)),
        desk.route("POST", "/sandboxes", partial(plane.create, version=1)),
        desk.route("GET", "/v2/sandboxes", plane.list_page),
        desk.route("GET", "/sandboxes", plane.list_all),
        desk.route("GET", "/sandboxes/{id}", plane.get),
        desk.route("DELETE", "/sandboxes/{id}", plane.kill),
    ]


class Control:
    def __init__(self, desk: Desk):
        self._desk = desk
        self._repeats = Repeats()
        desk.engine.housing.admission.shut_out.hear(self._repeats.end)

    async def create(self, request: Request, *, version: int) -> Response:
        owner = self._desk.owner(request)
        body = await self._desk.body(request)
        make = partial(self._make, owner, wanted(body, version=version))
        key = request.headers.get("idempotency-key")
        asked = b"%d:%s" % (version, body)
        making = make() if key is None else self._repeats.once(owner, key, asked, make)
        resident = await while_wanted(request, self._desk.engine, making)
        return json_reply(created(resident, self._desk.domain), 201)

    async def get(self, request: Request) -> Response:
        return json_reply(detail(await self._desk.resident(request), self._desk.domain))

    async def kill(self, request: Request) -> Response:
        await self._desk.engine.kill(self._desk.id(request), self._desk.owner(request))
        return Response(status_code=204)

    async def list_page(self, request: Request) -> Response:
        asked = listing(request.query_params)
        found = self._found(self._desk.owner(request), asked)
        page, rest = found[: asked.limit], found[asked.limit :]
        headers = {"X-Next-Token": page_token(*_position(page[-1]))} if rest else {}
        return json_reply([listed(each) for each in page], headers=headers)

    async def list_all(self, request: Request) -> Response:
        """Version 1, which has no pages, and none that are paused."""
        asked = Listing(metadata=metadata_filter(request.query_params.get("metadata", "")), states=("running",))
        return json_reply([listed(each) for each in self._found(self._desk.owner(request), asked)])

    async def _make(self, owner: str, wanted: Wanted) -> Resident:
        self._desk.check_timeout("timeout", wanted.timeout_seconds, least=1)
        template = await self._template(wanted.template, owner)
        built = await self._built(wanted.template, template, owner)
        id = new_id()
        own = {"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": id, "E2B_TEMPLATE_ID": built or template.ref}
        spec = SandboxSpec(
            template=wanted.template,
            env={**wanted.env, **own},
            metadata=wanted.metadata,
            lifetime_seconds=wanted.timeout_seconds,
            network=network.policy_for(wanted.egress, template, self._desk.engine.networks),
            user="root",
            sudo=True,
            cwd="/home/user",
            owner=owner,
            on_deadline=wanted.on_deadline,
            pause_memory=wanted.pause_memory,
            auto_resume=wanted.auto_resume,
            notes=_notes(wanted, built),
            volumes=wanted.volumes,
        )
        return self._desk.residents.of(await self._desk.engine.create(spec, id=id))

    async def _template(self, ref: str, owner: str) -> Template:
        """That of a snapshot of theirs, too."""
        try:
            return await self._desk.engine.template(ref, owner)
        except errors.TemplateNotFound as error:
            raise errors.TemplateNotFound(f"template '{ref}' not found: {error}") from None

    async def _built(self, ref: str, template: Template, owner: str) -> str | None:
        """The id of a template of the client's own, where it is one: no database is asked where it cannot be."""
        aliases = self._desk.engine.config.aliases
        if ref.partition("@")[0] == template.name or any(fnmatchcase(ref, alias) for alias in aliases):
            return None
        return await self._desk.engine.builds.id_of(ref, owner)

    def _found(self, owner: str, asked: Listing) -> list[SandboxInfo]:
        """Those that are asked for, in order, from the place on that the page before ended at."""
        found = [each for each in self._desk.engine.list(owner) if self._matches(each, asked)]
        found.sort(key=_position, reverse=asked.order == "desc")
        if asked.after is None:
            return found
        after, ascending = asked.after, asked.order == "asc"
        return [each for each in found if (_position(each) > after if ascending else _position(each) < after)]

    def _matches(self, info: SandboxInfo, asked: Listing) -> bool:
        alias = alias_of(info)
        names = (info.template, template_name(info.template), template_id(info), alias, alias.partition(":")[0])
        return (
            info.state in asked.states
            and asked.metadata.items() <= info.metadata.items()
            and (asked.started_after is None or microseconds(info.created_at) >= asked.started_after)
            and (asked.template is None or asked.template in names)
        )


def _notes(wanted: Wanted, built: str | None) -> dict[str, str]:
    return notes_of(
        alias=wanted.template,
        template=built,
        secure=wanted.secure,
        public_traffic=wanted.public_traffic,
        host_mask=wanted.host_mask,
    )


def _position(info: SandboxInfo) -> tuple[int, str]:
    return microseconds(info.created_at), info.id
