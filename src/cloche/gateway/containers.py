"""Containers: sandboxes as OpenAI's clients see them. They expire after a while without use."""

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
from cloche.engine.sandboxes.endings import CONTAINER_DELETED
from cloche.engine.sandboxes.sandbox import Sandbox
from cloche.gateway.request import MemoryTier
from cloche.model import GIB, KIB, Limits, SandboxInfo, SandboxSpec, Struct
from cloche.network_policy import NetworkPolicy, parse_pattern
from cloche.store.base import SHUT_DOWN_REASON

# A container's network policy: its description for the model, and its label that outlives the container.

NETWORK_LABEL = "openai.network"  # in a sandbox's metadata: the requested hosts, never a secret
MAX_LABEL_LENGTH = 8 * KIB  # the metadata of a sandbox may have twice that
MAX_DESCRIBED_HOSTS = 30  # hosts that are listed for a model


def allowed_hosts(policy: NetworkPolicy) -> tuple[str, ...]:
    """Returns the patterns of the allowed hosts."""
    return tuple(dict.fromkeys(rule.host for rule in policy.ordered if rule.action == "allow"))


def network_label(policy: NetworkPolicy) -> str:
    """Returns the label that is stored; empty if it would be too long."""
    label = ",".join(allowed_hosts(policy))
    return label if len(label) <= MAX_LABEL_LENGTH else ""


def network_from_label(info: SandboxInfo) -> NetworkPolicy | None:
    """Returns the requested policy without secrets, which are stored nowhere. None if none was requested.

    Another dialect may have written anything there: an invalid label allows nothing.
    """
    label = info.metadata.get(NETWORK_LABEL)
    if label is None:
        return None
    try:
        return NetworkPolicy(allow=tuple(filter(None, label.split(","))))
    except errors.InvalidRequest:
        return NetworkPolicy()


def describe_network(policy: NetworkPolicy, *, packages: bool) -> str:
    """Describes the network to a model, before it writes code that fails."""
    hosts = allowed_hosts(policy)
    installs = "pip can install packages."
    if not hosts:
        return f"There is no internet access, but {installs}" if packages else "There is no internet access."
    return " ".join([_describe_hosts(hosts), *([installs] if packages else []), *_describe_secrets(policy)])


def _describe_hosts(hosts: tuple[str, ...]) -> str:
    if any(parse_pattern(host).name == "*" for host in hosts):
        return "The internet can be reached by the proxy in HTTP_PROXY, as far as the operator of this host allows."
    shown = ", ".join(hosts[:MAX_DESCRIBED_HOSTS]) + (
        f" and {len(hosts) - MAX_DESCRIBED_HOSTS} more" if len(hosts) > MAX_DESCRIBED_HOSTS else ""
    )
    return f"Of the internet only these hosts can be reached, by the proxy in HTTP_PROXY: {shown}."


def _describe_secrets(policy: NetworkPolicy) -> list[str]:
    named = [f"{secret.name} for {secret.domain}" for secret in policy.secrets if secret.name is not None]
    if not named:
        return []
    return [
        f"Environment variables stand for secrets: {', '.join(named)}. Send the variable's value as it is in a header "
        "of a request to that host: the secret takes its place on the way."
    ]


# Unwraps container ids that went through LiteLLM's proxy.
#
# It gives its clients `cntr_` + base64 of "litellm:custom_llm_provider:..;model_id:..;container_id:ORIGINAL",
# to find the container itself; but an id that a client names in a tool is passed on as it is, and arrives here.

CONTAINER_ID_PREFIX = "cntr_"
MAX_WRAPPED_LENGTH = 4096
_MARK, _NAME = "litellm:", ";container_id:"


def unwrap_container_id(id: str) -> str:
    """Returns the id inside, or the id itself. Its owner is checked later, as for any other id."""
    try:
        text = base64.b64decode(id[len(CONTAINER_ID_PREFIX) : MAX_WRAPPED_LENGTH], validate=True).decode()
    except (binascii.Error, ValueError):
        return id
    before, _, original = text.rpartition(_NAME)
    return original if before.startswith(_MARK) and original.startswith(CONTAINER_ID_PREFIX) else id


NAME, MINUTES, SESSION = "openai.name", "openai.minutes", "openai.session"  # in a sandbox's metadata
DEFAULT_MINUTES = 20  # of a sandbox that was not made as a container
MEMORY_TIERS: dict[MemoryTier, int] = {"1g": GIB, "4g": 4 * GIB, "16g": 16 * GIB, "64g": 64 * GIB}


class InvalidContainerOption(errors.InvalidRequest):
    """An option of a container that is not available. `param` and `reason` are OpenAI's field and code."""

    status = 400

    def __init__(self, message: str, param: str, reason: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.reason = reason


class ContainerOptions(Struct):
    """The options of a new container."""

    name: str = "auto"
    minutes: int | None = None
    memory: MemoryTier | None = None
    network: NetworkPolicy | None = None
    session: str | None = None


class Container:
    """A live container."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.id = CONTAINER_ID_PREFIX + sandbox.id

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
        """Whether a client of another dialect paused it."""
        return self.sandbox.record.state == "paused"

    def touch(self, seconds: float = 0.0) -> None:
        """Records a use now, or for the next `seconds`: it expires later, never earlier than before."""
        self.sandbox.extend(idle_minutes(self.info) * 60.0 + seconds)


class Containers:
    def __init__(self, engine: Engine, config: Config):
        self._engine = engine
        self._config = config
        self._sessions: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._policies: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by sandbox

    async def create(self, owner: str, wishes: ContainerOptions) -> Container:
        """Raises InvalidContainerOption, and the errors of `Engine.create`."""
        minutes = wishes.minutes or self._config.gateway.container_minutes
        metadata = {NAME: wishes.name, MINUTES: str(minutes)}
        if wishes.session is not None:
            metadata[SESSION] = wishes.session
        if wishes.network is not None:
            self.check_network(wishes.network)
            metadata[NETWORK_LABEL] = network_label(wishes.network)
        spec = SandboxSpec(
            owner=owner,
            metadata=metadata,
            lifetime_seconds=minutes * 60.0,
            limits=await self.limits_of(wishes.memory),
            network=wishes.network,
        )
        return Container(await self._engine.create(spec))

    async def get(self, owner: str, id: str) -> Container:
        """Returns a live container and counts as a use. A paused one is resumed: this dialect has no other way to.

        Raises SandboxNotFound, and Gone for one that has expired.
        """
        try:
            return await self._find_running(owner, id)
        except errors.SandboxPaused:
            await self._engine.resume(to_sandbox_id(id), owner)
            return await self._find_running(owner, id)

    async def _find_running(self, owner: str, id: str) -> Container:
        """As `get`, but raises SandboxPaused for a paused container."""
        try:
            container = Container(await self._engine.get(to_sandbox_id(id), owner))
            container.touch()
        except errors.SandboxNotFound:
            raise _container_not_found(id) from None
        except errors.SandboxKilled:
            raise await self._ended_error(owner, id) from None
        return container

    async def describe(self, owner: str, id: str) -> SandboxInfo:
        """Describes a container, also an expired or paused one. It counts as a use. Raises SandboxNotFound."""
        try:
            return (await self._find_running(owner, id)).info
        except (errors.Gone, errors.SandboxPaused):
            return await self._engine.describe(to_sandbox_id(id), owner)

    async def created_at(self, owner: str, id: str) -> float:
        """Returns the time of creation, also of a deleted container. Raises SandboxNotFound."""
        return (await self._engine.describe(to_sandbox_id(id), owner)).created_at

    async def list(self, owner: str, name: str | None = None) -> Sequence[SandboxInfo]:
        """Lists running and paused sandboxes, and expired ones that were made as containers; the newest first."""
        ended = await self._engine.history(owner, NAME, name)
        running = [info for info in self._engine.list(owner) if name in (None, container_name(info))]
        found = {info.id: info for info in (*ended, *running)}  # one that ended meanwhile is there once
        return sorted(found.values(), key=age_key, reverse=True)

    async def delete(self, owner: str, id: str) -> None:
        """Deletes a container, also an expired or paused one. Raises SandboxNotFound."""
        try:
            container = await self._find_running(owner, id)
        except errors.SandboxPaused:
            await self._engine.kill(to_sandbox_id(id), owner, CONTAINER_DELETED)
        except errors.Gone:
            await self._engine.mark_killed_by_owner(to_sandbox_id(id), owner, CONTAINER_DELETED)
        else:
            await container.sandbox.kill(CONTAINER_DELETED)

    async def of_session(self, owner: str, wishes: ContainerOptions) -> tuple[Container, bool]:
        """Returns the session's container, and whether it was made now. Concurrent callers get the same one."""
        assert wishes.session is not None
        lock = self._sessions.setdefault((owner, wishes.session), asyncio.Lock())  # exists while a request holds it
        async with lock:
            alive = await self.find_live_in_session(owner, wishes.session)
            return (alive, False) if alive is not None else (await self.create(owner, wishes), True)

    async def find_live_in_session(self, owner: str, session: str) -> Container | None:
        for info in self._engine.list(owner):
            if info.metadata.get(SESSION) == session:
                with contextlib.suppress(errors.Gone, errors.SandboxNotFound):  # it may end at this very moment
                    return await self.get(owner, CONTAINER_ID_PREFIX + info.id)
        return None

    async def find_expired_in_session(self, owner: str, session: str) -> str | None:
        """Returns the id of the session's container that has expired."""
        ended = await self._engine.history(owner, SESSION, session, limit=1)
        return CONTAINER_ID_PREFIX + ended[0].id if ended else None

    # -- network policies

    def check_network(self, policy: NetworkPolicy) -> None:
        """Raises InvalidContainerOption for a policy that the operator of this host allows to no owner."""
        try:
            self._engine.networks.check(policy)
        except errors.InvalidRequest as error:
            raise InvalidContainerOption(str(error), "network_policy") from None

    async def network_of(self, info: SandboxInfo) -> NetworkPolicy:
        """Returns the policy of a container, or the one that was requested for an expired container."""
        if info.state == "running":
            with contextlib.suppress(errors.Gone, errors.SandboxNotFound):  # it may end at this very moment
                handle = await self._engine.handle(info.id, None)
                return (await handle.running()).network.policy
        return network_from_label(info) or NetworkPolicy()

    async def default_network(self) -> NetworkPolicy:
        """Returns the policy of a container without a requested policy."""
        networks, usual = self._engine.networks, SandboxSpec()
        if not networks.bound.allow:
            return NetworkPolicy()
        return networks.policy_for(usual, await self._engine.template(usual.template))

    async def remembered_network(self, owner: str, sandbox: str) -> NetworkPolicy | None:
        """Returns the policy requested for an expired container, without secrets; empty if it is no longer allowed."""
        try:
            policy = network_from_label(await self._engine.describe(sandbox, owner))
            if policy is not None:
                self.check_network(policy)
        except errors.SandboxNotFound:
            return None
        except InvalidContainerOption:
            return NetworkPolicy()
        return policy

    @contextlib.asynccontextmanager
    async def with_network(self, container: Container, policy: NetworkPolicy | None) -> AsyncGenerator[None, None]:
        """Applies `policy` to the container; no other request replaces it within the block. None changes nothing.

        It stays so afterwards. Raises Gone, InvalidContainerOption, and InvalidRequest where a program inside is in
        the way.
        """
        if policy is None:
            yield
            return
        lock = self._policies.setdefault(container.sandbox.id, asyncio.Lock())  # exists while a request holds it
        async with lock:
            await self._set_network(container.sandbox, policy)
            yield

    async def _set_network(self, sandbox: Sandbox, policy: NetworkPolicy) -> None:
        if sandbox.network.policy == policy:
            return
        self.check_network(policy)
        await self._engine.networks.replace(sandbox, policy)
        sandbox.change_metadata({NETWORK_LABEL: network_label(policy)})

    async def limits_of(self, memory: MemoryTier | None) -> Limits | None:
        """Returns the limits of a tier; None for the default.

        Raises InvalidContainerOption for an unavailable tier.
        """
        if memory is None:
            return None
        limits = _replace_memory(await self._engine.limits_of(SandboxSpec().template), MEMORY_TIERS[memory])
        try:
            self._config.limits.check(limits)
        except errors.InvalidRequest:
            most = [tier for tier in MEMORY_TIERS if MEMORY_TIERS[tier] <= self._config.limits.maximum.memory_bytes]
            offered = ", ".join(f"'{tier}'" for tier in most) or "none: leave memory_limit out"
            message = f"This server does not have containers of '{memory}'. Supported values are: {offered}."
            raise InvalidContainerOption(message, "memory_limit") from None
        return limits

    async def _ended_error(self, owner: str, id: str) -> errors.ClocheError:
        """Returns the error for a killed container: expired if the server's stop killed it, else not found."""
        info = await self._engine.describe(to_sandbox_id(id), owner)
        return (
            errors.SandboxExpired("Container is expired.")
            if info.end_reason == SHUT_DOWN_REASON
            else _container_not_found(id)
        )


def _replace_memory(limits: Limits, memory_bytes: int) -> Limits:
    fields = {name: getattr(limits, name) for name in Limits.__struct_fields__}
    return Limits(**{**fields, "memory_bytes": memory_bytes})


def to_sandbox_id(id: str) -> str:
    """Raises SandboxNotFound if the id is no container's."""
    if not id.startswith(CONTAINER_ID_PREFIX):
        raise _container_not_found(id)
    return unwrap_container_id(id).removeprefix(CONTAINER_ID_PREFIX)


def _container_not_found(id: str) -> errors.SandboxNotFound:
    return errors.SandboxNotFound(f"Container with id '{id[:100]}' not found.")


def age_key(info: SandboxInfo) -> tuple[float, str]:
    """Returns the sort key of containers."""
    return info.created_at, info.id


def container_name(info: SandboxInfo) -> str:
    """Returns the container's name. A sandbox that another dialect made is named by its id."""
    return info.metadata.get(NAME) or CONTAINER_ID_PREFIX + info.id


def last_active_at(info: SandboxInfo) -> float:
    """Returns the time of the last use.

    It is not stored: every use moves the deadline to so many minutes later.

    A deadline that code in progress has moved further ahead makes it now, for as long as that code may take.
    """
    latest = info.ended_at if info.ended_at is not None else time.time()
    if info.deadline_at is None:
        return latest
    return max(min(info.deadline_at - idle_minutes(info) * 60.0, latest), info.created_at)


def idle_minutes(info: SandboxInfo) -> int:
    """Returns the idle minutes after which it expires."""
    minutes = info.metadata.get(MINUTES, "")
    # another dialect may have written anything there
    is_number = minutes.isascii() and minutes.isdigit() and len(minutes) < 6
    return max(int(minutes), 1) if is_number else DEFAULT_MINUTES


def memory_tier_of(info: SandboxInfo) -> MemoryTier:
    """Returns the largest tier that fits in its memory."""
    return max(
        (tier for tier in MEMORY_TIERS if MEMORY_TIERS[tier] <= info.limits.memory_bytes),
        key=MEMORY_TIERS.__getitem__,
        default="1g",
    )


# File names in a container: plain ones that a model can type.

MAX_NAME_BYTES = 200
DEFAULT_NAME = "file"


def sanitize_file_name(name: str) -> str:
    """Returns the name for /mnt/data: never a path, never hidden, never longer than a file system takes."""
    last = name.replace("\\", "/").rpartition("/")[2]
    # Cc: control characters, NUL among them; Cf: marks of text direction; Cs: halves of surrogates
    visible = "".join(each for each in last if unicodedata.category(each) not in ("Cc", "Cf", "Cs", "Zl", "Zp"))
    return _shorten_name(visible.strip().lstrip(".").strip() or DEFAULT_NAME)


def find_free_name(name: str, taken: Names[str]) -> str:
    """Returns the name, or `name-2.ext`, `name-3.ext`, .. if it is taken."""
    stem, extension = posixpath.splitext(name)
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{extension}"
    return name


def _shorten_name(name: str) -> str:
    stem, extension = posixpath.splitext(name)
    extension = extension if len(extension.encode()) <= 20 else ""
    room = MAX_NAME_BYTES - len(extension.encode())
    stem = name[: len(name) - len(extension)]
    return stem.encode()[:room].decode(errors="ignore") + extension
