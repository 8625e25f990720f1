"""What is left of quotas, in every answer to whoever has any: `RateLimit-Policy` and `RateLimit`.

As draft-ietf-httpapi-ratelimit-headers has them: `"executions";q=600;w=60` and `"executions";r=588;t=41`. What counts
for as long as it is there, and not for some time, has neither a window nor a reset.
"""

from __future__ import annotations

from starlette.types import Scope

from cloche.api.whose import PAYER
from cloche.engine.quotas.quotas import Quotas
from cloche.engine.quotas.usage import Rate
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import Principal

POLICY, LEFT = b"ratelimit-policy", b"ratelimit"


def bill(scope: Scope, sandbox: Sandbox) -> None:
    """For a request with a secret of that very sandbox instead of a key: it is its owner's."""
    scope["state"][PAYER] = sandbox.charge.owner, sandbox.charge.key_id


class RateLimits:
    def __init__(self, quotas: Quotas):
        self._quotas = quotas

    def headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Of whoever asks, and never of anybody else; none where nobody is known, or there are no quotas."""
        state = scope.get("state", {})
        principal = state.get("principal")
        payer = (principal.owner, principal.key_id) if isinstance(principal, Principal) else state.get(PAYER)
        rates = () if payer is None else self._quotas.rates(*payer)
        return encode(rates) if rates else []


def encode(rates: list[Rate]) -> list[tuple[bytes, bytes]]:
    policy = ", ".join(f'"{each.name}";q={each.quota}{_parameter("w", each.window_seconds)}' for each in rates)
    left = ", ".join(f'"{each.name}";r={each.left}{_parameter("t", each.reset_seconds)}' for each in rates)
    return [(POLICY, policy.encode()), (LEFT, left.encode())]


def _parameter(name: str, value: int | None) -> str:
    return "" if value is None else f";{name}={value}"
