"""Requests of the control plane, decoded from bodies and query strings. Pure.

Raises InvalidRequest and NotSupported. Unknown fields are ignored, as E2B does. A feature that this server
lacks is refused where it is requested, but a value that requests the existing behaviour is accepted: no
client's default request is refused.
"""

from __future__ import annotations

import binascii
import math
import uuid
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar
from urllib.parse import unquote_plus

import msgspec

from cloche import errors
from cloche.api.dialect import Json, NotSupported, decode_json_body, format_timestamp, to_microseconds
from cloche.api.e2b.network_schema import (
    E2bEgressRequest,
    E2bNetworkBody,
    allows_internet,
    decode_egress_request,
    decode_host_mask,
    encode_policy,
)
from cloche.api.e2b.registry import E2bSandbox, template_alias_of, template_id_of
from cloche.engine.operations.metrics import Sample
from cloche.model import MIB, Limits, OnDeadline, SandboxInfo, Struct, Template

T = TypeVar("T", bound=msgspec.Struct)
Order = Literal["asc", "desc"]
Position = tuple[int, str]  # when something was made, in microseconds since 1970, and its id: where a page ended

STATES = ("running", "paused")
MAX_PAGE_SIZE = 100
MAX_REFRESH_SECONDS = 3600
_MAX_MICROSECONDS = 1 << 53


class AutoResumeBody(Struct):
    enabled: bool = False


class IamBody(Struct):
    tokens: dict[str, Any] | None = None


class VolumeMountBody(Struct):
    name: str
    path: str


class E2bCreateBody(Struct):
    """The body of a creation. The names are E2B's."""

    templateID: str
    timeout: int | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: AutoResumeBody | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = None
    network: E2bNetworkBody | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    mcp: Any = None  # the client starts the gateway itself, by a command
    iam: IamBody | None = None
    volumeMounts: list[VolumeMountBody] | None = None


class SetTimeoutBody(Struct):
    """The body of a new timeout."""

    timeout: int | None = None


class ConnectSandboxBody(Struct):
    """The body of a connection."""

    timeout: int | None = None
    memory: bool | None = None


class ResumeSandboxBody(Struct):
    """The body of a resume request, which old clients send instead of `connect`."""

    timeout: int | None = None
    autoPause: bool | None = None
    memory: bool | None = None


class PauseSandboxBody(Struct):
    """The body of a pause. An unresponsive guest is never paused, with or without `requireHealthyGuest`."""

    memory: bool | None = None


class ForkSandboxBody(Struct):
    timeout: int | None = None
    count: int | None = None


class RefreshSandboxBody(Struct):
    duration: int | None = None


class E2bCreateRequest(Struct):
    """A requested sandbox, with every default filled in."""

    template: str
    timeout_seconds: int
    secure: bool
    public_traffic: bool
    metadata: dict[str, str]
    env: dict[str, str]
    egress: E2bEgressRequest
    host_mask: str | None
    on_deadline: OnDeadline
    pause_memory: bool
    auto_resume: bool
    volumes: dict[str, str]


def decode_create_request(body: bytes, *, version: int) -> E2bCreateRequest:
    """The sandbox that the body of `POST /sandboxes` (1) or `POST /v2/sandboxes` (2) asks for."""
    message = decode_json_body(body, E2bCreateBody)
    _check_lifecycle(message)
    _check_no_iam(message)
    secure = version >= 2 or bool(message.secure)
    public = message.network is None or message.network.allowPublicTraffic is not False
    if not public and not secure:
        raise errors.InvalidRequest("network.allowPublicTraffic: it can be false only with secure: true")
    return E2bCreateRequest(
        template=message.templateID,
        timeout_seconds=_value_or_default(message.timeout, 300 if version >= 2 else 15),
        secure=secure,
        public_traffic=public,
        metadata=message.metadata or {},
        env=message.envVars or {},
        egress=decode_egress_request(message.network, message.allow_internet_access),
        host_mask=decode_host_mask(message.network),
        on_deadline="pause" if message.autoPause else "kill",
        pause_memory=message.autoPauseMemory is not False,
        auto_resume=_wants_auto_resume(message),
        volumes=_volumes_by_path(message.volumeMounts or []),
    )


def _volumes_by_path(mounts: list[VolumeMountBody]) -> dict[str, str]:
    """By path."""
    volumes = {each.path.rstrip("/"): each.name for each in mounts}
    if len(volumes) < len(mounts):
        raise errors.InvalidRequest("volumeMounts: two volumes cannot be mounted at one path")
    return volumes


def _check_lifecycle(message: E2bCreateBody) -> None:
    if message.autoPauseMemory is False and _wants_auto_resume(message):
        raise errors.InvalidRequest("autoPauseMemory: it cannot be false together with autoResume")
    if message.autoPauseMemory is False and not message.autoPause:
        raise errors.InvalidRequest("autoPauseMemory: it has a meaning only with autoPause: true")


def _wants_auto_resume(message: E2bCreateBody) -> bool:
    return message.autoResume is not None and message.autoResume.enabled


def _check_no_iam(message: E2bCreateBody) -> None:
    if message.iam is not None and message.iam.tokens:
        raise NotSupported("iam: this server issues no workload identities; leave it out")


def _value_or_default(given: int | None, default: int) -> int:
    return default if given is None else given


# -- lists


class E2bSandboxQuery(Struct):
    """The filter, order and start of a list of an owner's sandboxes."""

    metadata: dict[str, str] = {}
    states: tuple[str, ...] = STATES
    order: Order = "desc"
    started_after: int | None = None  # microseconds since 1970
    template: str | None = None
    limit: int = MAX_PAGE_SIZE
    after: Position | None = None


def decode_sandbox_query(query: Mapping[str, str]) -> E2bSandboxQuery:
    """The query of `GET /v2/sandboxes`."""
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise errors.InvalidRequest(f"order: it is asc or desc, not {order!r}")
    return E2bSandboxQuery(
        metadata=decode_metadata_filter(query.get("metadata", "")),
        states=_parse_states(query.get("state", "")),
        order="asc" if order == "asc" else "desc",
        started_after=_parse_time_microseconds("startedAfter", query["startedAfter"])
        if query.get("startedAfter")
        else None,
        template=query.get("template") or None,
        limit=parse_whole_number("limit", query.get("limit"), 1, MAX_PAGE_SIZE) or MAX_PAGE_SIZE,
        after=decode_page_token(query["nextToken"]) if query.get("nextToken") else None,
    )


def decode_metadata_filter(text: str) -> dict[str, str]:
    """Decodes `text`, already decoded once by the query: clients encode keys and values, then the whole, again."""
    found = {}
    for pair in filter(None, unquote_plus(text).split("&")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidRequest("metadata: it must be pairs like key=value, joined by &, each URL-encoded")
        found[unquote_plus(name)] = unquote_plus(value)
    return found


def encode_page_token(started: int, id: str) -> str:
    """The token for the next page: encodes the position of this page's last item."""
    return urlsafe_b64encode(f"{started}:{id}".encode()).decode().rstrip("=")


def parse_whole_number(name: str, text: str | None, least: int, most: int) -> int | None:
    """A parameter of a query; None if it is not given."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise errors.InvalidRequest(f"{name}: it must be a whole number from {least} to {most}, not {text[:40]!r}")
    return int(text)


def _parse_states(text: str) -> tuple[str, ...]:
    states = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not set(states) <= set(STATES):
        raise errors.InvalidRequest(f"state: it is running, paused or both, joined by a comma, not {text[:80]!r}")
    return states or STATES


def _parse_time_microseconds(name: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # a plus that was not encoded
        return to_microseconds((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(f"{name}: it must be a time like 2026-01-31T12:00:00Z, not {text[:80]!r}") from None


def decode_page_token(token: str) -> Position:
    """The position that `encode_page_token` encoded."""
    try:
        started, _, id = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition(":")
        found = int(started)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("nextToken: it is none of this server's; ask again without it") from None
    return min(max(found, 0), _MAX_MICROSECONDS), id


# Responses of the control plane. Pure.

ENVD_VERSION = "0.6.13"  # what it promises decides which of their features clients use
CLIENT_ID = "cloche"


def encode_created_sandbox(e2b_sandbox: E2bSandbox, domain: str) -> Json:
    """The response to a creation or a connection."""
    return {
        **_encode_sandbox_identity(e2b_sandbox.info),
        "envdAccessToken": e2b_sandbox.access_token,
        "trafficAccessToken": e2b_sandbox.traffic_token,
        "domain": domain,
    }


def encode_sandbox_detail(e2b_sandbox: E2bSandbox, domain: str) -> Json:
    info = e2b_sandbox.info
    return {
        **encode_listed_sandbox(info),
        "envdAccessToken": e2b_sandbox.access_token,
        "domain": domain,
        "lifecycle": {"autoResume": info.auto_resume, "onTimeout": info.on_deadline},
        **({} if e2b_sandbox.is_paused else _encode_sandbox_network(e2b_sandbox)),
        **({} if info.pause_memory is None else {"pauseMode": "full" if info.pause_memory else "filesystem"}),
    }


def _encode_sandbox_network(e2b_sandbox: E2bSandbox) -> Json:
    """The network of a running sandbox: of a paused one only the data to recreate it is known."""
    policy = e2b_sandbox.sandbox.network.policy
    mask = {} if e2b_sandbox.host_mask is None else {"maskRequestHost": e2b_sandbox.host_mask}
    network = {"allowPublicTraffic": e2b_sandbox.public_traffic, **mask, **encode_policy(policy)}
    return {"allowInternetAccess": allows_internet(policy), "network": network}


def encode_listed_sandbox(info: SandboxInfo) -> Json:
    return {
        **_encode_sandbox_identity(info),
        **encode_size_limits(info.limits),
        "startedAt": format_timestamp(info.created_at),
        "endAt": _format_end(info),
        "state": info.state,
        "metadata": info.metadata,
        "volumeMounts": [{"name": name, "path": path} for path, name in info.volumes.items()],
    }


NO_DEADLINE = "9999-12-31T23:59:59Z"  # the end of a sandbox that has no deadline


def _format_end(info: SandboxInfo) -> str:
    end = info.deadline_at if info.paused_at is None else info.paused_at
    return NO_DEADLINE if end is None else format_timestamp(end)


def _encode_sandbox_identity(info: SandboxInfo) -> Json:
    return {
        "templateID": template_id_of(info),
        "alias": template_alias_of(info),
        "sandboxID": info.id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
    }


def encode_size_limits(limits: Limits) -> Json:
    return {
        "cpuCount": math.ceil(limits.cpus),
        "memoryMB": limits.memory_bytes // MIB,
        "diskSizeMB": limits.space_bytes // MIB,
    }


# -- metrics and logs


def encode_metric_sample(sample: Sample, limits: Limits) -> Json:
    return {
        "timestamp": format_timestamp(sample.at),
        "timestampUnix": int(sample.at),
        "cpuCount": math.ceil(limits.cpus),
        "cpuUsedPct": round(sample.cpu_percent, 2),
        "memUsed": sample.memory_bytes,
        "memTotal": limits.memory_bytes,
        "memCache": sample.cache_bytes,
        "diskUsed": sample.space_bytes,
        "diskTotal": limits.space_bytes,
    }


def encode_log_entries(info: SandboxInfo) -> list[Json]:
    """The lifecycle events of a sandbox: never the output of a program in it."""
    made = f"sandbox created from {info.template}"
    entries = [_encode_log_entry(info.created_at, made, event="sandbox.created", template=info.template)]
    if info.paused_at is not None:
        entries.append(_encode_log_entry(info.paused_at, "sandbox paused", event="sandbox.paused"))
    if info.ended_at is not None:
        reason = info.end_reason or "its host process died"
        entries.append(
            _encode_log_entry(info.ended_at, f"sandbox ended: {reason}", event="sandbox.ended", reason=reason)
        )
    return entries


def encode_log_line(entry: Json) -> Json:
    """An entry in version 1's format: E2B's command line parses JSON from its line."""
    line = {"level": entry["level"], "logger": "cloche", "message": entry["message"], **entry["fields"]}
    return {"timestamp": entry["timestamp"], "line": msgspec.json.encode(line).decode()}


def _encode_log_entry(at: float, message: str, **fields: str) -> Json:
    return {"timestamp": format_timestamp(at), "level": "info", "message": message, "fields": fields}


def to_milliseconds(seconds: float) -> int:
    return to_microseconds(seconds) // 1000


# -- templates


def encode_host_template(versions: Sequence[Template], names: Sequence[str], limits: Limits) -> Json:
    """A template by its newest version, which is the first."""
    template = versions[0]
    return {
        "templateID": template.ref,
        "buildID": template_build_id(template),
        **encode_size_limits(limits),
        "public": True,
        "aliases": names,
        "names": names,
        "createdAt": format_timestamp(template.created_at),
        "updatedAt": format_timestamp(template.created_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(versions),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }


def encode_host_template_detail(versions: Sequence[Template], names: Sequence[str], limits: Limits) -> Json:
    """A template with all its versions, the newest first."""
    newest = encode_host_template(versions, names, limits)
    kept = ("templateID", "public", "aliases", "names", "createdAt", "updatedAt", "lastSpawnedAt", "spawnCount")
    return {
        **{name: newest[name] for name in kept},
        "builds": [_encode_template_version(each, limits) for each in versions],
    }


def template_build_id(template: Template) -> str:
    """A UUID, as clients expect, made from the version's digest."""
    return str(uuid.UUID(hex=template.version[:32].ljust(32, "0")))


def _encode_template_version(template: Template, limits: Limits) -> Json:
    return {
        "buildID": template_build_id(template),
        "status": "ready",
        "createdAt": format_timestamp(template.created_at),
        "updatedAt": format_timestamp(template.created_at),
        "finishedAt": format_timestamp(template.created_at),
        **encode_size_limits(limits),
        "envdVersion": ENVD_VERSION,
    }
