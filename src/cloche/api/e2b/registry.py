"""A sandbox as E2B knows it, beside what the engine knows of it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Literal

from starlette.requests import Request
from starlette.responses import Response

from cloche import errors
from cloche.api.auth import same as same
from cloche.api.auth import token_of
from cloche.api.e2b.network_schema import PORT_VARIABLE
from cloche.api.e2b.replies import json_reply
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxInfo

# The secrets of one sandbox, made from the server's own: nothing to store, and the same after a restart.

MAX_KNOWN = 16384
_VERSION = "v1_"
_SIGNATURE = re.compile("v1_[A-Za-z0-9+/]{43}")

Operation = Literal["read", "write"]


class Tokens:
    """`secret` is the server's, and never leaves it."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self.access = lru_cache(MAX_KNOWN)(self._access)  # asked for each sandbox where a signed URL names none

    def _access(self, sandbox: str) -> str:
        """For envd and the code server: as good as a key, for this one sandbox."""
        return self._made("access", sandbox)

    def traffic(self, sandbox: str) -> str:
        """For the sandbox's ports other than envd's."""
        return self._made("traffic", sandbox)

    def _made(self, purpose: str, sandbox: str) -> str:
        return token_of(self._secret, f"e2b:{purpose}", sandbox)


class Signed:
    """What is signed in a file URL, by whichever token. `path` is as it was given, `user` empty where none was."""

    def __init__(self, path: str, operation: Operation, user: str, expiration: int | None = None):
        begin = f"{path}:{operation}:{user}:"  # a path may be long, and is read once for all tokens
        self._begun = hashlib.sha256(begin.encode("utf-8", "surrogatepass"))
        self._end = "" if expiration is None else f":{expiration}"

    def digest(self, token: str) -> bytes:
        whole = self._begun.copy()
        whole.update(f"{token}{self._end}".encode())
        return whole.digest()


def signature(path: str, operation: Operation, user: str, token: str, expiration: int | None = None) -> str:
    """E2B's signature of a file URL, version 1."""
    digest = Signed(path, operation, user, expiration).digest(token)
    return _VERSION + base64.b64encode(digest).rstrip(b"=").decode()


def digest_in(given: str) -> bytes | None:
    """What a signature holds; None if it cannot be one."""
    if not _SIGNATURE.fullmatch(given):
        return None
    return base64.b64decode(given.removeprefix(_VERSION) + "=")


# What a sandbox's notes say of it, which outlive pauses and this process. What is not there is as by default.
ALIAS, SECURE, PUBLIC_TRAFFIC, HOST_MASK = "e2b.alias", "e2b.secure", "e2b.public_traffic", "e2b.host_mask"
TEMPLATE = "e2b.template"
NO = "no"
SEARCHES = 2  # at once, for who signed a file URL
AT_ONCE = 64  # sandboxes


def template_name(ref: str) -> str:
    return ref.partition("@")[0]


def notes_of(
    *, alias: str, template: str | None, secure: bool, public_traffic: bool, host_mask: str | None
) -> dict[str, str]:
    """What is noted of a sandbox that this dialect makes. `template`: the id of one that a client built."""
    notes = {ALIAS: alias}
    if template is not None:
        notes[TEMPLATE] = template
    if not secure:
        notes[SECURE] = NO
    if not public_traffic:
        notes[PUBLIC_TRAFFIC] = NO
    if host_mask is not None:
        notes[HOST_MASK] = host_mask
    return notes


def template_id(info: SandboxInfo) -> str:
    """What it was made from, by a name that stays."""
    return info.notes.get(TEMPLATE) or info.template


def alias_of(info: SandboxInfo) -> str:
    """The name by which its template was asked for."""
    return info.notes.get(ALIAS) or template_name(info.template)


def is_secure(notes: Mapping[str, str]) -> bool:
    return notes.get(SECURE) != NO


class Lock:
    """What opens the ports of a sandbox, by what is noted of it.

    Of one that never was nothing is noted, and its ports are as closed as a private one's. So are those of sandboxes
    that another dialect made: E2B's clients expect open ports, and nobody else does.
    """

    def __init__(self, id: str, notes: Mapping[str, str], tokens: Tokens):
        self.id = id
        self.public_traffic = ALIAS in notes and notes.get(PUBLIC_TRAFFIC) != NO
        self.access_token = tokens.access(id) if is_secure(notes) else None
        self.traffic_token = tokens.traffic(id)


class Resident(Lock):
    """One sandbox, running or paused. Those that another dialect made are residents too."""

    def __init__(self, info: SandboxInfo, tokens: Tokens, sandbox: Sandbox | None = None):
        super().__init__(info.id, info.notes, tokens)
        self._info = info
        self._sandbox = sandbox
        self.owner = info.owner
        self.host_mask = info.notes.get(HOST_MASK)

    @property
    def info(self) -> SandboxInfo:
        return self._info if self._sandbox is None else self._sandbox.info

    @property
    def is_asleep(self) -> bool:
        """Whether it was paused when it was looked for."""
        return self._sandbox is None

    @property
    def sandbox(self) -> Sandbox:
        """Raises SandboxPaused if it is asleep."""
        if self._sandbox is None:
            raise errors.SandboxPaused(f"sandbox {self.id} is paused: connect to it, and it goes on")
        return self._sandbox

    def host_for(self, port: int) -> str | None:
        """What the program on that port is told for a Host; None: what the client said."""
        return None if self.host_mask is None else self.host_mask.replace(PORT_VARIABLE, str(port))


class Residents:
    """All sandboxes that run or are paused, as E2B knows them."""

    def __init__(self, engine: Engine, tokens: Tokens):
        self.tokens = tokens
        self._engine = engine
        self._running: dict[str, Resident] = {}
        self._searches = asyncio.Semaphore(SEARCHES)

    def of(self, sandbox: Sandbox) -> Resident:
        """The resident that this sandbox is, which runs."""
        known = self._running.get(sandbox.id)
        if known is None or known.sandbox is not sandbox:  # one that was paused without memory runs in another cell
            self._forget_ended()
            known = self._running[sandbox.id] = Resident(sandbox.info, self.tokens, sandbox)
        return known

    def running(self, id: str) -> Resident | None:
        """One that runs and was used before."""
        known = self._running.get(id)
        return known if known is not None and known.sandbox.record.state == "running" else None

    async def lock(self, id: str) -> Lock:
        """Of any id at all. It is read from the records, whether there is such a sandbox or not, and where it runs."""
        return Lock(id, await self._engine.records.notes(id), self.tokens)

    async def find(self, id: str, owner: str | None = None) -> Resident:
        """A sandbox as it is, running or asleep, of that owner; with None of anybody's: the caller checks its token.

        Raises SandboxNotFound or Gone.
        """
        known = self.running(id)
        if known is not None and owner in (None, known.sandbox.record.owner):
            return known
        info = await self._engine.describe(id, owner)
        if info.state == "paused":
            return Resident(info, self.tokens)
        return self.of(await self._engine.find(id))

    async def awake(self, resident: Resident) -> Resident:
        """The same, running. Whoever may enter wakes it.

        Raises SandboxPaused where nobody asked for that when it was made.
        """
        return self.of(await self._engine.find(resident.id)) if resident.is_asleep else resident

    async def by_signature(
        self, given: str, path: str, operation: Operation, user: str, expiration: int | None
    ) -> Resident:
        """The sandbox whose token signed that. Signed URLs name none. Raises Unauthenticated."""
        digest = digest_in(given)
        if digest is None:
            raise errors.Unauthenticated("invalid signature")
        if expiration is not None and expiration < time.time():
            raise errors.Unauthenticated("signature is already expired")
        async with self._searches:  # nobody has shown a key yet
            id = await self._signer(digest, Signed(path, operation, user, expiration))
        if id is None:
            raise errors.Unauthenticated("invalid signature")
        return await self.find(id)

    async def _signer(self, digest: bytes, signed: Signed) -> str | None:
        """The id of that sandbox. Others have their turn after every few."""
        for number, record in enumerate(self._engine.known(None), start=1):
            if is_secure(record.notes) and hmac.compare_digest(digest, signed.digest(self.tokens.access(record.id))):
                return record.id
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return None

    def _forget_ended(self) -> None:
        gone = [id for id, resident in self._running.items() if resident.sandbox.record.state != "running"]
        for id in gone:
            del self._running[id]


def away_reply(error: errors.ClocheError, request: Request) -> Response:
    """For a request to a sandbox that has ended or was paused meanwhile. Clients look for "was not found"."""
    id = request.scope["state"]["resident"].id
    return json_reply({"sandboxId": id, "message": f"The sandbox was not found: {error}", "code": 502}, 502)
