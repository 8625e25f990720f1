"""What callers may write, turned into what the engine takes."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cloche import errors
from cloche.engine.answers import InputSource
from cloche.engine.files import Content
from cloche.model import Limits, NetworkPolicy, SandboxSpec

LimitsLike = Limits | Mapping[str, float] | None
NetworkLike = NetworkPolicy | Mapping[str, Any] | None

OWNER = "local"
_END = object()


def sandbox_spec(
    template: str,
    env: Mapping[str, str] | None,
    metadata: Mapping[str, str] | None,
    limits: LimitsLike,
    timeout: float | None,
    network: NetworkLike,
) -> SandboxSpec:
    """Raises InvalidRequest, or TemplateNotFound for what cannot be a template's name."""
    if not isinstance(template, str):
        raise errors.InvalidRequest(f"template must be a string, not {type(template).__name__}")
    return SandboxSpec(
        template=template,
        env=dict(env or {}),
        metadata=_metadata(metadata),
        limits=limits_of(limits),
        lifetime_seconds=timeout,
        network=network_of(network),
        owner=OWNER,
    )


def refuse_server(url: str | None, api_key: str | None) -> None:
    """Raises InvalidRequest: quietly running here what was meant for a server would be worse."""
    if url or api_key or os.environ.get("CLOCHE_URL"):
        raise errors.InvalidRequest("a server comes with a later version: leave out url, api_key and CLOCHE_URL")


def limits_of(limits: LimitsLike) -> Limits | None:
    if limits is None or isinstance(limits, Limits):
        return limits
    unknown = set(limits) - set(Limits.__struct_fields__)
    if unknown:
        known = ", ".join(Limits.__struct_fields__)
        raise errors.InvalidRequest(f"there is no limit {sorted(unknown)[0]!r}: there are {known}")
    try:
        return msgspec.convert(dict(limits), Limits)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad limits: {error}") from None


def network_of(network: NetworkLike) -> NetworkPolicy:
    if network is None:
        return NetworkPolicy()
    allow = network.allow if isinstance(network, NetworkPolicy) else network.get("allow", ())
    unknown = () if isinstance(network, NetworkPolicy) else set(network) - {"allow"}
    if allow or unknown:
        raise errors.InvalidRequest("network access is not available yet: a sandbox has loopback only")
    return NetworkPolicy()


def content_of(content: Content) -> Content:
    """Chunks of a caller's iterable are taken in a thread, so that a slow one does not stop the engine."""
    if isinstance(content, (str, bytes, bytearray, memoryview, AsyncIterable)) or not isinstance(content, Iterable):
        return content
    return _in_thread(iter(content))


def content_from_loop(content: Content) -> Content:
    """The same where the caller has an event loop, on which their async iterable must run."""
    if not isinstance(content, AsyncIterable):
        return content_of(content)
    return _on_loop(aiter(content), asyncio.get_running_loop())


def input_from_loop(source: InputSource | Callable[[str], Awaitable[str]]) -> InputSource:
    """Answers of a coroutine function come from the caller's own event loop."""
    if not inspect.iscoroutinefunction(source):
        return source
    loop = asyncio.get_running_loop()
    return lambda prompt: asyncio.run_coroutine_threadsafe(source(prompt), loop).result()


async def _in_thread(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    while (chunk := await asyncio.to_thread(next, chunks, _END)) is not _END:
        yield chunk  # type: ignore[misc]


async def _on_loop(chunks: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> AsyncIterator[bytes]:
    async def take() -> bytes | None:
        return await anext(chunks, None)

    while (chunk := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(), loop))) is not None:
        yield chunk


def _metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    values = dict(metadata or {})
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in values.items()):
        raise errors.InvalidRequest("metadata must be strings with string values")
    try:
        "".join([*values, *values.values()]).encode()
    except UnicodeEncodeError:
        raise errors.InvalidRequest("metadata must be valid Unicode") from None
    return values
