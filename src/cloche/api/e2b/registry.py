"""Sandboxes as E2B's clients see them: the engine's sandbox with tokens, template alias and port access."""

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

from cloche import errors
from cloche.api.auth import derive_sandbox_token
from cloche.api.auth import secrets_match as secrets_match
from cloche.api.e2b.network_schema import PORT_VARIABLE
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.handle import SandboxHandle
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.model import SandboxInfo

# E2B's sandbox tokens, derived from the server's secret: not stored, and the same after a restart.

MAX_CACHED_TOKENS = 16384
_VERSION = "v1_"
_SIGNATURE = re.compile("v1_[A-Za-z0-9+/]{43}")

FileOperation = Literal["read", "write"]


class E2bTokens:
    """`secret` is the server's, and never leaves it."""

    def __init__(self, secret: bytes):
        self._secret = secret
        self.access = lru_cache(MAX_CACHED_TOKENS)(
            self._derive_access_token
        )  # called for each sandbox where a signed URL names none

    def _derive_access_token(self, sandbox: str) -> str:
        """The token for envd and the code server: equivalent to a key, for this one sandbox."""
        return self._derive_token_for("access", sandbox)

    def traffic(self, sandbox: str) -> str:
        """The token for the sandbox's ports other than envd's."""
        return self._derive_token_for("traffic", sandbox)

    def _derive_token_for(self, purpose: str, sandbox: str) -> str:
        return derive_sandbox_token(self._secret, f"e2b:{purpose}", sandbox)


class SignedFileUrl:
    """The signed part of a file URL, for any token. `path` is unchanged from the request, `user` may be empty."""

    def __init__(self, path: str, operation: FileOperation, user: str, expiration: int | None = None):
        begin = f"{path}:{operation}:{user}:"  # a path may be long, and is read once for all tokens
        self._begun = hashlib.sha256(begin.encode("utf-8", "surrogatepass"))
        self._end = "" if expiration is None else f":{expiration}"

    def digest(self, token: str) -> bytes:
        whole = self._begun.copy()
        whole.update(f"{token}{self._end}".encode())
        return whole.digest()


def sign_file_url(path: str, operation: FileOperation, user: str, token: str, expiration: int | None = None) -> str:
    """E2B's signature of a file URL, version 1."""
    digest = SignedFileUrl(path, operation, user, expiration).digest(token)
    return _VERSION + base64.b64encode(digest).rstrip(b"=").decode()


def decode_signature_digest(given: str) -> bytes | None:
    """The digest inside a signature; None if the format is invalid."""
    if not _SIGNATURE.fullmatch(given):
        return None
    return base64.b64decode(given.removeprefix(_VERSION) + "=")


# What a sandbox's notes say of it, which outlive pauses and this process. What is not there is as by default.
ALIAS, SECURE, PUBLIC_TRAFFIC, HOST_MASK = "e2b.alias", "e2b.secure", "e2b.public_traffic", "e2b.host_mask"
TEMPLATE = "e2b.template"
NOTE_NO = "no"
MAX_SIGNER_SEARCHES = 2  # concurrent searches for the signer of a file URL
SIGNER_CHECKS_PER_TURN = 64  # sandboxes


def template_name_of(ref: str) -> str:
    return ref.partition("@")[0]


def encode_sandbox_notes(
    *, alias: str, template: str | None, secure: bool, public_traffic: bool, host_mask: str | None
) -> dict[str, str]:
    """The notes stored with a sandbox that this dialect creates.

    `template`: the id of a template built by a client.
    """
    notes = {ALIAS: alias}
    if template is not None:
        notes[TEMPLATE] = template
    if not secure:
        notes[SECURE] = NOTE_NO
    if not public_traffic:
        notes[PUBLIC_TRAFFIC] = NOTE_NO
    if host_mask is not None:
        notes[HOST_MASK] = host_mask
    return notes


def template_id_of(info: SandboxInfo) -> str:
    """The permanent id of the sandbox's template."""
    return info.notes.get(TEMPLATE) or info.template


def template_alias_of(info: SandboxInfo) -> str:
    """The template name that the client requested."""
    return info.notes.get(ALIAS) or template_name_of(info.template)


def is_secure(notes: Mapping[str, str]) -> bool:
    return notes.get(SECURE) != NOTE_NO


class PortAccess:
    """The tokens and settings for access to a sandbox's ports, derived from its notes.

    An id without a sandbox has no notes, and its ports are closed as a private one's are. So are the ports of
    sandboxes from other dialects: only E2B's clients expect open ports.
    """

    def __init__(self, id: str, notes: Mapping[str, str], tokens: E2bTokens):
        self.id = id
        self.public_traffic = ALIAS in notes and notes.get(PUBLIC_TRAFFIC) != NOTE_NO
        self.access_token = tokens.access(id) if is_secure(notes) else None
        self.traffic_token = tokens.traffic(id)


class E2bSandbox(PortAccess):
    """One sandbox, running or paused, also one that another dialect created."""

    def __init__(self, info: SandboxInfo, tokens: E2bTokens, handle: SandboxHandle, *, sealed: bool):
        super().__init__(info.id, info.notes, tokens)
        self.handle = handle
        self.sealed = sealed  # its loopback is its own
        self._info = info
        self.owner = info.owner
        self.host_mask = info.notes.get(HOST_MASK)

    @property
    def info(self) -> SandboxInfo:
        return self._info if self.handle.here is None else self.handle.here.info

    @property
    def is_running(self) -> bool:
        return self.handle.here is not None and self.handle.here.record.state == "running"

    @property
    def is_paused(self) -> bool:
        return self.handle.here is None or self.handle.here.record.state == "paused"

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox in its cell, for one use. Raises SandboxPaused if it is paused."""
        if self.handle.here is None or self.is_paused:
            raise errors.SandboxPaused(f"sandbox {self.id} is paused: connect to it, and it goes on")
        return self.handle.here

    def host_for(self, port: int) -> str | None:
        """The Host header for the program on that port; None: the client's own."""
        return None if self.host_mask is None else self.host_mask.replace(PORT_VARIABLE, str(port))


class E2bSandboxes:
    """All running and paused sandboxes, in E2B's view."""

    def __init__(self, engine: Engine, tokens: E2bTokens):
        self.tokens = tokens
        self._engine = engine
        self._known: dict[str, E2bSandbox] = {}  # those that ran when they were last used
        self._searches = asyncio.Semaphore(MAX_SIGNER_SEARCHES)

    def of(self, sandbox: Sandbox) -> E2bSandbox:
        """The E2bSandbox of this running sandbox."""
        known = self._known.get(sandbox.id)
        if known is None or known.handle is not sandbox.handle:
            self._remove_ended()
            known = self._known[sandbox.id] = self._view(sandbox.info, sandbox.handle)
        return known

    def _view(self, info: SandboxInfo, handle: SandboxHandle) -> E2bSandbox:
        return E2bSandbox(info, self.tokens, handle, sealed=self._engine.networks.sealed)

    def _remove_ended(self) -> None:
        """An ended sandbox must not stay in memory with its environment and history."""
        for id in [id for id, each in self._known.items() if not each.is_running]:
            del self._known[id]

    def running(self, id: str) -> E2bSandbox | None:
        """The sandbox if it runs and was used before."""
        known = self._known.get(id)
        return known if known is not None and known.is_running else None

    async def lock(self, id: str) -> PortAccess:
        """The access data of any id, read from the records whether or not the sandbox exists or runs."""
        return PortAccess(id, await self._engine.records.notes(id), self.tokens)

    async def find(self, id: str, owner: str | None = None) -> E2bSandbox:
        """A sandbox of that owner, running or paused; with None of any owner: then the caller checks the token.

        Raises SandboxNotFound or Gone.
        """
        known = self.running(id)
        if known is not None and owner in (None, known.owner):
            return known
        info = await self._engine.describe(id, owner)
        if info.state == "paused":
            return self._view(info, self._engine.known_handle(id, info.owner))
        return self.of(await (await self._engine.handle(id, owner)).running())

    async def awake(self, e2b_sandbox: E2bSandbox) -> E2bSandbox:
        """The same sandbox, running: access to a paused one resumes it.

        Raises SandboxPaused if it was not created with automatic resume.
        """
        return self.of(await e2b_sandbox.handle.running()) if e2b_sandbox.is_paused else e2b_sandbox

    async def by_signature(
        self, given: str, path: str, operation: FileOperation, user: str, expiration: int | None
    ) -> E2bSandbox:
        """The sandbox with the token that made this signature. Signed URLs name none. Raises Unauthenticated."""
        digest = decode_signature_digest(given)
        if digest is None:
            raise errors.Unauthenticated("invalid signature")
        if expiration is not None and expiration < time.time():
            raise errors.Unauthenticated("signature is already expired")
        async with self._searches:  # no key was checked yet
            id = await self._find_signer_id(digest, SignedFileUrl(path, operation, user, expiration))
        if id is None:
            raise errors.Unauthenticated("invalid signature")
        return await self.find(id)

    async def _find_signer_id(self, digest: bytes, signed: SignedFileUrl) -> str | None:
        """The id of the signing sandbox. Yields to other tasks after every few checks."""
        for number, record in enumerate(self._engine.known(None), start=1):
            if is_secure(record.spec.notes) and hmac.compare_digest(
                digest, signed.digest(self.tokens.access(record.id))
            ):
                return record.id
            if number % SIGNER_CHECKS_PER_TURN == 0:
                await asyncio.sleep(0)
        return None
