"""Requests of the lifecycle API, decoded from bodies and query strings. Pure; raises InvalidRequest.

Unknown fields are ignored, as OpenSandbox does. A feature that this server lacks is refused where it is
requested, but a value that requests the existing behaviour is accepted.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import msgspec
from starlette.datastructures import QueryParams

from cloche import errors
from cloche.api.dialect import Json, UnsupportedField, decode_json_body, format_timestamp
from cloche.api.opensandbox.network_schema import OpenSandboxNetworkBody, policy_from_body
from cloche.api.opensandbox.registry import IDLE_ENTRYPOINT, stored_request_of
from cloche.api.opensandbox.volumes import OpenSandboxVolumeBody, RequestedVolume, volume_from_body
from cloche.model import (
    GIB,
    KIB,
    MIB,
    Limits,
    SandboxInfo,
    SnapshotInfo,
    Struct,
    check_command_size,
    check_command_words,
)
from cloche.network_policy import NetworkPolicy

# Responses of the lifecycle API. Pure.

EXECD_PORT = 44772
EGRESS_PORT = 18080
EXECD_TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"
EGRESS_TOKEN_HEADER = "OPENSANDBOX-EGRESS-AUTH"
PORT_TOKEN_HEADER = "OpenSandbox-Secure-Access"
TOKEN_HEADERS_BY_PORT = {EXECD_PORT: EXECD_TOKEN_HEADER, EGRESS_PORT: EGRESS_TOKEN_HEADER}
OPENSANDBOX_PREFIX = "/opensandbox/v1"
SANDBOX_STATES = {"running": "Running", "paused": "Paused", "ended": "Terminated"}
SNAPSHOT_READY = "Ready"


def encode_created_sandbox(info: SandboxInfo) -> Json:
    asked, paused = stored_request_of(info.notes), info.state == "paused"
    since = info.paused_at if paused and info.paused_at is not None else info.created_at
    reply: Json = {
        "id": info.id,
        "status": {"state": SANDBOX_STATES[info.state], "lastTransitionAt": format_timestamp(since)},
        "createdAt": format_timestamp(info.created_at),
        "entrypoint": asked.entrypoint,
        "metadata": info.metadata,
        **({"extensions": asked.extensions} if asked.extensions else {}),
    }
    if info.deadline_at is not None and not paused:  # which stands still meanwhile
        reply["expiresAt"] = format_timestamp(info.deadline_at)
    return reply


def encode_sandbox_detail(info: SandboxInfo) -> Json:
    message = stored_request_of(info.notes)
    source = (
        {"snapshotId": message.snapshot} if message.snapshot else {"image": {"uri": message.image or info.template}}
    )
    return {**encode_created_sandbox(info), **source}


def encode_snapshot(info: SnapshotInfo) -> Json:
    """A snapshot: always complete, as an incomplete one is never reported."""
    reply: Json = {
        "id": info.id,
        "sandboxId": info.sandbox,
        "status": {
            "state": SNAPSHOT_READY,
            "reason": "snapshot_ready",
            "lastTransitionAt": format_timestamp(info.created_at),
        },
        "createdAt": format_timestamp(info.created_at),
    }
    return {**reply, "name": info.name} if info.name else reply


def encode_page(items: Sequence[Json], *, page: int, size: int) -> Json:
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


def encode_endpoint(id: str, port: int, token: str, place: str) -> Json:
    """An endpoint, without a scheme: clients use that of the lifecycle API."""
    return {
        "endpoint": f"{place}{OPENSANDBOX_PREFIX}/sandboxes/{id}/proxy/{port}",
        "headers": {TOKEN_HEADERS_BY_PORT.get(port, PORT_TOKEN_HEADER): token},
    }


def public_address_of(public_url: str, host: str) -> str:
    """The server's public address: the configured one, else the client's Host."""
    split = urlsplit(public_url)
    return split.netloc + split.path.rstrip("/") if split.netloc else host


# Kubernetes quantities: "500m", "2", "512Mi", "2G". Pure; raises InvalidRequest.

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


def parse_cpus(given: str) -> float:
    """ "500m" is half a CPU."""
    match = _CPU.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.cpu: it must be like 2, 0.5 or 500m, not {given[:80]!r}")
    return float(match[1]) / (1000 if match[2] else 1)


def parse_size_bytes(given: str) -> int:
    """ "2Gi" is 2 * 1024**3, "2G" is 2 * 1000**3."""
    match = _BYTES.fullmatch(given.strip())
    if match is None:
        raise errors.InvalidRequest(f"resourceLimits.memory: it must be like 512Mi or 2G, not {given[:80]!r}")
    return int(float(match[1]) * _UNITS[match[2]])


T = TypeVar("T")

MAX_PAGE_SIZE = 200
POOL_EXTENSION = "poolRef"
RENEW_EXTENSION = "access.renew.extend.seconds"
RENEW_SECONDS = range(300, 86401)
MAX_EXTENSIONS = 64 * 1024
RESERVED_METADATA_PREFIX = "opensandbox.io/"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}

CODE_INTERPRETER_ENTRYPOINT = "/opt/code-interpreter/code-interpreter.sh"
_IDLE_ENTRYPOINTS = (IDLE_ENTRYPOINT, ("sleep", "infinity"))


class ImageReference(Struct):
    uri: str
    auth: dict[str, str] | None = None


class PlatformRequest(Struct):
    os: str | None = None
    arch: str | None = None


class EnabledSwitch(Struct):
    enabled: bool = False


class OpenSandboxCreateBody(Struct):
    """The body of a creation. The names are OpenSandbox's."""

    image: ImageReference | None = None
    snapshotId: str | None = None
    templateId: str | None = None
    entrypoint: list[str] | None = None
    timeout: int | None = None
    resourceLimits: dict[str, str] | None = None
    resourceRequests: dict[str, str] | None = None
    env: dict[str, str] | None = None
    metadata: dict[str, str] | None = None
    platform: PlatformRequest | None = None
    networkPolicy: OpenSandboxNetworkBody | None = None
    credentialProxy: EnabledSwitch | None = None  # there is always one
    secureAccess: bool | None = None  # always so: execd takes the sandbox's token only
    volumes: list[OpenSandboxVolumeBody] | None = None
    lifecycle: dict[str, Any] | None = None
    extensions: dict[str, str] | None = None


class RenewExpirationBody(Struct):
    expiresAt: str


class OpenSandboxSnapshotBody(Struct):
    name: str | None = None


class OpenSandboxCreateRequest(Struct):
    """A requested sandbox."""

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
    volumes: tuple[RequestedVolume, ...] = ()


class OpenSandboxSnapshotQuery(Struct):
    """The filter and page of a list of an owner's snapshots."""

    sandbox: str | None = None
    name: str | None = None
    states: tuple[str, ...] = ()
    page: int = 1
    size: int = 20


class OpenSandboxListQuery(Struct):
    """The filter and page of a list of an owner's sandboxes."""

    states: tuple[str, ...] = ()
    metadata: dict[str, str] = {}
    page: int = 1
    size: int = 20


def decode_create_request(body: bytes) -> OpenSandboxCreateRequest:
    """The sandbox that the body of `POST /sandboxes` asks for."""
    message = decode_json_body(body, OpenSandboxCreateBody)
    _check_unsupported_fields(message)
    _check_platform(message.platform)
    if message.timeout is not None and message.timeout < 1:
        raise errors.InvalidRequest(f"timeout: it must be at least 1 s, not {message.timeout}")
    extensions, metadata = message.extensions or {}, message.metadata or {}
    if sum(len(name) + len(value) for name, value in extensions.items()) > MAX_EXTENSIONS:
        raise errors.InvalidRequest(f"extensions: they can have {MAX_EXTENSIONS} characters in all")
    _check_metadata_names(metadata)
    return OpenSandboxCreateRequest(
        template=_template_or_snapshot(message),
        snapshot=message.snapshotId or "",
        entrypoint=_check_entrypoint(message.entrypoint),
        timeout_seconds=message.timeout,
        limits=_check_resource_limits(message.resourceLimits or {}),
        env=message.env or {},
        metadata=metadata,
        extensions=extensions,
        renew_seconds=_parse_renew_seconds(extensions.get(RENEW_EXTENSION)),
        network=None if message.networkPolicy is None else policy_from_body(message.networkPolicy),
        volumes=tuple(map(volume_from_body, message.volumes or ())),
    )


def apply_requested_limits(limits: Limits, asked: dict[str, str]) -> Limits:
    """The limits with the requested changes. Raises InvalidRequest for invalid amounts."""
    if "cpu" in asked:
        limits = msgspec.structs.replace(limits, cpus=parse_cpus(asked["cpu"]))
    if "memory" in asked:
        limits = msgspec.structs.replace(limits, memory_bytes=parse_size_bytes(asked["memory"]))
    return limits


def decode_metadata_patch(body: bytes) -> dict[str, str | None]:
    """The requested changes of metadata; None removes a pair."""
    changes = decode_json_body(body, dict[str, str | None])
    _check_metadata_names(changes)
    return changes


def decode_expiration(body: bytes) -> float:
    """The requested deadline of a renewal."""
    given = decode_json_body(body, RenewExpirationBody).expiresAt
    try:
        moment = datetime.fromisoformat(given)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise errors.InvalidRequest(
            f"expiresAt: it must be a time like 2026-01-31T12:00:00Z, not {given[:80]!r}"
        ) from None


def decode_list_query(query: QueryParams) -> OpenSandboxListQuery:
    return OpenSandboxListQuery(
        states=tuple(query.getlist("state")),
        metadata=_parse_metadata_filter(query.get("metadata", "")),
        page=_parse_query_number(query, "page", 1, most=1_000_000),
        size=_parse_query_number(query, "pageSize", 20, most=MAX_PAGE_SIZE),
    )


def decode_snapshot_query(query: QueryParams) -> OpenSandboxSnapshotQuery:
    return OpenSandboxSnapshotQuery(
        sandbox=query.get("sandboxId"),
        name=query.get("name"),
        states=tuple(query.getlist("state")),
        page=_parse_query_number(query, "page", 1, most=1_000_000),
        size=_parse_query_number(query, "pageSize", 20, most=MAX_PAGE_SIZE),
    )


def parse_port_number(given: str) -> int:
    if not (given.isascii() and given.isdigit() and 0 < int(given[:6]) < 1 << 16):
        raise errors.InvalidRequest(f"there is no port {given[:80]!r}: give a number from 1 to 65535")
    return int(given)


def parse_expires(given: str) -> int:
    """A time to come, in seconds since 1970."""
    if not (given.isascii() and given.isdigit() and len(given) <= 12 and int(given) > time.time()):
        raise errors.InvalidRequest(f"expires: it must be a time to come in seconds since 1970, not {given[:80]!r}")
    return int(given)


def _template_or_snapshot(message: OpenSandboxCreateBody) -> str:
    """The name or alias of the template, or the snapshot: an image is only a name here, and nothing is pulled."""
    pool = (message.extensions or {}).get(POOL_EXTENSION)  # each template has its own
    image = message.image and message.image.uri
    given = [each for each in (message.templateId, message.snapshotId, pool, image) if each]
    if len(given) > (2 if pool and image else 1) or not given:  # clients send an image along with a pool
        raise errors.InvalidRequest(
            "a sandbox is made from one thing: give image.uri, templateId, snapshotId or poolRef, and only one"
        )
    if message.image is not None and message.image.auth:
        raise UnsupportedField(
            "image.auth: images are names of this server's templates, nothing is pulled; leave it out"
        )
    return given[0]


def _check_entrypoint(given: list[str] | None) -> tuple[str, ...]:
    words = tuple(given) if given else IDLE_ENTRYPOINT
    check_command_words(words)
    check_command_size(words, {})
    return words


def is_idle_entrypoint(words: Sequence[str]) -> bool:
    """Whether a command only keeps a container alive, or starts its kernels: it is not run."""
    return tuple(words) in _IDLE_ENTRYPOINTS or words[0] == CODE_INTERPRETER_ENTRYPOINT


def _check_metadata_names(names: Iterable[str]) -> None:
    if any(name.startswith(RESERVED_METADATA_PREFIX) for name in names):
        raise errors.InvalidRequest(
            f"metadata: names that begin with {RESERVED_METADATA_PREFIX} are reserved; choose another"
        )


def _check_resource_limits(given: dict[str, str]) -> dict[str, str]:
    other = sorted(given.keys() - {"cpu", "memory"})
    if other:
        raise UnsupportedField(f"resourceLimits.{other[0][:80]}: this server limits cpu and memory; leave it out")
    return given


def _parse_renew_seconds(given: str | None) -> int:
    if given is None:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) < 8 and int(given) in RENEW_SECONDS):
        raise errors.InvalidRequest(
            f"extensions.{RENEW_EXTENSION}: it must be from {RENEW_SECONDS[0]} to {RENEW_SECONDS[-1]}, not "
            f"{given[:80]!r}"
        )
    return int(given)


def _check_unsupported_fields(message: OpenSandboxCreateBody) -> None:
    if message.lifecycle:
        raise UnsupportedField("lifecycle: this server runs no hooks; leave it out")


def _check_platform(request: PlatformRequest | None) -> None:
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    if request is not None and (request.os or "linux", request.arch or machine) != ("linux", machine):
        raise UnsupportedField(f"platform: this server has linux/{machine}; leave it out")


def _parse_metadata_filter(text: str) -> dict[str, str]:
    try:
        return dict(parse_qsl(text, keep_blank_values=True, strict_parsing=True)) if text else {}
    except ValueError:
        raise errors.InvalidRequest(f"metadata: it must be like name=value&other=value, not {text[:80]!r}") from None


def _parse_query_number(query: QueryParams, name: str, default: int, *, most: int) -> int:
    given = query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 8 and 1 <= int(given) <= most):
        raise errors.InvalidRequest(f"{name}: it must be a number from 1 to {most}, not {given[:80]!r}")
    return int(given)
