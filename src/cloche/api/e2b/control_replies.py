"""What the control plane answers. Pure."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from cloche.api.e2b.network_wire import has_internet, shown
from cloche.api.e2b.replies import microseconds, timestamp
from cloche.api.e2b.residents import Resident, alias_of, template_id
from cloche.engine.operations.metrics import Sample
from cloche.model import MIB, Limits, SandboxInfo, Template

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
