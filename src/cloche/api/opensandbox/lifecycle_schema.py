"""What the lifecycle API is asked for, read from bytes and query strings. Pure; raises InvalidRequest.

Fields that OpenSandbox has and we do not know are ignored, as it does. What this server cannot do is refused where it
is asked for, and accepted where its value asks for what is so anyway.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.datastructures import QueryParams

from cloche import errors
from cloche.api.opensandbox.network_schema import Network, policy_of
from cloche.api.opensandbox.registry import IDLE_ENTRYPOINT, asked_of
from cloche.api.opensandbox.replies import Json, Unsupported, timestamp
from cloche.model import GIB, KIB, MIB, Limits, SandboxInfo, SnapshotInfo, Struct
from cloche.network_policy import NetworkPolicy

# What the lifecycle API answers. Pure.

EXECD_PORT = 44772
EGRESS_PORT = 18080
TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"
EGRESS_HEADER = "OPENSANDBOX-EGRESS-AUTH"
TOKEN_HEADERS = {EXECD_PORT: TOKEN_HEADER, EGRESS_PORT: EGRESS_HEADER}
PREFIX = "/opensandbox/v1"
STATES = {"running": "Running", "paused": "Paused", "ended": "Terminated"}
READY = "Ready"


def created(info: SandboxInfo) -> Json:
    asked, paused = asked_of(info.notes), info.state == "paused"
    since = info.paused_at if paused and info.paused_at is not None else info.created_at
    reply: Json = {
        "id": info.id,
        "status": {"state": STATES[info.state], "lastTransitionAt": timestamp(since)},
        "createdAt": timestamp(info.created_at),
        "entrypoint": asked.entrypoint,
        "metadata": info.metadata,
        **({"extensions": asked.extensions} if asked.extensions else {}),
    }
    if info.deadline_at is not None and not paused:  # which stands still meanwhile
        reply["expiresAt"] = timestamp(info.deadline_at)
    return reply


def detail(info: SandboxInfo) -> Json:
    asked = asked_of(info.notes)
    source = {"snapshotId": asked.snapshot} if asked.snapshot else {"image": {"uri": asked.image or info.template}}
    return {**created(info), **source}


def snapshot(info: SnapshotInfo) -> Json:
    """It is whole when it is first told of, or it is not there."""
    reply: Json = {
        "id": info.id,
        "sandboxId": info.sandbox,
        "status": {"state": READY, "reason": "snapshot_ready", "lastTransitionAt": timestamp(info.created_at)},
        "createdAt": timestamp(info.created_at),
    }
    return {**reply, "name": info.name} if info.name else reply


def page(items: Sequence[Json], *, page: int, size: int) -> Json:
    """That page of all items."""
    begin, pages = (page - 1) * size, -(-len(items) // size)
    return {
        "items": items[begin : begin + size],
        "pagination": {
            "page": page,
            "pageSize": size,
            "totalItems": len(items),
            "totalPages": pages,
            "hasNextPage": page < pages,
        },
    }


def endpoint(id: str, port: int, token: str, place: str) -> Json:
    """Without a scheme: clients take that of the lifecycle API."""
    return {
        "endpoint": f"{place}{PREFIX}/sandboxes/{id}/proxy/{port}",
        "headers": {TOKEN_HEADERS[port]: token},
    }


def place_of(public_url: str, host: str) -> str:
    """Where clients reach the server: as its owner says, else as the client did."""
    split = urlsplit(public_url)
    return split.netloc + split.path.rstrip("/") if split.netloc else host


# Amounts as Kubernetes writes them: "500m", "2", "512Mi", "2G". Pure; raises InvalidRequest.

_CPU = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(m?)", re.ASCII)
_BYTES = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMGT]i?|k)?", re.ASCII)
_UNITS = {
    None: 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": KIB,
    "Mi": MIB,
    "Gi": GIB,
    "Ti": 1024 * GIB,
}


def cpus(given: str) -> float:
    """ "500m" is half a CPU."""
    match = _CPU.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.cpu: it must be like 2, 0.5 or 500m, not {given[:80]!r}")
    return float(match[1]) / (1000 if match[2] else 1)


def size_bytes(given: str) -> int:
    """ "2Gi" is 2 * 1024**3, "2G" is 2 * 1000**3."""
    match = _BYTES.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.memory: it must be like 512Mi or 2G, not {given[:80]!r}")
    return int(float(match[1]) * _UNITS[match[2]])


T = TypeVar("T")

MAX_PAGE = 200
RENEWING = "access.renew.extend.seconds"
RENEW_SECONDS = range(300, 86401)
MAX_EXTENSIONS = 64 * 1024
RESERVED = "opensandbox.io/"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

CODE_INTERPRETER = "/opt/code-interpreter/code-interpreter.sh"
_IDLE = (IDLE_ENTRYPOINT, ("sleep", "infinity"))


class Image(Struct):
    uri: str
    auth: dict[str, str] | None = None


class Platform(Struct):
    os: str | None = None
    arch: str | None = None


class Switch(Struct):
    enabled: bool = False


class NewSandbox(Struct):
    """The body of a creation. The names are OpenSandbox's."""

    image: Image | None = None
    snapshotId: str | None = None
    templateId: str | None = None
    entrypoint: list[str] | None = None
    timeout: int | None = None
    resourceLimits: dict[str, str] | None = None
    resourceRequests: dict[str, str] | None = None
    env: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    platform: Platform | None = None
    networkPolicy: Network | None = None
    credentialProxy: Switch | None = None  # there is always one
    secureAccess: bool | None = None  # always so: execd takes the sandbox's token only
    volumes: list[Any] | None = None
    lifecycle: dict[str, Any] | None = None
    extensions: dict[str, str] | None = None


class Renewal(Struct):
    expiresAt: str


class NewSnapshot(Struct):
    name: str | None = None


class Wanted(Struct):
    """A sandbox that somebody wants."""

    template: str  # or the snapshot
    snapshot: str
    entrypoint: tuple[str, ...]
    timeout_seconds: int | None
    limits: dict[str, str]
    env: dict[str, str]
    metadata: dict[str, str]
    extensions: dict[str, str]
    renew_seconds: int
    network: NetworkPolicy | None  # None: nothing was said about it


class SnapshotListing(Struct):
    """Which of an owner's snapshots."""

    sandbox: str | None = None
    name: str | None = None
    states: tuple[str, ...] = ()
    page: int = 1
    size: int = 20


class Listing(Struct):
    """Which of an owner's sandboxes."""

    states: tuple[str, ...] = ()
    metadata: dict[str, str] = {}
    page: int = 1
    size: int = 20


def decode(body: bytes, type: type[T]) -> T:
    """A body that must be JSON of that type; an empty one is an empty object."""
    try:
        return msgspec.json.decode(body.strip() or b"{}", type=type)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"the request's body is not right: {_located(error)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"the request's body is not JSON: {error}") from None
    except RecursionError:  # in fields that nobody knows, too
        raise errors.InvalidRequest("the request's body is nested too deeply") from None


def wanted(body: bytes) -> Wanted:
    """The sandbox that the body of `POST /sandboxes` asks for."""
    asked = decode(body, NewSandbox)
    _check_absent(asked)
    _check_platform(asked.platform)
    if asked.timeout is not None and asked.timeout < 1:
        raise errors.InvalidRequest(f"timeout: it must be at least 1 s, not {asked.timeout}")
    extensions, metadata = asked.extensions or {}, asked.metadata or {}
    if sum(len(name) + len(value) for name, value in extensions.items()) > MAX_EXTENSIONS:
        raise errors.InvalidRequest(f"extensions: they can have {MAX_EXTENSIONS} characters in all")
    if any(name.startswith(RESERVED) for name in metadata):
        raise errors.InvalidRequest(f"metadata: names that begin with {RESERVED} are reserved; choose another")
    return Wanted(
        template=_source(asked),
        snapshot=asked.snapshotId or "",
        entrypoint=_entrypoint(asked.entrypoint),
        timeout_seconds=asked.timeout,
        limits=_limits(asked.resourceLimits or {}),
        env=asked.env or {},
        metadata=metadata,
        extensions=extensions,
        renew_seconds=_renewing(extensions.get(RENEWING)),
        network=None if asked.networkPolicy is None else policy_of(asked.networkPolicy),
    )


def limited(limits: Limits, asked: dict[str, str]) -> Limits:
    """Those limits with what was asked for. Raises InvalidRequest for amounts that make no sense."""
    if "cpu" in asked:
        limits = msgspec.structs.replace(limits, cpus=cpus(asked["cpu"]))
    if "memory" in asked:
        limits = msgspec.structs.replace(limits, memory_bytes=size_bytes(asked["memory"]))
    return limits


def expiry(body: bytes) -> float:
    """The moment that a renewal asks for."""
    given = decode(body, Renewal).expiresAt
    try:
        moment = datetime.fromisoformat(given)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(
            f"expiresAt: it must be a time like 2026-01-31T12:00:00Z, not {given[:80]!r}"
        ) from None


def listing(query: QueryParams) -> Listing:
    return Listing(
        states=tuple(query.getlist("state")),
        metadata=_metadata(query.get("metadata", "")),
        page=_number(query, "page", 1, most=1_000_000),
        size=_number(query, "pageSize", 20, most=MAX_PAGE),
    )


def snapshot_listing(query: QueryParams) -> SnapshotListing:
    return SnapshotListing(
        sandbox=query.get("sandboxId"),
        name=query.get("name"),
        states=tuple(query.getlist("state")),
        page=_number(query, "page", 1, most=1_000_000),
        size=_number(query, "pageSize", 20, most=MAX_PAGE),
    )


def port(given: str) -> int:
    if not (given.isascii() and given.isdigit() and 0 < int(given[:6]) < 1 << 16):
        raise errors.InvalidRequest(f"there is no port {given[:80]!r}: give a number from 1 to 65535")
    return int(given)


def _source(asked: NewSandbox) -> str:
    """The template's name or an alias of it: an image is a name here, and nothing is pulled."""
    given = [each for each in (asked.image and asked.image.uri, asked.templateId, asked.snapshotId) if each]
    if len(given) != 1:
        raise errors.InvalidRequest(
            "a sandbox is made from one thing: give image.uri, templateId or snapshotId, and only one"
        )
    if asked.image is not None and asked.image.auth:
        raise Unsupported("image.auth: images are names of this server's templates, nothing is pulled; leave it out")
    return given[0]


def _entrypoint(given: list[str] | None) -> tuple[str, ...]:
    """What would only keep a container alive need not run. Anything else would, and cannot yet."""
    words = tuple(given) if given else IDLE_ENTRYPOINT
    if words not in _IDLE and words[0] != CODE_INTERPRETER:
        raise Unsupported(
            "entrypoint: this server runs none yet; leave it out, or send "
            f"{' '.join(IDLE_ENTRYPOINT)!r} or {CODE_INTERPRETER!r}"
        )
    return words


def _limits(given: dict[str, str]) -> dict[str, str]:
    other = sorted(given.keys() - {"cpu", "memory"})
    if other:
        raise Unsupported(f"resourceLimits.{other[0][:80]}: this server limits cpu and memory; leave it out")
    return given


def _renewing(given: str | None) -> int:
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 8 and int(given) in RENEW_SECONDS):
        raise errors.InvalidRequest(
            f"extensions.{RENEWING}: it must be from {RENEW_SECONDS[0]} to {RENEW_SECONDS[-1]}, not {given[:80]!r}"
        )
    return int(given)


def _check_absent(asked: NewSandbox) -> None:
    if asked.volumes:
        raise Unsupported("volumes: there are no volumes in this dialect; leave it out, and write files instead")
    if asked.lifecycle:
        raise Unsupported("lifecycle: this server runs no hooks; leave it out")
    if "poolRef" in (asked.extensions or {}):
        raise Unsupported("extensions.poolRef: this server keeps its own pools; give image.uri")


def _check_platform(asked: Platform | None) -> None:
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    if asked is not None and (asked.os or "linux", asked.arch or machine) != ("linux", machine):
        raise Unsupported(f"platform: this server has linux/{machine}; leave it out")


def _metadata(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=True)) if text else {}
    except ValueError:
        raise errors.InvalidRequest(f"metadata: it must be like name=value&other=value, not {text[:80]!r}") from None


def _number(query: QueryParams, name: str, default: int, *, most: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 8 and 1 <= int(given) <= most):
        raise errors.InvalidRequest(f"{name}: it must be a number from 1 to {most}, not {given[:80]!r}")
    return int(given)


def _located(error: msgspec.ValidationError) -> str:
    """msgspec says "Expected `str`, got `int` - at `$.metadata[...]`": the place first, in a client's words."""
    what, _, where = str(error).partition(" - at `$")
    place = where.rstrip("`").lstrip(".")
    return f"{place}: {what}" if place else what
