"""Containers: sandboxes as OpenAI's clients see them. They expire when nobody has used them for a while."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import posixpath
import time
import unicodedata
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Container as Names
from weakref import WeakValueDictionary

from cloche import errors
from cloche.config import Config
from cloche.engine.engine import Engine
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.gateway.request import MemoryTier
from cloche.model import GIB, KIB, Limits, SandboxInfo, SandboxSpec, Struct
from cloche.network_policy import NetworkPolicy, parse_pattern
from cloche.store.base import SHUT_DOWN

# A container's network: what a model is told of it, and how it is remembered when the container has expired.

NETWORK = "openai.network"  # in a sandbox's metadata: the hosts that were asked for, never a secret
MAX_LABEL = 8 * KIB  # the metadata of a sandbox may have twice that
MAX_TOLD = 30  # hosts that a model is told of


def hosts_of(policy: NetworkPolicy) -> tuple[str, ...]:
    """The patterns of the hosts that it allows."""
    return tuple(dict.fromkeys(rule.host for rule in policy.ordered if rule.action == "allow"))


def label_of(policy: NetworkPolicy) -> str:
    """What is remembered. What is too long for that is not."""
    label = ",".join(hosts_of(policy))
    return label if len(label) <= MAX_LABEL else ""


def remembered(info: SandboxInfo) -> NetworkPolicy | None:
    """What was asked for, but for the secrets: those are nowhere kept. None where nothing was.

    Another dialect may have written anything there: what makes no sense allows nothing.
    """
    label = info.metadata.get(NETWORK)
    if label is None:
        return None
    try:
        return NetworkPolicy(allow=tuple(filter(None, label.split(","))))
    except errors.InvalidRequest:
        return NetworkPolicy()


def told(policy: NetworkPolicy, *, packages: bool) -> str:
    """What a model should know before it writes code that fails."""
    hosts = hosts_of(policy)
    installs = "pip can install packages."
    if not hosts:
        return f"There is no internet access, but {installs}" if packages else "There is no internet access."
    return " ".join([_reach(hosts), *([installs] if packages else []), *_secrets_told(policy)])


def _reach(hosts: tuple[str, ...]) -> str:
    if any(parse_pattern(host).name == "*" for host in hosts):
        return "The internet can be reached by the proxy in HTTP_PROXY, as far as the operator of this host allows."
    shown = ", ".join(hosts[:MAX_TOLD]) + (f" and {len(hosts) - MAX_TOLD} more" if len(hosts) > MAX_TOLD else "")
    return f"Of the internet only these hosts can be reached, by the proxy in HTTP_PROXY: {shown}."


def _secrets_told(policy: NetworkPolicy) -> list[str]:
    named = [f"{secret.name} for {secret.domain}" for secret in policy.secrets if secret.name is not None]
    if not named:
        return []
    return [
        f"Environment variables stand for secrets: {', '.join(named)}. Send the variable's value as it is in a header "
        "of a request to that host: the secret takes its place on the way."
    ]


# Ids of containers that went through LiteLLM's proxy.
#
# It gives its clients `cntr_` + base64 of "litellm:custom_llm_provider:..;model_id:..;container_id:ORIGINAL", to know
# by
# itself where a container is; but when a client names one in a tool, it hands that on as it is. So it comes here.

PREFIX = "cntr_"
MAX_CHARACTERS = 4096
_MARK, _NAME = "litellm:", ";container_id:"


def unwrapped(id: str) -> str:
    """The id inside; the same where none is. Whose container it is, is asked later, as of any other id."""
    try:
        text = base64.b64decode(id[len(PREFIX) : MAX_CHARACTERS], validate=True).decode()
    except (binascii.Error, ValueError):
        return id
    before, _, original = text.rpartition(_NAME)
    return original if before.startswith(_MARK) and original.startswith(PREFIX) else id


DELETED = "its container was deleted"
NAME, MINUTES, SESSION = "openai.name", "openai.minutes", "openai.session"  # in a sandbox's metadata
USUAL_MINUTES = 20  # of a sandbox that was not made as a container
TIERS: dict[MemoryTier, int] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}


class BadWish(errors.InvalidRequest):
    """Something about a container that cannot be had. `param` and `reason` are OpenAI's words for what and how."""

    status = 400

    def __init__(self, message: str, param: str, reason: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.reason = reason


class Wishes(Struct):
    """What a new container should be."""

    name: str = "auto"
    minutes: int | None = None
    memory: MemoryTier | None = None
    network: NetworkPolicy | None = None
    session: str | None = None


class Container:
    """A live one."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.id = PREFIX + sandbox.id

    @property
    def owner(self) -> str:
        return self.sandbox.spec.owner

    @property
    def info(self) -> SandboxInfo:
        return self.sandbox.info

    @property
    def ended(self) -> bool:
        return self.sandbox.ending is not None and not self.paused

    @property
    def paused(self) -> bool:
        """By somebody who speaks another dialect."""
        return self.sandbox.record.state == "paused"

    def touch(self, seconds: float = 0.0) -> None:
        """It was used now, or will be for so long: it expires later, never earlier than it would have."""
        self.sandbox.extend(minutes_of(self.info) * 60.0 + seconds)


class Containers:
    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._sessions: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._policies: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by sandbox

    async def create(self, owner: str, wishes: Wishes) -> Container:
        """Raises BadWish, and what `Engine.create` does."""
        minutes = wishes.minutes or self._config.gateway.container_minutes
        metadata = {NAME: wishes.name, MINUTES: str(minutes)}
        if wishes.session is not None:
            metadata[SESSION] = wishes.session
        if wishes.network is not None:
            self.check_network(wishes.network)
            metadata[NETWORK] = label_of(wishes.network)
        spec = SandboxSpec(
            owner=owner,
            metadata=metadata,
            lifetime_seconds=minutes * 60.0,
            limits=await self.limits_of(wishes.memory),
            network=wishes.network,
        )
        return Container(await self._engine.create(spec))

    async def get(self, owner: str, id: str) -> Container:
        """A live one, which is in use from now on. One that is paused is resumed: this dialect has no other way to.

        Raises SandboxNotFound, and Gone for one that has expired.
        """
        try:
            return await self._running(owner, id)
        except errors.SandboxPaused:
            await self._engine.resume(sandbox_id(id), owner)
            return await self._running(owner, id)

    async def _running(self, owner: str, id: str) -> Container:
        """As `get`, but raises SandboxPaused for one that is paused."""
        try:
            container = Container(await self._engine.get(sandbox_id(id), owner))
            container.touch()
        except errors.SandboxNotFound:
            raise _not_found(id) from None
        except errors.SandboxKilled:
            raise await self._ended(owner, id) from None
        return container

    async def describe(self, owner: str, id: str) -> SandboxInfo:
        """Also of one that has expired, or is paused and stays so. It counts as use. Raises SandboxNotFound."""
        try:
            return (await self._running(owner, id)).info
        except (errors.Gone, errors.SandboxPaused):
            return await self._engine.describe(sandbox_id(id), owner)

    async def created_at(self, owner: str, id: str) -> float:
        """Of any, also of one that was deleted. Raises SandboxNotFound."""
        return (await self._engine.describe(sandbox_id(id), owner)).created_at

    async def list(self, owner: str, name: str | None = None) -> Sequence[SandboxInfo]:
        """The newest first: all sandboxes that run or are paused, and those made as containers that have expired."""
        ended = await self._engine.history(owner, NAME, name)
        running = [info for info in self._engine.list(owner) if name in (None, name_of(info))]
        found = {info.id: info for info in (*ended, *running)}  # one that ended meanwhile is there once
        return sorted(found.values(), key=age, reverse=True)

    async def delete(self, owner: str, id: str) -> None:
        """Also one that has expired, or is paused. Raises SandboxNotFound."""
        try:
            container = await self._running(owner, id)
        except errors.SandboxPaused:
            await self._engine.kill(sandbox_id(id), owner, DELETED)
        except errors.Gone:
            await self._engine.disclaim(sandbox_id(id), owner, DELETED)
        else:
            await container.sandbox.kill(DELETED)

    async def of_session(self, owner: str, wishes: Wishes) -> tuple[Container, bool]:
        """The one of that session, and whether it was made now. Two at a time get the same."""
        assert wishes.session is not None
        lock = self._sessions.setdefault((owner, wishes.session), asyncio.Lock())  # there while somebody holds it
        async with lock:
            alive = await self.alive_of_session(owner, wishes.session)
            return (alive, False) if alive is not None else (await self.create(owner, wishes), True)

    async def alive_of_session(self, owner: str, session: str) -> Container | None:
        for info in self._engine.list(owner):
            if info.metadata.get(SESSION) == session:
                with contextlib.suppress(errors.Gone, errors.SandboxNotFound):  # it may end at this very moment
                    return await self.get(owner, PREFIX + info.id)
        return None

    async def last_of_session(self, owner: str, session: str) -> str | None:
        """The id of the one that the session had, which has expired."""
        ended = await self._engine.history(owner, SESSION, session, limit=1)
        return PREFIX + ended[0].id if ended else None

    # -- what they may reach

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raises BadWish for what the operator of this host allows to nobody."""
        try:
            self._engine.networks.check(policy)
        except errors.InvalidRequest as error:
            raise BadWish(str(error), "network_policy") from None

    async def network_of(self, info: SandboxInfo) -> NetworkPolicy:
        """What a container may reach, or what was asked for one that has expired."""
        if info.state == "running":
            with contextlib.suppress(errors.Gone, errors.SandboxNotFound):  # it may end at this very moment
                return (await self._engine.find(info.id)).network.policy
        return remembered(info) or NetworkPolicy()

    async def usual_network(self) -> NetworkPolicy:
        """What a container may reach for which nothing is asked."""
        networks, usual = self._engine.networks, SandboxSpec()
        if not networks.bound.allow:
            return NetworkPolicy()
        return networks.policy_for(usual, await self._engine.template(usual.template))

    async def remembered_network(self, owner: str, sandbox: str) -> NetworkPolicy | None:
        """What was asked for one that has expired, without its secrets. Nothing, if that is allowed no more."""
        try:
            policy = remembered(await self._engine.describe(sandbox, owner))
            if policy is not None:
                self.check_network(policy)
        except errors.SandboxNotFound:
            return None
        except BadWish:
            return NetworkPolicy()
        return policy

    @contextlib.asynccontextmanager
    async def under(self, container: Container, policy: NetworkPolicy | None) -> AsyncGenerator[None, None]:
        """In the block the container may reach what `policy` says, whoever else asks for another; None asks for none.

        It stays so afterwards. Raises Gone, BadWish, and InvalidRequest where a program inside is in the way.
        """
        if policy is None:
            yield
            return
        lock = self._policies.setdefault(container.sandbox.id, asyncio.Lock())  # there while somebody holds it
        async with lock:
            await self._set_network(container.sandbox, policy)
            yield

    async def _set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        if sandbox.network.policy == policy:
            return
        self.check_network(policy)
        await self._engine.networks.replace(sandbox, policy)
        sandbox.label(NETWORK, label_of(policy))

    async def limits_of(self, memory: MemoryTier | None) -> Limits | None:
        """None for the usual ones. Raises BadWish for a tier that this host does not have."""
        if memory is None:
            return None
        limits = _with_memory(await self._engine.limits_of(SandboxSpec().template), TIERS[memory])
        try:
            self._config.limits.check(limits)
        except errors.InvalidRequest:
            most = [tier for tier in TIERS if TIERS[tier] <= self._config.limits.maximum.memory_bytes]
            offered = ", ".join(f"'{tier}'" for tier in most) or "none: leave memory_limit out"
            message = f"This server does not have containers of '{memory}'. Supported values are: {offered}."
            raise BadWish(message, "memory_limit") from None
        return limits

    async def _ended(self, owner: str, id: str) -> errors.ClocheError:
        """A server that stops kills its sandboxes, and their owners see them expire; what they killed is no more."""
        info = await self._engine.describe(sandbox_id(id), owner)
        return errors.SandboxExpired("Container is expired.") if info.end_reason == SHUT_DOWN else _not_found(id)


def _with_memory(limits: Limits, memory_bytes: int) -> Limits:
    fields = {name: getattr(limits, name) for name in Limits.__struct_fields__}
    return Limits(**{**fields, "memory_bytes": memory_bytes})


def sandbox_id(id: str) -> str:
    """Raises SandboxNotFound for what is no container's id."""
    if not id.startswith(PREFIX):
        raise _not_found(id)
    return unwrapped(id).removeprefix(PREFIX)


def _not_found(id: str) -> errors.SandboxNotFound:
    return errors.SandboxNotFound(f"Container with id '{id[:100]}' not found.")


def age(info: SandboxInfo) -> tuple[float, str]:
    """By which containers are sorted."""
    return info.created_at, info.id


def name_of(info: SandboxInfo) -> str:
    """A sandbox that another dialect made is called by its id."""
    return info.metadata.get(NAME) or PREFIX + info.id


def last_active_at(info: SandboxInfo) -> float:
    """When it was used last. That is not written down: every use moves the deadline to so many minutes later.

    A deadline that code in progress has moved further ahead makes it now, for as long as that code may take.
    """
    latest = info.ended_at if info.ended_at is not None else time.time()
    if info.deadline_at is None:
        return latest
    return max(min(info.deadline_at - minutes_of(info) * 60.0, latest), info.created_at)


def minutes_of(info: SandboxInfo) -> int:
    """After how many idle minutes it expires."""
    minutes = info.metadata.get(MINUTES, "")
    # another dialect may have written anything there
    is_number = minutes.isascii() and minutes.isdigit() and len(minutes) < 6
    return max(int(minutes), 1) if is_number else USUAL_MINUTES


def tier_of(info: SandboxInfo) -> MemoryTier:
    """The largest tier that its memory holds."""
    return max((tier for tier in TIERS if TIERS[tier] <= info.limits.memory_bytes), key=TIERS.__getitem__, default="1g")


# Names of files in a container: plain ones, as a model can type them.

MAX_NAME_BYTES = 200
NAMELESS = "file"


def plain_name(name: str) -> str:
    """What a file is called in /mnt/data: never a path, never hidden, never longer than a file system takes."""
    last = name.replace("\\", "/").rpartition("/")[2]
    # Cc: control characters, NUL among them; Cf: what turns text around; Cs: halves of surrogates
    visible = "".join(each for each in last if unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return _shortened(visible.strip().lstrip(".").strip() or NAMELESS)


def free_name(name: str, taken: Names[str]) -> str:
    """That name, or `name-2.ext`, `name-3.ext`, .. if it is taken."""
    stem, extension = posixpath.splitext(name)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{extension}"
    return name


def _shortened(name: str) -> str:
    stem, extension = posixpath.splitext(name)
    extension = extension if len(extension.encode()) <= 20 else ""
    room = MAX_NAME_BYTES - len(extension.encode())
    stem = name[: len(name) - len(extension)]
    return stem.encode()[:room].decode(errors="ignore") + extension
