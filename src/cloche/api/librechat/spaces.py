"""Whose files a request is about. What a client says of itself counts only where its key or token allows it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal
from cloche.store.librechat import Kind, Reach, Space, Tenant

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_VERSION = re.compile(r"[0-9]{1,18}")


def own_space(caller: Caller) -> Space:
    """Where the files are that a user's programs make."""
    return Space(owner=caller.owner, tenant=caller.tenant, kind="user", id=caller.user)


def space_of(caller: Caller, fields: Mapping[str, Any], id_field: str = "id") -> Space:
    """Where an upload goes: `kind`, `id` and `version`, or an old client's `entity_id`. Raises Refusal.

    Files of a user are the caller's own, whatever the id says: clients put many things there.
    """
    kind, entity = fields.get("kind"), fields.get("entity_id")
    if not kind:
        return own_space(caller) if not entity else _shared(caller, "agent", entity, "entity_id")
    if kind not in get_args(Kind):
        raise Refusal(400, "kind must be one of: skill, agent, user")
    if kind == "user":
        return own_space(caller)
    version = _version(fields.get("version")) if kind == "skill" else ""
    return _shared(caller, kind, fields.get(id_field), id_field, version)


def reach_of(caller: Caller, fields: Mapping[str, Any], id_field: str = "id") -> Reach:
    """What a request may see. Raises Refusal.

    Old clients name no kind. Those have a key, and all who share a key are one user to us.
    """
    if fields.get("kind") or caller.user:
        return space_of(caller, fields, id_field)
    return Tenant(owner=caller.owner, tenant=caller.tenant)


def _shared(caller: Caller, kind: Kind, id: object, field: str, version: str = "") -> Space:
    if not isinstance(id, str) or not _ID.fullmatch(id):
        raise Refusal(400, f"{field} must be 1 to 128 characters of A-Z a-z 0-9 _ . : - for kind {kind}")
    return Space(owner=caller.owner, tenant=caller.tenant, kind=kind, id=id, version=version)


def _version(version: object) -> str:
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < 10**18:
        return str(version)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise Refusal(400, "version must be a whole number for kind skill")
    return str(int(version))
