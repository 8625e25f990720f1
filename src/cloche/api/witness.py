"""What of a request is told to the audit log: that it was refused, or what was kept, read or removed by it.

What is done to sandboxes the engine tells itself, whatever the dialect; this is for the rest: what the gateway and
LibreChat keep, what is read of snapshots, volumes and templates, and what admins do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.types import Scope

from cloche.api.whose import BEHIND
from cloche.engine.operations.audit import NONE, Trail
from cloche.engine.principal import acting
from cloche.model import Principal

REFUSED = frozenset({401, 403, 404, 429})
VERBS = {"GET": "read", "HEAD": "read", "DELETE": "removed", "POST": "made", "PUT": "changed", "PATCH": "changed"}
WHOLE = frozenset({"v1", "librechat", "admin"})  # dialects of which everything is told
READ = frozenset({"snapshots", "volumes", "templates", "builds", "logs"})  # of the others: what is read of these
UNTOLD = frozenset({"models", "health", "exec"})  # they keep nothing; what `exec` runs the engine tells
PLACES = frozenset({"api", "v1", "v2", "v3", "e2b", "admin", "librechat", "opensandbox"})  # in paths, before what it is
DEEDS: Mapping[str, str] = {"upload": "files.made", "download": "files.read"}  # LibreChat's paths are verbs
OWNER = "owner"  # as routes call the parameter that is one's name
FORGOTTEN = "forgotten_owner"  # in a request's state: a name, and the pseudonym that stands for it

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class Witness:
    def __init__(self, trail: Trail):
        self._trail = trail

    def ended(self, dialect: str, scope: Scope, route: str, status: int) -> None:
        """A request was answered, by that route's template. Never waits."""
        dialect = scope["state"].get(BEHIND, dialect)
        if scope["state"].get("answered_inside"):
            return
        method = scope.get("method", "WEBSOCKET")
        if status in REFUSED:
            about = f"{method} {route}" if route != "-" else dialect
            self._trail.note("request.refused", _owner(scope), outcome=str(status), about=about, who=acting() or NONE)
        elif status < 400 and (what := _deed(dialect, method, route, _is_admin(scope))) is not None:
            whose, who = _named(scope) or _owner(scope), _known(scope, acting())
            self._trail.note(what, whose, id=id_of(scope), about=f"{method} {route}", who=who)


def _deed(dialect: str, method: str, route: str, admin: bool) -> str | None:
    """What was done, in words of ours; None where it is not told here."""
    words = [word for word in route.split("/") if word and not word.startswith("{")]
    nouns = [word for word in words if word not in PLACES]
    if not nouns or nouns[0] in UNTOLD:
        return None
    if dialect == "admin":
        return f"admin.{nouns[0]}.{VERBS.get(method, 'used')}"
    if dialect not in WHOLE:
        if admin and route == "/api/v1/sandboxes" and method == "GET":  # who sees those of all owners
            return "admin.sandboxes.read"
        return f"{nouns[0]}.read" if nouns[0] in READ and method in ("GET", "HEAD") else None
    noun = "gateway" if dialect == "v1" else dialect
    return f"{noun}.{DEEDS.get(nouns[0]) or '.'.join((*nouns[:3], VERBS.get(method, 'used')))}"


def _owner(scope: Scope) -> str:
    principal = scope["state"].get("principal")
    return principal.owner if isinstance(principal, Principal) else ""


def _is_admin(scope: Scope) -> bool:
    principal = scope["state"].get("principal")
    return isinstance(principal, Principal) and principal.role == "admin"


def id_of(scope: Scope) -> str:
    """The first thing that the path names, but for owners. What is no id of ours is not repeated."""
    first = next((each for name, each in scope.get("path_params", {}).items() if name != OWNER), "")
    return first if isinstance(first, str) and _ID.fullmatch(first) else ""


def _named(scope: Scope) -> str:
    """The owner that the path names, if it does: never as an id, as the log can forget owners only."""
    owner = scope.get("path_params", {}).get(OWNER)
    if not isinstance(owner, str):
        return ""
    return str(scope["state"].get(FORGOTTEN, {}).get(owner, owner))


def _known(scope: Scope, who: Principal | None) -> Principal | None:
    """Who asked; by a pseudonym, if it was them whom the log forgets."""
    pseudonym = scope["state"].get(FORGOTTEN, {}).get(who.owner) if who is not None else None
    return who if who is None or pseudonym is None else msgspec.structs.replace(who, owner=pseudonym)


def forgotten(scope: Scope, owner: str, pseudonym: str) -> None:
    """By that request, the log forgets the owner: what it says of the request itself, it says of the pseudonym."""
    scope["state"][FORGOTTEN] = {owner: pseudonym}
