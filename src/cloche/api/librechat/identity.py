"""Who asks: a key of ours wherever a LibreChat can put one, or a token that LibreChat minted for one of its users.

A key means one LibreChat, whoever sits before it: its `User-Id` header and the `user_id` of a body are nobody's word
for anything, and are not looked at. Nor is a key in a body, where old clients leak it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from starlette.requests import Request

from cloche import errors
from cloche.api.auth import OWN_HEADERS, TOKEN, Gatekeeper, presented_key
from cloche.api.librechat.jwt import InvalidToken, Keys, Verifier
from cloche.api.librechat.replies import Refusal
from cloche.config.librechat import Jwt
from cloche.engine.principal import act_for
from cloche.model import Principal, Struct
from cloche.store.librechat import Kind, Reach, Space, Tenant
from cloche.telemetry import log

PROFILES = ("default", "stateful")  # both are served at one place
MISMATCH = "execution_profile_mismatch"  # what clients know as a reason not to try again
UNSUPPORTED = "unsupported_capability"  # and another one
_STATE = "librechat_caller"
_CHALLENGE = {"www-authenticate": "Bearer"}

MISSING = (
    "send a key of this server as `X-API-Key`, as `Authorization: Bearer`, or in the URL "
    "(LIBRECHAT_CODE_BASEURL=http://user:KEY@host/librechat/v1); or let LibreChat sign tokens, and give this server "
    "the public key in [librechat.jwt]"
)
NO_JWT = (
    "it looks like a token that LibreChat signed, and this server has no key to check it with: set [librechat.jwt], or "
    "CODEAPI_JWT_JWKS_JSON or CODEAPI_JWT_PUBLIC_KEY and CODEAPI_JWT_KID, in the environment of `cloche serve`"
)


class Caller(Struct):
    """Sandboxes belong to `owner`. Without a JWT, LibreChat is one user to us: tenant and user are empty."""

    owner: str
    tenant: str = ""
    user: str = ""
    source: Literal["key", "jwt", "local"] = "key"


class Doorkeeper:
    """Says who a request is from. Raises InvalidConfig if a key of `jwt` cannot be used."""

    def __init__(self, gatekeeper: Gatekeeper, jwt: Jwt):
        self._gatekeeper = gatekeeper
        self._jwt = jwt
        self._verifier = Verifier(jwt, Keys(jwt)) if jwt.enabled else None

    def caller(self, request: Request) -> Caller:
        """Raises Refusal (400 or 401), or Forbidden where a web page might be behind a request without a key."""
        state = request.scope.setdefault("state", {})
        known = state.get(_STATE)
        if not isinstance(known, Caller):
            known = state[_STATE] = self._recognised(request)
        check_profile(request)
        return known

    def _recognised(self, request: Request) -> Caller:
        """Who came through the control socket is known already: no header can make them somebody else."""
        if isinstance(request.scope["state"].get("principal"), Principal):
            return self._holder_of_key(request)
        sent = credentials(request)
        if len(sent) > 1:
            raise Refusal(400, "Ambiguous authentication headers", "send one key, or one token")
        token = next((each for each in sent if _looks_signed(each) and not self._gatekeeper.knows(each)), None)
        if token and self._verifier:
            return self._holder_of_token(request, token, self._verifier)
        try:
            return self._holder_of_key(request)
        except errors.Unauthenticated as error:
            if not sent:
                raise Refusal(401, "Bearer token is required", MISSING, _CHALLENGE) from None
            raise Refusal(401, "Invalid bearer token", NO_JWT if token else str(error), _CHALLENGE) from None

    def _holder_of_key(self, request: Request) -> Caller:
        principal = self._gatekeeper.admit(request)
        return Caller(owner=principal.owner, source="key" if principal.key_id else "local")

    def _holder_of_token(self, request: Request, token: str, verifier: Verifier) -> Caller:
        try:
            holder = verifier.verify(token)
        except InvalidToken as error:
            log.info("librechat.token_refused", why=str(error))
            raise Refusal(401, "Invalid bearer token", str(error), _CHALLENGE) from None
        principal = Principal(owner=self._jwt.owner, key_id=f"{TOKEN}{holder.key_id}")
        request.scope["state"]["principal"] = principal
        act_for(principal)
        return Caller(owner=self._jwt.owner, tenant=holder.tenant, user=holder.user, source="jwt")


def credentials(request: Request) -> set[str]:
    """The keys and tokens that a request carries, in whatever headers: proxies and clients may both add some."""
    own = {value.strip() for name in OWN_HEADERS for value in request.headers.getlist(name)}
    given = {presented_key({"authorization": value}) for value in request.headers.getlist("authorization")}
    return (own | given) - {""}


def _looks_signed(credential: str) -> bool:
    return credential.count(".") == 2


def check_profile(request: Request) -> None:
    """Raises Refusal if a client counts on a kind of server that this is not."""
    expected = request.headers.get("x-codeapi-expected-profile", "").strip()
    if expected and expected not in PROFILES:
        what = f"this server has the profiles {' and '.join(PROFILES)}, and no other"
        raise Refusal(400, MISMATCH, what, code=MISMATCH)
    if request.headers.get("x-librechat-code-workspace-id", "").strip():
        what = "this server runs programs in sandboxes only, and in no workspace of a user's own machine"
        raise Refusal(400, UNSUPPORTED, what, code=UNSUPPORTED)


# Whose files a request is about. What a client says of itself counts only where its key or token allows it.

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
