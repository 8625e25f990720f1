"""A sandbox as E2B knows it, beside what the engine knows of it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.e2b.network_wire import PORT_VARIABLE
from cloche.api.e2b.replies import json_reply
from cloche.api.e2b.tokens import Operation, Tokens, same, signature
from cloche.engine.engine import Engine
from cloche.engine.sandbox import Sandbox
from cloche.model import SandboxInfo


def template_name(ref: str) -> str:
    return ref.partition("@")[0]


class Resident:
    """One sandbox. Those that another dialect made are residents too, with everything as by default."""

    def __init__(
        self,
        sandbox: Sandbox,
        tokens: Tokens,
        *,
        alias: str = "",
        secure: bool = True,
        public_traffic: bool = True,
        host_mask: str | None = None,
    ):
        self.sandbox = sandbox
        self.alias = alias or template_name(sandbox.record.template)
        self.public_traffic = public_traffic
        self.host_mask = host_mask
        self.access_token = tokens.access(sandbox.id) if secure else None
        self.traffic_token = tokens.traffic(sandbox.id)

    @property
    def id(self) -> str:
        return self.sandbox.id

    def host_for(self, port: int) -> str | None:
        """What the program on that port is told for a Host; None: what the client said."""
        return None if self.host_mask is None else self.host_mask.replace(PORT_VARIABLE, str(port))


class Residents:
    """All live sandboxes, as E2B knows them."""

    def __init__(self, engine: Engine, tokens: Tokens):
        self.tokens = tokens
        self._engine = engine
        self._known: dict[str, Resident] = {}

    def add(
        self, sandbox: Sandbox, *, alias: str, secure: bool, public_traffic: bool, host_mask: str | None
    ) -> Resident:
        """A sandbox that was just made by this dialect."""
        self._forget_ended()
        resident = Resident(
            sandbox, self.tokens, alias=alias, secure=secure, public_traffic=public_traffic, host_mask=host_mask
        )
        self._known[sandbox.id] = resident
        return resident

    def alias_of(self, info: SandboxInfo) -> str:
        """The name by which its template was asked for."""
        known = self._known.get(info.id)
        return template_name(info.template) if known is None else known.alias

    def of(self, sandbox: Sandbox) -> Resident:
        """The resident that this sandbox is."""
        if sandbox.id not in self._known:
            self._forget_ended()
            self._known[sandbox.id] = Resident(sandbox, self.tokens)
        return self._known[sandbox.id]

    async def find(self, id: str) -> Resident:
        """A running sandbox, whoever owns it: the caller checks its token. Raises SandboxNotFound or Gone."""
        return self.of(await self._engine.find(id))

    def by_signature(self, given: str, path: str, operation: Operation, user: str, expiration: int | None) -> Resident:
        """The sandbox whose token signed that. Signed URLs name none. Raises Unauthenticated."""
        self._forget_ended()
        for resident in self._known.values():
            token = resident.access_token
            if token is not None and same(given, signature(path, operation, user, token, expiration)):
                return resident
        raise errors.Unauthenticated("invalid signature")

    def _forget_ended(self) -> None:
        ended = [id for id, resident in self._known.items() if resident.sandbox.record.state != "running"]
        for id in ended:
            del self._known[id]


def gone_reply(error: errors.Gone, request: Request) -> Response:
    """For a request to a sandbox that has ended meanwhile. Clients look for "was not found"."""
    id = request.scope["state"]["resident"].id
    return json_reply({"sandboxId": id, "message": f"The sandbox was not found: {error}", "code": 502}, 502)
