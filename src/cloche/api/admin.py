"""`/admin`: keys, quotas, usage, capacity, audit log, request records and erasure of owners.

Admins only: with an admin's key, or over the control socket.
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
from starlette.types import Receive, Scope, Send

from cloche import errors
from cloche.api.admin_requests import AdminRequests
from cloche.api.auth import Gatekeeper
from cloche.api.dialect import InvalidJson, decode_json, dialect_route, json_reply
from cloche.api.http import Dialect, read_decoded
from cloche.api.requests import RequestTracker, mark_owner_erased
from cloche.api.system import error_reply, own_router
from cloche.config.sections import QUOTA_NAMES, QuotaOverride
from cloche.engine.engine import Engine
from cloche.engine.operations.erase import end_all_of_owner
from cloche.engine.principal import current_principal
from cloche.engine.quotas.occupancy import CapacityInfo, MemoryLeft, PoolTotals
from cloche.engine.quotas.quotas import Quotas
from cloche.engine.sandboxes.endings import KEY_REVOKED
from cloche.gateway.gateway import Gateway
from cloche.model import KIB, Struct
from cloche.store import audit, erasure
from cloche.store.audit_reader import AuditQuery, read_last
from cloche.store.gateway import StoredSteps
from cloche.store.keys import KeyRecord, StoredKeys, check_owner_name
from cloche.store.quotas import QuotaSubject
from cloche.telemetry import log

# `/admin/audit`: the audit log, filtered by owner, sandbox, action and time. Admins only.

MAX_AUDIT_LINES = 10_000
LATEST_AUDIT_TIME = 253402300799.0  # the end of the year 9999: the log has four digits for it
AUDIT_FILTERS = ("owner", "sandbox", "what", "since", "limit")


class AdminAudit:
    def __init__(self, dialect: Dialect, directory: Path, gatekeeper: Gatekeeper):
        self._directory = directory
        self._gatekeeper = gatekeeper
        self.routes = [dialect_route(dialect, "GET", "/admin/audit", self.list)]

    async def list(self, request: Request) -> Response:
        """Lines of the audit log. Actions of the last second may still be missing."""
        self._gatekeeper.admit_admin(request)
        wanted, limit = decode_audit_query(request.query_params)
        try:
            found = await asyncio.to_thread(read_last, self._directory, wanted, limit)
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None
        return json_reply({"lines": found})


def decode_audit_query(query: QueryParams) -> tuple[AuditQuery, int]:
    """Raises InvalidRequest."""
    unknown = [name for name in query if name not in AUDIT_FILTERS]
    if unknown:
        raise errors.InvalidRequest(f"{unknown[0][:100]!r} is no filter: there are {', '.join(AUDIT_FILTERS)}")
    limit = query.get("limit", "1000")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 5 and 1 <= int(limit) <= MAX_AUDIT_LINES):
        raise errors.InvalidRequest(f"limit must be a number from 1 to {MAX_AUDIT_LINES}, not {limit[:100]!r}")
    since = query.get("since")
    audit_query = AuditQuery(
        owner=query.get("owner"),
        sandbox=query.get("sandbox"),
        what=query.get("what"),
        since=None if since is None else _parse_since_time(since),
    )
    return audit_query, int(limit)


def _parse_since_time(text: str) -> float:
    try:
        at = float(text) if text.replace(".", "", 1).isdigit() else datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        at = math.nan
    if not 0 <= at <= LATEST_AUDIT_TIME:
        raise errors.InvalidRequest(
            f"since must be seconds since 1970, or like 2026-11-16T17:00:00Z, not {text[:100]!r}"
        )
    return at


# `/admin/capacity`: the limits of this server and their current use. Admins only.


class AdminCapacity:
    def __init__(self, dialect: Dialect, engine: Engine, gatekeeper: Gatekeeper):
        self._engine = engine
        self._gatekeeper = gatekeeper
        self.routes = [dialect_route(dialect, "GET", "/admin/capacity", self.show)]

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(measure_capacity(self._engine))


def measure_capacity(engine: Engine) -> CapacityInfo:
    admission = engine.cell_supply.admission
    memory = admission.memory
    return CapacityInfo(
        sandboxes=admission.sandboxes.occupancy,
        executions=admission.executions.occupancy,
        running=engine.running,
        paused=engine.paused,
        pool=PoolTotals(ready=engine.waiting, wanted=engine.cell_supply.wanted),
        memory=MemoryLeft(
            left_bytes=memory.left_bytes,
            reserve_bytes=memory.reserve_bytes,
            enough=memory.enough(),
            ample=memory.ample(),
        ),
    )


# `/admin/usage` and `/admin/quotas`: usage and limits of owners and keys. Admins only.

MAX_QUOTA_REQUEST_BYTES = 16 * KIB


class AdminTenants:
    def __init__(self, dialect: Dialect, quotas: Quotas, keys: StoredKeys, gatekeeper: Gatekeeper):
        self._quotas = quotas
        self._keys = keys
        self._gatekeeper = gatekeeper
        one_owner, one_key = "/admin/quotas/{owner}", "/admin/keys/{id}/quota"
        self.routes = [
            dialect_route(dialect, "GET", "/admin/usage", self.usage),
            dialect_route(dialect, "GET", "/admin/usage/{owner}", self.show_owner_usage),
            dialect_route(dialect, "GET", "/admin/quotas", self.list),
            *(dialect_route(dialect, "GET", path, self.show) for path in (one_owner, one_key)),
            *(dialect_route(dialect, "PUT", path, self.set) for path in (one_owner, one_key)),
            *(dialect_route(dialect, "DELETE", path, self.reset) for path in (one_owner, one_key)),
        ]

    async def usage(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(await self._quotas.usage_of_all_owners())

    async def show_owner_usage(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        check_owner_name(request.path_params["owner"])
        return json_reply(await self._quotas.usage(request.path_params["owner"]))

    async def list(self, request: Request) -> Response:
        """The default quotas, and the owners and keys with overrides."""
        self._gatekeeper.admit_admin(request)
        own = [self._quota_response(tenant) for tenant in sorted(self._quotas.overrides)]
        return json_reply({"defaults": self._quotas.defaults, "own": own})

    async def show(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        return json_reply(self._quota_response(await self._tenant_from_path(request, revoked=True)))

    async def set(self, request: Request) -> Response:
        """Replaces every earlier override of this owner or key."""
        self._gatekeeper.admit_admin(request)
        tenant = await self._tenant_from_path(request)
        override = await read_decoded(request, decode_quota_override, MAX_QUOTA_REQUEST_BYTES)
        await self._quotas.set(tenant, override)
        return json_reply(self._quota_response(tenant))

    async def reset(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        await self._quotas.set(await self._tenant_from_path(request, revoked=True), QuotaOverride())
        return Response(status_code=204)

    async def _tenant_from_path(self, request: Request, *, revoked: bool = False) -> QuotaSubject:
        """Raises NotFound for an unknown key, InvalidRequest for an invalid owner name."""
        if "id" in request.path_params:
            key = await self._keys.get(request.path_params["id"], revoked=revoked)
            return QuotaSubject(key.owner, key.id)
        check_owner_name(request.path_params["owner"])
        return QuotaSubject(request.path_params["owner"])

    def _quota_response(self, tenant: QuotaSubject) -> dict[str, Any]:
        return {
            "owner": tenant.owner,
            **({"key_id": tenant.key_id} if tenant.key_id else {}),
            "own": self._quotas.overrides.get(tenant, QuotaOverride()),
            "quota": self._quotas.quota_of(tenant),
        }


def decode_quota_override(body: bytes) -> QuotaOverride:
    """Raises InvalidRequest."""
    try:
        return decode_json(body, QuotaOverride)
    except errors.InvalidRequest as error:
        why = error.detail if isinstance(error, InvalidJson) else error
        raise errors.InvalidRequest(
            f"the body must be JSON with numbers, or null for no limit, for {', '.join(QUOTA_NAMES)}: {why}"
        ) from None


# Ends the sandboxes of a revoked key: a sandbox's own tokens stay valid without the key.

KILL_ROUNDS = 2
KILL_PAUSE_SECONDS = 0.2  # in which what was being made is there, or was cut off


async def kill_key_sandboxes(engine: Engine, keys: StoredKeys, id: str) -> int:
    """Ends all sandboxes here, running and paused, of that key and the keys that it replaced.

    Returns their number. Raises NotFound for an unknown key.
    """
    line, killed = await keys.line(id), 0
    for look in range(KILL_ROUNDS):
        await asyncio.sleep(KILL_PAUSE_SECONDS if look else 0.0)
        theirs = [each for each in engine.known(None) if each.key_id in line]
        killed += sum(await asyncio.gather(*(_kill_one_sandbox(engine, each.id, each.owner) for each in theirs)))
    return killed


async def _kill_one_sandbox(engine: Engine, id: str, owner: str) -> int:
    with contextlib.suppress(errors.ClocheError):  # it ended by itself, or another process has it now
        await engine.kill(id, owner, KEY_REVOKED)
        return 1
    return 0


# Erasure of one owner: ends running work and removes all stored data.

ERASE_PASSES = 3  # until nothing is found any more


class ErasureReport(Struct):
    """The result of an erasure."""

    owner: str
    sandboxes_ended: int
    removed: dict[str, int]  # rows, by table, and `file_bytes`
    left: dict[str, int]  # what other host processes work with: ask them, too
    audit_lines: int  # in which a pseudonym stands for the name now


class OwnerErasure:
    """Erases owners. `end_sessions` ends the state that a dialect keeps for an owner between requests."""

    def __init__(
        self,
        engine: Engine,
        gateway: Gateway,
        keys: StoredKeys,
        traffic: RequestTracker,
        end_sessions: Callable[[str], Awaitable[None]],
    ):
        self._end_sessions = end_sessions
        self._engine = engine
        self._gateway = gateway
        self._keys = keys
        self._traffic = traffic

    def check(self, owner: str) -> None:
        """Raises InvalidRequest for a name that cannot be an owner on this server."""
        if owner != self._engine.config.librechat.jwt.owner:
            check_owner_name(owner)

    async def erase_owner(self, owner: str, *, forget: bool) -> ErasureReport:
        """Erases an owner, keys first. A failed erasure can be repeated. Raises Unavailable.

        With `forget` a pseudonym replaces the owner's name in the audit log.
        """
        admission = self._engine.cell_supply.admission
        admission.shut(owner)
        try:
            return await self._erase_all_data(owner, forget)
        except (OSError, sqlite3.Error) as error:
            raise errors.Unavailable(f"not all of {owner!r} could be removed: {error}; do it again") from None
        finally:
            admission.lockout.end(owner)

    async def audit_pseudonym(self, owner: str) -> str:
        """The name that replaces this owner in the audit log after an erasure. Raises Unavailable."""
        try:
            return audit.make_pseudonym(owner, await asyncio.to_thread(audit.load_salt, self._audit_directory))
        except OSError as error:
            raise errors.Unavailable(f"the audit log cannot be read: {error.strerror}") from None

    async def _erase_all_data(self, owner: str, forget: bool) -> ErasureReport:
        await self._keys.revoke_all(owner)
        await self._traffic.cut_off(owner)
        await self._end_sessions(owner)
        await self._gateway.errands.cancel(owner)
        await self._engine.cell_supply.admission.lockout.end_work(owner)
        ended = await end_all_of_owner(self._engine, owner)
        removed: Counter[str] = Counter()
        for _ in range(ERASE_PASSES):
            await asyncio.sleep(KILL_PAUSE_SECONDS)
            found = await self._remove_stored_data(owner)
            removed.update(found)
            if not found:
                break
        await self._keys.try_refresh()
        log.forget(owner)
        log.info("owner.erased", rows=sum(removed.values()) - removed["file_bytes"], bytes=removed["file_bytes"])
        lines = await self._pseudonymize_audit_log(owner) if forget else 0
        left = await self._count_left_rows(owner)
        told, who = owner, current_principal()
        if forget:
            told = await self.audit_pseudonym(owner)
            who = msgspec.structs.replace(who, owner=told) if who is not None and who.owner == owner else who
        self._engine.audit_log.record("owner.erased", told, bytes=removed["file_bytes"], who=who)
        return ErasureReport(owner=owner, sandboxes_ended=ended, removed=removed, left=left, audit_lines=lines)

    async def _remove_stored_data(self, owner: str) -> dict[str, int]:
        gateway_store, data_dir = self._gateway.gateway_store, Path(self._engine.config.data_dir)
        gateway_store.steps.flush()
        gateway_store.responses.flush()
        await self._engine.records.list(owner)  # after all that was put
        others = await self._live_other_instances(owner)
        removed = await gateway_store.database.do(lambda db: erasure.erase_owner(db, data_dir, owner, others))
        gateway_store.database.scrub_log()
        return removed

    async def _count_left_rows(self, owner: str) -> dict[str, int]:
        others = await self._live_other_instances(owner)
        return await self._gateway.gateway_store.database.do(lambda db: erasure.count_left(db, owner, others))

    async def _live_other_instances(self, owner: str) -> list[str]:
        """The other running host processes with data of this owner."""
        instance = self._engine.instance
        known = await self._gateway.gateway_store.database.do(lambda db: erasure.find_instances(db, owner))
        return [name for name in known if name != instance.name and instance.is_live(name)]

    async def _pseudonymize_audit_log(self, owner: str) -> int:
        await self._engine.audit_log.wait_flushed()
        return await asyncio.to_thread(audit.pseudonymize_owner, self._audit_directory, owner)

    @property
    def _audit_directory(self) -> Path:
        return Path(self._engine.config.data_dir, "audit")


# `/admin/owners`: erases one owner. Admins only.


class AdminOwners:
    def __init__(self, dialect: Dialect, erasing: OwnerErasure, gatekeeper: Gatekeeper):
        self._erasing = erasing
        self._gatekeeper = gatekeeper
        self.routes = [dialect_route(dialect, "DELETE", "/admin/owners/{owner}", self.erase_owner)]

    async def erase_owner(self, request: Request) -> Response:
        """Erases an owner. Harmless for an owner without any data."""
        self._gatekeeper.admit_admin(request)
        owner, audit = request.path_params["owner"], request.query_params.get("audit", "false")
        self._erasing.check(owner)
        if audit not in ("true", "false"):
            raise errors.InvalidRequest("audit must be true or false: whether the audit log forgets the name, too")
        if audit == "true":
            mark_owner_erased(request.scope, owner, await self._erasing.audit_pseudonym(owner))
        return json_reply(await self._erasing.erase_owner(owner, forget=audit == "true"))


T = TypeVar("T", bound=Struct)


class NewKeyRequest(Struct, forbid_unknown_fields=True):
    """The body of a request for a new key."""

    owner: str = "local"
    role: str = "user"
    name: str = ""
    expires_at: float | None = None  # seconds since 1970


class RotateKeyRequest(Struct, forbid_unknown_fields=True):
    """The body of a key rotation: the new key replaces the old one."""

    expires_at: float | None = None  # None: when the other one would have expired, if ever


class AdminApi:
    def __init__(
        self, keys: StoredKeys, steps: StoredSteps, gatekeeper: Gatekeeper, engine: Engine, erasing: OwnerErasure
    ):
        self._keys = keys
        self._engine = engine
        self._quotas = engine.quotas
        self._gatekeeper = gatekeeper
        self._routes = own_router(
            [
                dialect_route(self, "GET", "/admin/keys", self.list),
                dialect_route(self, "POST", "/admin/keys", self.add),
                dialect_route(self, "DELETE", "/admin/keys/{id}", self.revoke),
                dialect_route(self, "POST", "/admin/keys/{id}/rotate", self.rotate),
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
        asked = await _read_key_request(request, NewKeyRequest)
        made = await self._keys.add(asked.owner, asked.role, asked.name, asked.expires_at)
        return json_reply(new_key_response(*made), 201)

    async def rotate(self, request: Request) -> Response:
        self._gatekeeper.admit_admin(request)
        asked = await _read_key_request(request, RotateKeyRequest)
        made = await self._keys.rotate(request.path_params["id"], asked.expires_at)
        await self._quotas.try_refresh()
        return json_reply(new_key_response(*made), 201)

    async def revoke(self, request: Request) -> Response:
        """Revokes a key. `kill=true` also ends its sandboxes, even if the key was revoked before."""
        self._gatekeeper.admit_admin(request)
        id, kill = request.path_params["id"], request.query_params.get("kill", "false")
        if kill not in ("true", "false"):
            raise errors.InvalidRequest("kill must be true or false: whether the sandboxes that it made end, too")
        await self._keys.revoke(id, again=kill == "true")
        if kill == "false":
            return Response(status_code=204)
        return json_reply({"id": id, "sandboxes_killed": await kill_key_sandboxes(self._engine, self._keys, id)})


async def _read_key_request(request: Request, kind: type[T]) -> T:
    return await read_decoded(request, lambda body: decode_key_request(body, kind), MAX_QUOTA_REQUEST_BYTES)


def decode_key_request(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest."""
    try:
        return decode_json(body or b"{}", kind)
    except InvalidJson as error:
        fields = ", ".join(each.name for each in msgspec.structs.fields(kind))
        raise errors.InvalidRequest(f"the body must be JSON with {fields}: {error.detail}") from None


def new_key_response(record: KeyRecord, key: str) -> dict[str, object]:
    """The response with a new key: the only response that ever contains the key itself."""
    return {**msgspec.structs.asdict(record), "key": key}
