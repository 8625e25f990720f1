"""The caller of a request: a key of this server, or a token that LibreChat signed for one of its users.

A key means one LibreChat, for all of its users: its `User-Id` header and the `user_id` of a body prove
nothing, and are ignored. So is a key in a body, where old clients leak it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from starlette.requests import Request

from cloche import errors
from cloche.api.auth import API_KEY_HEADERS, TOKEN_KEY_PREFIX, Gatekeeper, key_from_headers
from cloche.api.librechat.jwt import InvalidToken, JwtKeys, JwtVerifier
from cloche.api.librechat.replies import LibreChatRefusal
from cloche.config.librechat import JwtConfig
from cloche.engine.principal import set_current_principal
from cloche.model import Principal, Struct
from cloche.store.librechat import AccessScope, FileSpace, SpaceKind, TenantScope
from cloche.telemetry import log

PROFILES = ("default", "stateful")  # both are served at one place
PROFILE_MISMATCH = "execution_profile_mismatch"  # what clients know as a reason not to try again
UNSUPPORTED_CAPABILITY = "unsupported_capability"  # and another one
_CALLER_STATE = "librechat_caller"
_CHALLENGE = {"www-authenticate": "Bearer"}

MISSING_CREDENTIALS = (
    "send a key of this server as `X-API-Key`, as `Authorization: Bearer`, or in the URL "
    "(LIBRECHAT_CODE_BASEURL=http://user:KEY@host/librechat/v1); or let LibreChat sign tokens, and give this server "
    "the public key in [librechat.jwt]"
)
NO_JWT_KEY = (
    "it looks like a token that LibreChat signed, and this server has no key to check it with: set [librechat.jwt], or "
    "CODEAPI_JWT_JWKS_JSON or CODEAPI_JWT_PUBLIC_KEY and CODEAPI_JWT_KID, in the environment of `cloche serve`"
)


class LibreChatCaller(Struct):
    """The owner of the sandboxes. Without a JWT, LibreChat counts as one user: tenant and user are empty."""

    owner: str
    tenant: str = ""
    user: str = ""
    source: Literal["key", "jwt", "local"] = "key"


class LibreChatAuth:
    """Identifies callers. Raises InvalidConfig if a key of `jwt` cannot be used."""

    def __init__(self, gatekeeper: Gatekeeper, jwt: JwtConfig):
        self._gatekeeper = gatekeeper
        self._jwt = jwt
        self._verifier = JwtVerifier(jwt, JwtKeys(jwt)) if jwt.enabled else None

    def caller(self, request: Request) -> LibreChatCaller:
        """Raises LibreChatRefusal (400, 401), or Forbidden where a web page might send a request without a key."""
        state = request.scope.setdefault("state", {})
        known = state.get(_CALLER_STATE)
        if not isinstance(known, LibreChatCaller):
            known = state[_CALLER_STATE] = self._identify_caller(request)
        check_profile(request)
        return known

    def _identify_caller(self, request: Request) -> LibreChatCaller:
        """A caller from the control socket is already authenticated: headers cannot change it."""
        if isinstance(request.scope["state"].get("principal"), Principal):
            return self._caller_by_key(request)
        sent = request_credentials(request)
        if len(sent) > 1:
            raise LibreChatRefusal(400, "Ambiguous authentication headers", "send one key, or one token")
        token = next((each for each in sent if _looks_signed(each) and not self._gatekeeper.knows(each)), None)
        if token and self._verifier:
            return self._caller_by_token(request, token, self._verifier)
        try:
            return self._caller_by_key(request)
        except errors.Unauthenticated as error:
            if not sent:
                raise LibreChatRefusal(401, "Bearer token is required", MISSING_CREDENTIALS, _CHALLENGE) from None
            raise LibreChatRefusal(
                401, "Invalid bearer token", NO_JWT_KEY if token else str(error), _CHALLENGE
            ) from None

    def _caller_by_key(self, request: Request) -> LibreChatCaller:
        principal = self._gatekeeper.admit(request)
        return LibreChatCaller(owner=principal.owner, source="key" if principal.key_id else "local")

    def _caller_by_token(self, request: Request, token: str, verifier: JwtVerifier) -> LibreChatCaller:
        try:
            holder = verifier.verify(token)
        except InvalidToken as error:
            log.info("librechat.token_refused", why=str(error))
            raise LibreChatRefusal(401, "Invalid bearer token", str(error), _CHALLENGE) from None
        principal = Principal(owner=self._jwt.owner, key_id=f"{TOKEN_KEY_PREFIX}{holder.key_id}")
        request.scope["state"]["principal"] = principal
        set_current_principal(principal)
        return LibreChatCaller(owner=self._jwt.owner, tenant=holder.tenant, user=holder.user, source="jwt")


def request_credentials(request: Request) -> set[str]:
    """The keys and tokens in any header of a request: proxies and clients may both add some."""
    own = {value.strip() for name in API_KEY_HEADERS for value in request.headers.getlist(name)}
    given = {key_from_headers({"authorization": value}) for value in request.headers.getlist("authorization")}
    return (own | given) - {""}


def _looks_signed(credential: str) -> bool:
    return credential.count(".") == 2


def check_profile(request: Request) -> None:
    """Raises LibreChatRefusal if the client requires a kind of server that this is not."""
    expected = request.headers.get("x-codeapi-expected-profile", "").strip()
    if expected and expected not in PROFILES:
        what = f"this server has the profiles {' and '.join(PROFILES)}, and no other"
        raise LibreChatRefusal(400, PROFILE_MISMATCH, what, code=PROFILE_MISMATCH)
    if request.headers.get("x-librechat-code-workspace-id", "").strip():
        what = "this server runs programs in sandboxes only, and in no workspace of a user's own machine"
        raise LibreChatRefusal(400, UNSUPPORTED_CAPABILITY, what, code=UNSUPPORTED_CAPABILITY)


# The spaces of files that a request names, as far as the caller's key or token allows it.

_SPACE_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_VERSION = re.compile(r"[0-9]{1,18}")


def own_space(caller: LibreChatCaller) -> FileSpace:
    """The space of the files that a user's programs make."""
    return FileSpace(owner=caller.owner, tenant=caller.tenant, kind="user", id=caller.user)


def space_of(caller: LibreChatCaller, fields: Mapping[str, Any], id_field: str = "id") -> FileSpace:
    """The space of an upload: `kind`, `id` and `version`, or an old client's `entity_id`.

    Raises LibreChatRefusal. Files of kind `user` belong to the caller, whichever id is sent: clients put many
    things there.
    """
    kind, entity = fields.get("kind"), fields.get("entity_id")
    if not kind:
        return own_space(caller) if not entity else _shared_space(caller, "agent", entity, "entity_id")
    if kind not in get_args(SpaceKind):
        raise LibreChatRefusal(400, "kind must be one of: skill, agent, user")
    if kind == "user":
        return own_space(caller)
    version = _skill_version(fields.get("version")) if kind == "skill" else ""
    return _shared_space(caller, kind, fields.get(id_field), id_field, version)


def reach_of(caller: LibreChatCaller, fields: Mapping[str, Any], id_field: str = "id") -> AccessScope:
    """The files that a request may see. Raises LibreChatRefusal.

    Old clients name no kind. They use a key, and all users of one key count as one user.
    """
    if fields.get("kind") or caller.user:
        return space_of(caller, fields, id_field)
    return TenantScope(owner=caller.owner, tenant=caller.tenant)


def _shared_space(caller: LibreChatCaller, kind: SpaceKind, id: object, field: str, version: str = "") -> FileSpace:
    if not isinstance(id, str) or not _SPACE_ID.fullmatch(id):
        raise LibreChatRefusal(400, f"{field} must be 1 to 128 characters of A-Z a-z 0-9 _ . : - for kind {kind}")
    return FileSpace(owner=caller.owner, tenant=caller.tenant, kind=kind, id=id, version=version)


def _skill_version(version: object) -> str:
    if isinstance(version, int) and not isinstance(version, bool) and 0 <= version < 10**18:
        return str(version)
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise LibreChatRefusal(400, "version must be a whole number for kind skill")
    return str(int(version))
