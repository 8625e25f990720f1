"""Who asks: a key of ours wherever a LibreChat can put one, or a token that LibreChat minted for one of its users.

A key means one LibreChat, whoever sits before it: its `User-Id` header and the `user_id` of a body are nobody's word
for anything, and are not looked at. Nor is a key in a body, where old clients leak it.
"""

from __future__ import annotations

from typing import Literal

from starlette.requests import Request

from cloche import errors
from cloche.api.auth import OWN_HEADERS, TOKEN, Gatekeeper, presented_key
from cloche.api.librechat.jwt import InvalidToken, Verifier
from cloche.api.librechat.jwt_keys import Keys
from cloche.api.librechat.replies import Refusal
from cloche.config.librechat import Jwt
from cloche.engine.principal import act_for
from cloche.model import Principal, Struct
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
