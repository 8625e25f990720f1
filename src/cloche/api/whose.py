"""Whose a request is, as soon as that is known: by its key, or by the sandbox whose secret or whose port it uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloche.model import Principal

PAYER = "payer"  # in a request's state: owner and id of the key for whom a request without a key counts
TOKEN = "jwt:"
HOST = "host_owner"  # the owner of the sandbox that it visits
SESSION = "session"  # what is a secret of the session at the console that it belongs to
BEHIND = "behind"  # the dialect that a page of the console asks
OPERATOR = "operator"  # whether it is an admin's at the console, who may see what is others'


def owner_of(state: Mapping[str, Any]) -> str | None:
    """None for a stranger's, or until it is known."""
    principal = state.get("principal")
    if isinstance(principal, Principal):
        return principal.owner
    payer = state.get(PAYER)
    return state.get(HOST) if payer is None else str(payer[0])


def key_of(state: Mapping[str, Any]) -> str:
    """The id of the key that it came with, or TOKEN and that of whoever signed its token; empty where there is none."""
    principal = state.get("principal")
    return principal.key_id if isinstance(principal, Principal) else ""
