"""What the control plane is asked for, read from bytes and query strings. Pure; raises InvalidRequest and NotOffered.

Fields that E2B has and we do not know are ignored, as E2B does. What this server cannot do is refused where it is asked
for, and accepted where its value asks for what is so anyway: no client's default request is refused.
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
from cloche.api.e2b.network_schema import Egress, Network, egress, has_internet, host_mask, shown
from cloche.api.e2b.registry import Resident, alias_of, template_id
from cloche.api.e2b.replies import NotOffered, microseconds, timestamp
from cloche.engine.operations.metrics import Sample
from cloche.model import MIB, Limits, OnDeadline, SandboxInfo, Struct, Template

T = TypeVar("T", bound=msgspec.Struct)
Order = Literal["asc", "desc"]
Position = tuple[int, str]  # when something was made, in microseconds since 1970, and its id: where a page ended

STATES = ("running", "paused")
MAX_PAGE = 100
MAX_REFRESH_SECONDS = 3600
_MAX_MICROSECONDS = 1 << 53


class AutoResume(Struct):
    enabled: bool = False


class Iam(Struct):
    tokens: dict[str, Any] | None = None


class VolumeMount(Struct):
    name: str
    path: str


class NewSandbox(Struct):
    """The body of a creation. The names are E2B's."""

    templateID: str
    timeout: int | None = None
    autoPause: bool | None = None
    autoPauseMemory: bool | None = None
    autoResume: AutoResume | None = None
    secure: bool | None = None
    allow_internet_access: bool | None = None
    network: Network | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    mcp: Any = None  # the client starts the gateway itself, by a command
    iam: Iam | None = None
    volumeMounts: list[VolumeMount] | None = None


class Lifespan(Struct):
    """The body of a new timeout."""

    timeout: int | None = None


class Connection(Struct):
    """The body of a connection."""

    timeout: int | None = None
    memory: bool | None = None


class Resumption(Struct):
    """The body of a resumption, as clients asked for it before there was `connect`."""

    timeout: int | None = None
    autoPause: bool | None = None
    memory: bool | None = None


class Pause(Struct):
    """The body of a pause. A guest that does not answer is never paused, whether `requireHealthyGuest` is there."""

    memory: bool | None = None


class Fork(Struct):
    timeout: int | None = None
    count: int | None = None


class Refresh(Struct):
    duration: int | None = None


class Wanted(Struct):
    """A sandbox that somebody wants, with every default filled in."""

    template: str
    timeout_seconds: int
    secure: bool
    public_traffic: bool
    metadata: dict[str, str]
    env: dict[str, str]
    egress: Egress
    host_mask: str | None
    on_deadline: OnDeadline
    pause_memory: bool
    auto_resume: bool
    volumes: dict[str, str]


def decode(body: bytes, type: type[T]) -> T:
    """A body that must be a JSON object. An empty one is an empty object."""
    try:
        return msgspec.json.decode(body.strip() or b"{}", type=type)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"the request's body is not right: {_located(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the request's body is not JSON: {error}") from None
    except RecursionError:  # in fields that nobody knows, too
        raise errors.InvalidRequest("the request's body is nested too deeply") from None


def wanted(body: bytes, *, version: int) -> Wanted:
    """The sandbox that the body of `POST /sandboxes` (1) or `POST /v2/sandboxes` (2) asks for."""
    asked = decode(body, NewSandbox)
    _check_lifecycle(asked)
    _check_attachments(asked)
    secure = version >= 2 or bool(asked.secure)
    public = asked.network is None or asked.network.allowPublicTraffic is not False
    if not public and not secure:
        raise errors.InvalidRequest("network.allowPublicTraffic: it can be false only with secure: true")
    return Wanted(
        template=asked.templateID,
        timeout_seconds=_default(asked.timeout, 300 if version >= 2 else 15),
        secure=secure,
        public_traffic=public,
        metadata=asked.metadata or {},
        env=asked.envVars or {},
        egress=egress(asked.network, asked.allow_internet_access),
        host_mask=host_mask(asked.network),
        on_deadline="pause" if asked.autoPause else "kill",
        pause_memory=asked.autoPauseMemory is not False,
        auto_resume=_resumes(asked),
        volumes=_volumes(asked.volumeMounts or []),
    )


def _volumes(mounts: list[VolumeMount]) -> dict[str, str]:
    """By path."""
    volumes = {each.path.rstrip("/"): each.name for each in mounts}
    if len(volumes) < len(mounts):
        raise errors.InvalidRequest("volumeMounts: two volumes cannot be mounted at one path")
    return volumes


def _check_lifecycle(asked: NewSandbox) -> None:
    if asked.autoPauseMemory is False and _resumes(asked):
        raise errors.InvalidRequest("autoPauseMemory: it cannot be false together with autoResume")
    if asked.autoPauseMemory is False and not asked.autoPause:
        raise errors.InvalidRequest("autoPauseMemory: it has a meaning only with autoPause: true")


def _resumes(asked: NewSandbox) -> bool:
    return asked.autoResume is not None and asked.autoResume.enabled


def _check_attachments(asked: NewSandbox) -> None:
    if asked.iam is not None and asked.iam.tokens:
        raise NotOffered("iam: this server issues no workload identities; leave it out")


def _located(error: msgspec.ValidationError) -> str:
    """msgspec says "Expected `str`, got `int` - at `$.metadata[...]`": the place first, in a client's words."""
    what, _, where = str(error).partition(" - at `$")
    place = where.rstrip("`").lstrip(".")
    return f"{place}: {what}" if place else what


def _default(given: int | None, default: int) -> int:
    return default if given is None else given


# -- lists


class Listing(Struct):
    """Which of an owner's sandboxes, in which order, from where on."""

    metadata: dict[str, str] = {}
    states: tuple[str, ...] = STATES
    order: Order = "desc"
    started_after: int | None = None  # microseconds since 1970
    template: str | None = None
    limit: int = MAX_PAGE
    after: Position | None = None


def listing(query: Mapping[str, str]) -> Listing:
    """The query of `GET /v2/sandboxes`."""
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise errors.InvalidRequest(f"order: it is asc or desc, not {order!r}")
    return Listing(
        metadata=metadata_filter(query.get("metadata", "")),
        states=_states(query.get("state", "")),
        order="asc" if order == "asc" else "desc",
        started_after=_moment("startedAfter", query["startedAfter"]) if query.get("startedAfter") else None,
        template=query.get("template") or None,
        limit=whole_number("limit", query.get("limit"), 1, MAX_PAGE) or MAX_PAGE,
        after=page_of(query["nextToken"]) if query.get("nextToken") else None,
    )


def metadata_filter(text: str) -> dict[str, str]:
    """`text` is what the query's own decoding left: clients encode keys and values once more, and the whole again."""
    found = {}
    for pair in filter(None, unquote_plus(text).split("&")):
        name, equals, value = pair.partition("=")
        if not equals:
            raise errors.InvalidRequest("metadata: it must be pairs like key=value, joined by &, each URL-encoded")
        found[unquote_plus(name)] = unquote_plus(value)
    return found


def page_token(started: int, id: str) -> str:
    """Names the last one of a page, for whoever asks for the next one."""
    return urlsafe_b64encode(f"{started}:{id}".encode()).decode().rstrip("=")


def whole_number(name: str, text: str | None, least: int, most: int) -> int | None:
    """A parameter of a query; None if it is not given."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20 and least <= int(text) <= most):
        raise errors.InvalidRequest(f"{name}: it must be a whole number from {least} to {most}, not {text[:40]!r}")
    return int(text)


def _states(text: str) -> tuple[str, ...]:
    states = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not set(states) <= set(STATES):
        raise errors.InvalidRequest(f"state: it is running, paused or both, joined by a comma, not {text[:80]!r}")
    return states or STATES


def _moment(name: str, text: str) -> int:
    try:
        moment = datetime.fromisoformat(text.replace(" ", "+"))  # a plus that was not encoded
        return microseconds((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(f"{name}: it must be a time like 2026-01-31T12:00:00Z, not {text[:80]!r}") from None


def page_of(token: str) -> Position:
    """What `page_token` named."""
    try:
        started, _, id = urlsafe_b64decode(token + "=" * (-len(token) % 4)).decode().partition(":")
        found = int(started)
    except (binascii.Error, ValueError):
        raise errors.InvalidRequest("nextToken: it is none of this server's; ask again without it") from None
    return min(max(found, 0), _MAX_MICROSECONDS), id


# What the control plane answers. Pure.

ENVD_VERSION = "0.6.13"  # what it promises decides which of their features clients use
CLIENT_ID = "cloche"

Json = dict[str, Any]


def created(resident: Resident, domain: str) -> Json:
    """The answer to a creation or a connection."""
    return {
        **_identity(resident.info),
        "envdAccessToken": resident.access_token,
        "trafficAccessToken": resident.traffic_token,
        "domain": domain or None,
    }


def detail(resident: Resident, domain: str) -> Json:
    info = resident.info
    return {
        **listed(info),
        "envdAccessToken": resident.access_token,
        "domain": domain or None,
        "lifecycle": {"autoResume": info.auto_resume, "onTimeout": info.on_deadline},
        **({} if resident.is_asleep else _network(resident)),
        **({} if info.pause_memory is None else {"pauseMode": "full" if info.pause_memory else "filesystem"}),
    }


def _network(resident: Resident) -> Json:
    """Of one that is paused, only what it takes to make it again is known."""
    policy = resident.sandbox.network.policy
    mask = {} if resident.host_mask is None else {"maskRequestHost": resident.host_mask}
    network = {"allowPublicTraffic": resident.public_traffic, **mask, **shown(policy)}
    return {"allowInternetAccess": has_internet(policy), "network": network}


def listed(info: SandboxInfo) -> Json:
    return {
        **_identity(info),
        **size(info.limits),
        "startedAt": timestamp(info.created_at),
        "endAt": timestamp(info.deadline_at if info.paused_at is None else info.paused_at),
        "state": info.state,
        "metadata": info.metadata,
        "volumeMounts": [{"name": name, "path": path} for path, name in info.volumes.items()],
    }


def _identity(info: SandboxInfo) -> Json:
    return {
        "templateID": template_id(info),
        "alias": alias_of(info),
        "sandboxID": info.id,
        "clientID": CLIENT_ID,
        "envdVersion": ENVD_VERSION,
    }


def size(limits: Limits) -> Json:
    return {
        "cpuCount": math.ceil(limits.cpus),
        "memoryMB": limits.memory_bytes // MIB,
        "diskSizeMB": limits.space_bytes // MIB,
    }


# -- metrics and logs


def metric(sample: Sample, limits: Limits) -> Json:
    return {
        "timestamp": timestamp(sample.at),
        "timestampUnix": int(sample.at),
        "cpuCount": math.ceil(limits.cpus),
        "cpuUsedPct": round(sample.cpu_percent, 2),
        "memUsed": sample.memory_bytes,
        "memTotal": limits.memory_bytes,
        "memCache": sample.cache_bytes,
        "diskUsed": sample.space_bytes,
        "diskTotal": limits.space_bytes,
    }


def log_entries(info: SandboxInfo) -> list[Json]:
    """What we know of a sandbox's life: never what a program in it wrote."""
    made = f"sandbox created from {info.template}"
    entries = [_log_entry(info.created_at, made, event="sandbox.created", template=info.template)]
    if info.paused_at is not None:
        entries.append(_log_entry(info.paused_at, "sandbox paused", event="sandbox.paused"))
    if info.ended_at is not None:
        reason = info.end_reason or "its host process died"
        entries.append(_log_entry(info.ended_at, f"sandbox ended: {reason}", event="sandbox.ended", reason=reason))
    return entries


def log_line(entry: Json) -> Json:
    """An entry as version 1 has it: E2B's command line reads JSON from its line."""
    line = {"level": entry["level"], "logger": "cloche", "message": entry["message"], **entry["fields"]}
    return {"timestamp": entry["timestamp"], "line": msgspec.json.encode(line).decode()}


def _log_entry(at: float, message: str, **fields: str) -> Json:
    return {"timestamp": timestamp(at), "level": "info", "message": message, "fields": fields}


def milliseconds(seconds: float) -> int:
    return microseconds(seconds) // 1000


# -- templates


def template_listed(versions: Sequence[Template], names: Sequence[str], limits: Limits) -> Json:
    """A template by its newest version, which is the first."""
    template = versions[0]
    return {
        "templateID": template.ref,
        "buildID": build_id(template),
        **size(limits),
        "public": True,
        "aliases": names,
        "names": names,
        "createdAt": timestamp(template.created_at),
        "updatedAt": timestamp(template.created_at),
        "createdBy": None,
        "lastSpawnedAt": None,
        "spawnCount": 0,
        "buildCount": len(versions),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "ready",
    }


def template_detail(versions: Sequence[Template], names: Sequence[str], limits: Limits) -> Json:
    """A template with all its versions, the newest first."""
    newest = template_listed(versions, names, limits)
    kept = ("templateID", "public", "aliases", "names", "createdAt", "updatedAt", "lastSpawnedAt", "spawnCount")
    return {**{name: newest[name] for name in kept}, "builds": [_build(each, limits) for each in versions]}


def build_id(template: Template) -> str:
    """Clients read it as a UUID; a version's digest makes one."""
    return str(uuid.UUID(hex=template.version[:32].ljust(32, "0")))


def _build(template: Template, limits: Limits) -> Json:
    return {
        "buildID": build_id(template),
        "status": "ready",
        "createdAt": timestamp(template.created_at),
        "updatedAt": timestamp(template.created_at),
        "finishedAt": timestamp(template.created_at),
        **size(limits),
        "envdVersion": ENVD_VERSION,
    }
