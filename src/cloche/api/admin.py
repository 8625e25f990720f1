"""`/admin`: keys, which say who may use this server, and what requests did.

For admins: with a key, or over the control socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.admin_requests import AdminRequests
from cloche.api.auth import Gatekeeper
from cloche.api.http import Dialect, Edge, whole_body
from cloche.api.requests import Traffic, forgotten
from cloche.api.system import Routes, error_reply, json_reply
from cloche.config.sections import NAMES, Override
from cloche.engine.engine import Engine
from cloche.engine.operations.erase import end_all
from cloche.engine.principal import acting
from cloche.engine.quotas.occupancy import CapacityInfo, MemoryLeft, Pools
from cloche.engine.quotas.quotas import Quotas
from cloche.gateway.gateway import Gateway
from cloche.model import KIB, Struct
from cloche.store import audit, erasure
from cloche.store.audit_reader import Wanted, last
from cloche.store.gateway import Steps
from cloche.store.keys import KeyRecord, StoredKeys, check_owner
from cloche.store.quotas import Tenant
from cloche.telemetry import log

# `/admin/audit`: who did what. For admins.

MAX_LIMIT = 10_000
MAX_MOMENT = 253402300799.0  # the end of the year 9999: the log has four digits for it
FILTERS = ("owner", "sandbox", "what", "since", "limit")


class AdminAudit:
    def __init__(self, dialect: Dialect, directory: Path, gatekeeper: Gatekeeper):
        self._directory = directory
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/audit", Edge(dialect, self.list), methods=["GET"])]

    async def list(self, request: Request) -> Response:
        """What was done a second ago may not be there yet."""
        self._gatekeeper.admit_admin(request)
        wanted, limit = decode_audit_query(request.query_params)
        try:
            found = await asyncio.to_thread(last, self._directory, wanted, limit)
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None
        return json_reply({"lines": found})


def decode_audit_query(query: QueryParams) -> tuple[Wanted, int]:
    """Raises InvalidRequest."""
    unknown = [name for name in query if name not in FILTERS]
    if unknown:
        raise errors.InvalidRequest(f"{unknown[0][:100]!r} is no filter: there are {', '.join(FILTERS)}")
    limit = query.get("limit", "1000")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MAX_LIMIT):
        raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_LIMIT}, not {limit[:100]!r}")
    since = query.get("since")
    wanted = Wanted(
        owner=query.get("owner"),
        sandbox=query.get("sandbox"),
        what=query.get("what"),
        since=None if since is None else _moment(since),
    )
    return wanted, int(limit)


def _moment(text: str) -> float:
    try:
        at = float(text) if text.replace(".", "", 1).isdigit() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        at = math.nan
    if not 0 <= at <= MAX_MOMENT:
        raise errors.InvalidRequest(
            f"since must be seconds since 1970, or like 2026-11-16T17:00:00Z, not {text[:100]!r}"
        )
    return at


# `/admin/capacity`: how much this server takes on at once, and how much of it is in use. For admins.


class AdminCapacity:
    def __init__(self, dialect: Dialect, engine: Engine, gatekeeper: Gatekeeper):
        self._engine = engine
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/capacity", Edge(dialect, self.show), methods=["GET"])]

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(capacity_of(self._engine))


def capacity_of(engine: Engine) -> CapacityInfo:
    admission = engine.housing.admission
    memory = admission.memory
    return CapacityInfo(
        sandboxes=admission.sandboxes.occupancy,
        executions=admission.executions.occupancy,
        running=engine.running,
        paused=engine.paused,
        pool=Pools(ready=engine.waiting, wanted=engine.housing.wanted),
        memory=MemoryLeft(
            left_bytes=memory.left_bytes,
            reserve_bytes=memory.reserve_bytes,
            enough=memory.enough(),
            ample=memory.ample(),
        ),
    )


# `/admin/usage` and `/admin/quotas`: what owners and keys use, and how much they may. For admins.

MAX_ASKED_BYTES = 16 * KIB


class AdminTenants:
    def __init__(self, dialect: Dialect, quotas: Quotas, keys: StoredKeys, gatekeeper: Gatekeeper):
        self._quotas = quotas
        self._keys = keys
        self._gatekeeper = gatekeeper
        one_owner, one_key = "/admin/quotas/{owner}", "/admin/keys/{id}/quota"
        self.routes = [
            Route("/admin/usage", Edge(dialect, self.usage), methods=["GET"]),
            Route("/admin/usage/{owner}", Edge(dialect, self.usage_of_one), methods=["GET"]),
            Route("/admin/quotas", Edge(dialect, self.list), methods=["GET"]),
            *(Route(path, Edge(dialect, self.show), methods=["GET"]) for path in (one_owner, one_key)),
            *(Route(path, Edge(dialect, self.set), methods=["PUT"]) for path in (one_owner, one_key)),
            *(Route(path, Edge(dialect, self.reset), methods=["DELETE"]) for path in (one_owner, one_key)),
        ]

    async def usage(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(await self._quotas.usage_of_all())

    async def usage_of_one(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        check_owner(request.path_params["owner"])
        return json_reply(await self._quotas.usage(request.path_params["owner"]))

    async def list(self, request: Request) -> Response:
        """What holds for everybody, and for whom something else does."""
        self._gatekeeper.admit_admin(request)
        own = [self._told(tenant) for tenant in sorted(self._quotas.overrides)]
        return json_reply({"defaults": self._quotas.defaults, "own": own})

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(self._told(await self._tenant(request, revoked=True)))

    async def set(self, request: Request) -> Response:
        """In the place of all that was set before."""
        self._gatekeeper.admit_admin(request)
        tenant = await self._tenant(request)
        override = decode_override(await whole_body(request, MAX_ASKED_BYTES))
        await self._quotas.set(tenant, override)
        return json_reply(self._told(tenant))

    async def reset(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        await self._quotas.set(await self._tenant(request, revoked=True), Override())
        return Response(status_code=204)

    async def _tenant(self, request: Request, *, revoked: bool = False) -> Tenant:
        """Raises NotFound for a key that is not there, InvalidRequest for what cannot be an owner."""
        if "id" in request.path_params:
            key = await self._keys.get(request.path_params["id"], revoked=revoked)
            return Tenant(key.owner, key.id)
        check_owner(request.path_params["owner"])
        return Tenant(request.path_params["owner"])

    def _told(self, tenant: Tenant) -> dict[str, Any]:
        return {
            "owner": tenant.owner,
            **({"key_id": tenant.key_id} if tenant.key_id else {}),
            "own": self._quotas.overrides.get(tenant, Override()),
            "quota": self._quotas.quota_of(tenant),
        }


def decode_override(body: bytes) -> Override:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body, type=Override)
    except (msgspec.DecodeError, UnicodeDecodeError, errors.InvalidRequest) as error:
        raise errors.InvalidRequest(
            f"the body must be JSON with numbers, or null for no limit, for {', '.join(NAMES)}: {error}"
        ) from None


# Ending what a key made: a sandbox has tokens of its own, which hold whatever becomes of the key.

REASON = "the key that it was made with was revoked"
LOOKS = 2
PAUSE_SECONDS = 0.2  # in which what was being made is there, or was cut off


async def kill_made(engine: Engine, keys: StoredKeys, id: str) -> int:
    """Ends all sandboxes here, running and paused, of that key and of those whose place it took. How many it were.

    Raises NotFound for a key that never was.
    """
    line, killed = await keys.line(id), 0
    for look in range(LOOKS):
        await asyncio.sleep(PAUSE_SECONDS if look else 0.0)
        theirs = [each for each in engine.known(None) if each.key_id in line]
        killed += sum(await asyncio.gather(*(_kill(engine, each.id, each.owner) for each in theirs)))
    return killed


async def _kill(engine: Engine, id: str, owner: str) -> int:
    with contextlib.suppress(errors.ClocheError):  # it ended by itself, or another process has it now
        await engine.kill(id, owner, REASON)
        return 1
    return 0


# Removing all that belongs to one owner, here and on the disk.

PASSES = 3  # until nothing is found any more


class Erased(Struct):
    """What was removed of an owner."""

    owner: str
    sandboxes_ended: int
    removed: dict[str, int]  # rows, by table, and `file_bytes`
    left: dict[str, int]  # what other host processes work with: ask them, too
    audit_lines: int  # in which a pseudonym stands for the name now


class Erasing:
    """`end_sessions` ends what a dialect keeps for an owner between requests."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        keys: StoredKeys,
        traffic: Traffic,
        end_sessions: Callable[[str], Awaitable[None]],
    ):
        self._end_sessions = end_sessions
        self._engine = engine
        self._gateway = gateway
        self._keys = keys
        self._traffic = traffic

    def check(self, owner: str) -> None:
        """Raises InvalidRequest for what cannot be an owner, here."""
        if owner != self._engine.config.librechat.jwt.owner:
            check_owner(owner)

    async def erase(self, owner: str, *, forget: bool) -> Erased:
        """Their keys stop first. What cannot be removed can be asked for again. Raises Unavailable.

        With `forget` a pseudonym stands for their name in the audit log.
        """
        admission = self._engine.housing.admission
        admission.shut(owner)
        try:
            return await self._erase(owner, forget)
        except (OSError, sqlite3.Error) as error:
            raise errors.Unavailable(f"not all of {owner!r} could be removed: {error}; do it again") from None
        finally:
            admission.shut_out.end(owner)

    async def pseudonym(self, owner: str) -> str:
        """What stands for them in the audit log, once that has forgotten them. Raises Unavailable."""
        try:
            return audit.pseudonym(owner, await asyncio.to_thread(audit.salt_of, self._audit_directory))
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None

    async def _erase(self, owner: str, forget: bool) -> Erased:
        await self._keys.revoke_all(owner)
        await self._traffic.cut_off(owner)
        await self._end_sessions(owner)
        await self._gateway.errands.cancel(owner)
        await self._engine.housing.admission.shut_out.end_work(owner)
        ended = await end_all(self._engine, owner)
        removed: Counter[str] = Counter()
        for _ in range(PASSES):
            await asyncio.sleep(PAUSE_SECONDS)
            found = await self._remove(owner)
            removed.update(found)
            if not found:
                break
        await self._keys.try_refresh()
        log.forget(owner)
        log.info("owner.erased", rows=sum(removed.values()) - removed["file_bytes"], bytes=removed["file_bytes"])
        lines = await self._rename(owner) if forget else 0
        left = await self._left(owner)
        told, who = owner, acting()
        if forget:
            told = await self.pseudonym(owner)
            who = msgspec.structs.replace(who, owner=told) if who is not None and who.owner == owner else who
        self._engine.trail.note("owner.erased", told, bytes=removed["file_bytes"], who=who)
        return Erased(owner=owner, sandboxes_ended=ended, removed=removed, left=left, audit_lines=lines)

    async def _remove(self, owner: str) -> dict[str, int]:
        shelf, data_dir = self._gateway.shelf, Path(self._engine.config.data_dir)
        shelf.steps.flush()
        shelf.responses.flush()
        await self._engine.records.list(owner)  # after all that was put
        others = await self._others(owner)
        removed = await shelf.database.do(lambda db: erasure.erase(db, data_dir, owner, others))
        shelf.database.scrub()
        return removed

    async def _left(self, owner: str) -> dict[str, int]:
        others = await self._others(owner)
        return await self._gateway.shelf.database.do(lambda db: erasure.left(db, owner, others))

    async def _others(self, owner: str) -> list[str]:
        """The other host processes that run, and have something of theirs."""
        instance = self._engine.instance
        known = await self._gateway.shelf.database.do(lambda db: erasure.instances(db, owner))
        return [name for name in known if name != instance.name and instance.is_live(name)]

    async def _rename(self, owner: str) -> int:
        await self._engine.trail.flushed()
        return await asyncio.to_thread(audit.forget, self._audit_directory, owner)

    @property
    def _audit_directory(self) -> Path:
        return Path(self._engine.config.data_dir, "audit")


# `/admin/owners`: forgetting one. For admins.


class AdminOwners:
    def __init__(self, dialect: Dialect, erasing: Erasing, gatekeeper: Gatekeeper):
        self._erasing = erasing
        self._gatekeeper = gatekeeper
        self.routes = [Route("/admin/owners/{owner}", Edge(dialect, self.erase), methods=["DELETE"])]

    async def erase(self, request: Request) -> Response:
        """Harmless for an owner who has nothing."""
        self._gatekeeper.admit_admin(request)
        owner, audit = request.path_params["owner"], request.query_params.get("audit", "false")
        self._erasing.check(owner)
        if audit not in ("true", "false"):
            raise errors.InvalidRequest("audit must be true or false: whether the audit log forgets the name, too")
        if audit == "true":
            forgotten(request.scope, owner, await self._erasing.pseudonym(owner))
        return json_reply(await self._erasing.erase(owner, forget=audit == "true"))


T = TypeVar("T", bound=Struct)


class Asked(Struct, forbid_unknown_fields=True):
    """What a new key should be."""

    owner: str = "local"
    role: str = "user"
    name: str = ""
    expires_at: float | None = None  # seconds since 1970


class Renewed(Struct, forbid_unknown_fields=True):
    """What a key should be that takes another's place."""

    expires_at: float | None = None  # None: when the other one would have expired, if ever


class Admin:
    def __init__(self, keys: StoredKeys, steps: Steps, gatekeeper: Gatekeeper, engine: Engine, erasing: Erasing):
        self._keys = keys
        self._engine = engine
        self._quotas = engine.quotas
        self._gatekeeper = gatekeeper
        self._routes = Routes(
            [
                Route("/admin/keys", Edge(self, self.list), methods=["GET"]),
                Route("/admin/keys", Edge(self, self.add), methods=["POST"]),
                Route("/admin/keys/{id}", Edge(self, self.revoke), methods=["DELETE"]),
                Route("/admin/keys/{id}/rotate", Edge(self, self.rotate), methods=["POST"]),
                *AdminTenants(self, engine.quotas, keys, gatekeeper).routes,
                *AdminRequests(self, steps, gatekeeper).routes,
                *AdminCapacity(self, engine, gatekeeper).routes,
                *AdminOwners(self, erasing, gatekeeper).routes,
                *AdminAudit(self, Path(engine.config.data_dir, "audit"), gatekeeper).routes,
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._routes(scope, receive, send)

    def render_error(self, error: errors.ClocheError, request: Request) -> Response:
        return error_reply(error)

    async def list(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(await self._keys.list())

    async def add(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        asked = decode_body(await whole_body(request, MAX_ASKED_BYTES), Asked)
        made = await self._keys.add(asked.owner, asked.role, asked.name, asked.expires_at)
        return json_reply(told(*made), 201)

    async def rotate(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        asked = decode_body(await whole_body(request, MAX_ASKED_BYTES), Renewed)
        made = await self._keys.rotate(request.path_params["id"], asked.expires_at)
        await self._quotas.try_refresh()
        return json_reply(told(*made), 201)

    async def revoke(self, request: Request) -> Response:
        """With `kill=true` its sandboxes end, too, also where it was revoked before."""
        self._gatekeeper.admit_admin(request)
        id, kill = request.path_params["id"], request.query_params.get("kill", "false")
        if kill not in ("true", "false"):
            raise errors.InvalidRequest("kill must be true or false: whether the sandboxes that it made end, too")
        await self._keys.revoke(id, again=kill == "true")
        if kill == "false":
            return Response(status_code=204)
        return json_reply({"id": id, "sandboxes_killed": await kill_made(self._engine, self._keys, id)})


def decode_body(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest."""
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fields = ", ".join(each.name for each in msgspec.structs.fields(kind))
        raise errors.InvalidRequest(f"the body must be JSON with {fields}: {error}") from None


def told(record: KeyRecord, key: str) -> dict[str, object]:
    """A new key: the only answer that ever has it."""
    return {**msgspec.structs.asdict(record), "key": key}
