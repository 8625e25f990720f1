"""An upstream's server over HTTP: its key, its limits, and the translation of its failures for clients."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Generic, TypeVar
from urllib.request import getproxies_environment, proxy_bypass

import httpx2
import msgspec

from cloche import errors
from cloche.config.sections import UpstreamConfig as Settings
from cloche.gateway.upstream.http_client import ClientResponse, HttpClient, HttpTimeouts
from cloche.gateway.upstream.sse import LONGEST_FIELD_NAME, ServerEvent, begins_stream, read_server_events
from cloche.model import MIB
from cloche.telemetry import log

# Makes an upstream's texts and errors safe to show and to log.

MIN_SECRET_LENGTH = 8  # characters of a header's value that may be a key
SECRET_MASK = "***"
_SEPARATORS = re.compile(r"[\s,;=]+")
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def find_secrets(values: Iterable[str]) -> list[str]:
    """Returns possible secrets in header values: the values, and the words of those like `Bearer sk-..`."""
    parts = (part for value in values for part in (value.strip(), *_SEPARATORS.split(value)))
    found = {part for part in parts if len(part) >= MIN_SECRET_LENGTH}
    return sorted(found, key=len, reverse=True)  # a part of another must not leave the rest of it


def mask_secrets(text: str, secrets: list[str]) -> str:
    """Masks the secrets, also the beginning of one at the end, where a text was cut."""
    for secret in secrets:
        text = text.replace(secret, SECRET_MASK)
    for secret in secrets:
        for size in range(min(len(secret), len(text)), MIN_SECRET_LENGTH - 1, -1):
            if text.endswith(secret[:size]):
                return text[:-size] + SECRET_MASK
    return text


def root_cause_name(error: BaseException) -> str:
    """Returns the name of the root cause, such as ConnectionRefusedError.

    Its text is left out: it may be anything.

    Of several addresses that failed in several ways there is only an OSError, whose text has their numbers.
    """
    for _ in range(10):
        below = error.__cause__ or error.__context__
        if below is None or isinstance(below, asyncio.CancelledError):  # a time-out is made of one
            break
        error = below
    if type(error) is OSError and (number := _ERRNO.search(str(error))):
        return f"OSError {errno.errorcode.get(int(number[1]), number[1])}"
    return type(error).__name__


# Time limits of an upstream's answer: in all, and after its last word.

T = TypeVar("T")

MIN_ANSWER_SECONDS = 3600.0
ANSWER_TIMEOUTS = 6  # of a server that may be silent for long
END_SECONDS = 0.2  # for the end of a complete stream: then its connection can be used again
USAGE_SECONDS = 2.0  # for the optional chunk with usage after the last text


class AnswerDeadline:
    """The time limit of one answer. Only waiting counts, not the processing of its events.

    A server that sends comments is never silent, so that the limit of silence does not end it.
    """

    def __init__(self, seconds: float):
        self._left = seconds

    async def next(self, events: AsyncIterator[ServerEvent]) -> ServerEvent | None:
        """Returns the next event; None at the end. Raises UpstreamFailed on timeout, and the errors of the stream."""
        return await self.whole(anext(events, None))

    async def last(self, events: AsyncIterator[ServerEvent], seconds: float) -> ServerEvent | None:
        """Returns one more event after a complete answer. None if none comes in that time, or the stream breaks."""
        with contextlib.suppress(TimeoutError, errors.UpstreamFailed, httpx2.HTTPError):
            return await self._await_counted(anext(events, None), min(seconds, self._left))
        return None

    async def whole(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`. Raises UpstreamFailed on timeout, and its errors."""
        try:
            return await self._await_counted(work, self._left)
        except TimeoutError:
            raise errors.UpstreamFailed(
                "The upstream of this model took too long to complete its answer", status=504
            ) from None

    async def _await_counted(self, work: Awaitable[T], seconds: float) -> T:
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                return await work
        finally:
            self._left -= time.monotonic() - began


def max_answer_seconds(timeout_seconds: float) -> float:
    """Returns the limit for one answer of a server that may be silent for so long."""
    return max(MIN_ANSWER_SECONDS, ANSWER_TIMEOUTS * timeout_seconds)


# Lenient JSON decoding for upstreams: characters cut in half become U+FFFD, and the rest is kept.

_SURROGATE_ESCAPES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)


def decode_lenient(content: bytes) -> Any:
    """Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError if the content is no JSON at all."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(_replace_broken_characters(content))


def _replace_broken_characters(content: bytes) -> bytes:
    """The same with whole characters only: a model's server may cut its text between two bytes, or two halves."""
    text = content.decode("utf-8", "replace").encode()
    return _SURROGATE_ESCAPES.sub(lambda escape: rb"\ufffd" if escape[1] else escape[0], text)


CONNECT_SECONDS = 10.0
WRITE_SECONDS = 60.0
LIST_SECONDS = 5.0  # for the list of its models
QUEUE_SECONDS = 30.0  # for a free connection
MAX_CONNECTIONS = 1000
IDLE_CONNECTIONS = 100
IDLE_SECONDS = 60.0
MAX_WHOLE_BYTES = 64 * MIB  # of an answer that is not streamed
MAX_ERROR_BYTES = 64 * 1024
ERROR_SECONDS = 5.0  # for the body of an error
MAX_SNIFFED_PIECES = 16  # pieces of an answer that may be blank before it is taken for a whole one
MAX_MESSAGE_LENGTH = 500  # characters of an upstream's message that a client gets

CREDENTIAL_STATUSES = frozenset({401, 402, 403, 407})
"""What an upstream answers to a key of ours that is wrong, or to an account that is empty: no client can mend it."""

PASSED_STATUSES = frozenset({400, 404, 408, 409, 413, 415, 422, 429, 502, 503, 504})
"""What means the same to our client. Every other status becomes 502."""

REDIRECT_REASON = (
    "a redirect, which is not followed: it could carry the key elsewhere; set base_url to the real address"
)


class UpstreamServer:
    """One keep-alive pool of connections to one upstream. Its creator closes it."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ):
        """Raises InvalidConfig if a variable of the key or a header is not set, or the URL or a header is invalid."""
        self.secret = resolve_api_key(settings, environ)
        headers = resolve_headers(settings, environ)
        self._secrets = find_secrets([self.secret, *headers.values()])
        try:
            settings = msgspec.structs.replace(settings, headers=headers)
            self._client = httpx2.AsyncClient(
                base_url=settings.base_url.rstrip("/"),
                headers=_request_headers(settings, self.secret),
                timeout=httpx2.Timeout(
                    connect=CONNECT_SECONDS, read=settings.timeout_seconds, write=WRITE_SECONDS, pool=QUEUE_SECONDS
                ),
                limits=httpx2.Limits(
                    max_connections=MAX_CONNECTIONS,
                    max_keepalive_connections=IDLE_CONNECTIONS,
                    keepalive_expiry=IDLE_SECONDS,
                ),
                follow_redirects=False,
            )
        except (httpx2.InvalidURL, ValueError) as error:
            raise errors.InvalidConfig(f"[[upstream]] of {settings.models[0]}: {error}") from None
        self._direct = None if _is_behind_proxy(self._client.base_url) else self._new_direct_client(settings)

    def _new_direct_client(self, settings: Settings) -> HttpClient:
        timeouts = HttpTimeouts(
            connect=CONNECT_SECONDS, read=settings.timeout_seconds, write=WRITE_SECONDS, queue=QUEUE_SECONDS
        )
        return HttpClient(
            self._client.base_url,
            _request_headers(settings, self.secret),
            timeouts,
            connections=MAX_CONNECTIONS,
            idle=IDLE_CONNECTIONS,
            idle_seconds=IDLE_SECONDS,
        )

    @contextlib.asynccontextmanager
    async def post(
        self, path: str, body: dict[str, Any], request_id: str = ""
    ) -> AsyncGenerator[UpstreamResponse, None]:
        """Posts a JSON body and yields the response, which is read inside the block. Leaving early hangs up.

        Raises UpstreamFailed, inside the block too.
        """
        headers = {"content-type": "application/json"}
        if request_id:
            headers["x-client-request-id"] = request_id
        content = msgspec.json.encode(body)
        with _translate_failures(self._client.base_url.host, self._secrets):
            async with self._open_post(path, content, headers) as response:
                if response.status_code != 200:
                    raise self._refusal_error(response, await _read_error_body(response))
                answer = UpstreamResponse(response)
                await answer.look()
                yield answer

    def _open_post(
        self, path: str, content: bytes, headers: dict[str, str]
    ) -> contextlib.AbstractAsyncContextManager[httpx2.Response | ClientResponse]:
        if self._direct is not None:
            return self._direct.post(path, content, headers)
        return self._client.stream("POST", path, content=content, headers=headers)

    async def models(self) -> dict[str, Any]:
        """Returns the answer to `GET /models`. Raises UpstreamFailed."""
        with _translate_failures(self._client.base_url.host, self._secrets):
            try:
                async with self._client.stream("GET", "/models", timeout=LIST_SECONDS) as response:
                    if response.status_code != 200:
                        raise self._refusal_error(response, await _read_error_body(response))
                    return await UpstreamResponse(response).whole()
            except (UnicodeError, OverflowError) as error:  # of an address that cannot even be tried
                raise httpx2.ConnectError(type(error).__name__) from error

    def _refusal_error(self, response: httpx2.Response | ClientResponse, body: bytes) -> errors.UpstreamFailed:
        status = response.status_code
        log.warning("upstream.refused", host=self._client.base_url.host, status=status)
        if status in CREDENTIAL_STATUSES:
            return errors.UpstreamFailed(
                f"The upstream of this model answered {status}: it does not accept this server's credentials. An "
                "operator must correct api_key in its [[upstream]]",
                reason="upstream_credentials",
            )
        if status < 400:
            return errors.UpstreamFailed(f"The upstream of this model answered {status}: {REDIRECT_REASON}")
        return self._error_from_body(status, body, response.headers.get("retry-after"))

    def _error_from_body(self, status: int, body: bytes, retry_after: str | None) -> errors.UpstreamFailed:
        said = parse_error(body)
        if status == 404 and said is None:
            return errors.UpstreamFailed(
                "The upstream of this model answered 404 Not Found: an operator must correct base_url in its "
                "[[upstream]]"
            )
        return to_upstream_failure(
            {"message": body.decode("utf-8", "replace")} if said is None else said,
            status=status if status in PASSED_STATUSES else 502,
            retry_after=retry_after,
            secret=self.secret,
        )

    async def aclose(self) -> None:
        if self._direct is not None:
            await self._direct.aclose()
        await self._client.aclose()


class UpstreamResponse:
    """A 200 of an upstream, before its body is read. `is_stream` is valid after `look`."""

    def __init__(self, response: httpx2.Response | ClientResponse):
        self._pieces = response.aiter_bytes()
        self._begun = b""  # the inspected prefix
        self.is_stream = "text/event-stream" in response.headers.get("content-type", "").lower()

    async def look(self) -> None:
        """Detects whether it is a stream: some servers stream under another content type, others answer whole."""
        for _ in range(MAX_SNIFFED_PIECES):
            if self.is_stream or len(self._begun.strip()) >= LONGEST_FIELD_NAME:
                break
            self._begun += await anext(self._pieces, b"")
        self.is_stream = self.is_stream or begins_stream(self._begun)

    def events(self) -> AsyncGenerator[ServerEvent, None]:
        return read_server_events(self._iter_bytes())

    async def whole(self) -> dict[str, Any]:
        """Reads the body as a JSON object."""
        pieces = []
        async for piece in _limit_bytes(self._iter_bytes(), MAX_WHOLE_BYTES):
            pieces.append(piece)
        return parse_json_object(b"".join(pieces))

    async def _iter_bytes(self) -> AsyncGenerator[bytes, None]:
        begun, self._begun = self._begun, b""
        if begun:
            yield begun
        async for piece in self._pieces:
            yield piece


def resolve_api_key(settings: Settings, environ: Mapping[str, str]) -> str:
    """The upstream's key. Raises InvalidConfig if it should come from a variable that is not set."""
    return _resolve_value(settings, "api_key", settings.api_key, environ)


def resolve_headers(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the headers of every request. Raises InvalidConfig, as `resolve_api_key` does."""
    return {
        name: _resolve_value(settings, f"header {name}", value, environ) for name, value in settings.headers.items()
    }


def _resolve_value(settings: Settings, what: str, value: str, environ: Mapping[str, str]) -> str:
    """Returns the value, or that of the environment variable which it names. Raises InvalidConfig if unset."""
    if not value.startswith("env:"):
        return value.strip()
    name = value.removeprefix("env:")
    if not environ.get(name, "").strip():
        raise errors.InvalidConfig(
            f"[[upstream]] of {settings.models[0]}: {what} is {value!r}, and the environment variable {name} is not set"
        )
    return environ[name].strip()


def parse_json_object(content: bytes) -> dict[str, Any]:
    """Parses a JSON object; broken characters in it are replaced. Raises UpstreamFailed for anything else."""
    try:
        value = decode_lenient(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise errors.UpstreamFailed("The upstream answered something that is no JSON") from None
    if not isinstance(value, dict):
        raise errors.UpstreamFailed("The upstream answered something that is no JSON object")
    return value


def parse_error(content: bytes) -> dict[str, Any] | None:
    """Returns the error object of a body, in OpenAI's shape or one like it."""
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if isinstance(value, list) and value:
        value = value[0]  # Google's
    if not isinstance(value, dict):
        return None
    error = value.get("error", value)
    if isinstance(error, str):
        return {"message": error}
    return error if isinstance(error, dict) and "message" in error else None


def to_upstream_failure(
    said: Mapping[str, Any], *, status: int = 502, retry_after: str | None = None, secret: str = ""
) -> errors.UpstreamFailed:
    """Converts an upstream's error object. `secret` is removed from its texts."""
    message = (
        _clean_text(_flatten_message(said.get("message")), MAX_MESSAGE_LENGTH, secret)
        or f"status {status}, without a word"
    )
    kind = _clean_text(said.get("type"), 100, secret)
    if not kind:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    return errors.UpstreamFailed(
        f"The upstream of this model failed: {message}",
        status=status,
        kind=kind,
        reason=_clean_text(said.get("code"), 100, secret),
        param=_clean_text(said.get("param"), 200, secret),
        retry_after=retry_after if retry_after and len(retry_after) < 50 else None,
    )


def _flatten_message(message: Any) -> Any:
    """Encodes a message that is no string: some servers send a list of problems."""
    return json.dumps(message) if message and isinstance(message, (dict, list)) else message


def _clean_text(value: Any, most: int, secret: str) -> str | None:
    if value is None or isinstance(value, (dict, list)):
        return None
    text = str(value).strip()
    return (text.replace(secret, "***") if secret else text)[:most] or None


def _request_headers(settings: Settings, key: str) -> dict[str, str]:
    # An answer that is compressed would come in blocks, not word by word.
    ours = {"user-agent": f"cloche/{version('cloche')}", "accept-encoding": "identity"}
    if key:
        ours["authorization"] = f"Bearer {key}"
    given = {name.lower(): value for name, value in settings.headers.items()}
    for name, value in {**ours, **given}.items():
        if not (name + value).isascii() or not (name + value).isprintable():
            raise ValueError(f"the header {name!r}, or the key, has a character that no header can have")
    return {**ours, **given}


async def _read_error_body(response: httpx2.Response | ClientResponse) -> bytes:
    """Reads the beginning of an error's body, soon, complete or not: its status is enough."""
    pieces, size = [], 0
    with contextlib.suppress(TimeoutError, httpx2.HTTPError):
        async with asyncio.timeout(ERROR_SECONDS):
            async for piece in response.aiter_bytes():
                pieces.append(piece)
                size += len(piece)
                if size >= MAX_ERROR_BYTES:
                    break
    return b"".join(pieces)[:MAX_ERROR_BYTES]


async def _limit_bytes(pieces: AsyncIterator[bytes], most: int) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > most:
            raise errors.UpstreamFailed(f"The upstream's answer is over {most} bytes")
        yield piece


def _is_behind_proxy(url: httpx2.URL) -> bool:
    """Whether the environment sets a proxy for this server."""
    proxies = getproxies_environment()
    return bool(proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(url.host)


@contextlib.contextmanager
def _translate_failures(host: str, secrets: list[str]) -> Iterator[None]:
    """Translates connection errors to UpstreamFailed, and removes our secrets from an upstream's texts."""
    try:
        yield
    except errors.UpstreamFailed as error:
        _conceal_secrets(error, secrets)
        raise
    except httpx2.HTTPError as error:
        log.warning("upstream.failed", host=host, error=type(error).__name__, cause=root_cause_name(error))
        status, what = next(meaning for kind, meaning in _FAILURE_MEANINGS.items() if isinstance(error, kind))
        if isinstance(error, httpx2.DecodingError):
            what = f"{what}: {str(error)[:100]}"
        raise errors.UpstreamFailed(f"The upstream of this model {what}", status=status) from None


def _conceal_secrets(error: errors.UpstreamFailed, secrets: list[str]) -> None:
    error.args = tuple(mask_secrets(str(each), secrets) for each in error.args)
    error.kind = mask_secrets(error.kind, secrets)
    error.reason = error.reason and mask_secrets(error.reason, secrets)
    error.param = error.param and mask_secrets(error.param, secrets)


_FAILURE_MEANINGS: dict[type[Exception], tuple[int, str]] = {
    httpx2.PoolTimeout: (503, "has too many requests of this server to answer"),
    httpx2.ConnectTimeout: (504, "took too long to be connected"),
    httpx2.TimeoutException: (504, "took too long to answer"),
    httpx2.ConnectError: (502, "cannot be reached"),
    httpx2.DecodingError: (502, "answered in an encoding that was not requested"),
    httpx2.ProxyError: (502, "cannot be reached through the proxy"),
    httpx2.HTTPError: (502, "broke the connection off"),
}
"""The first that fits."""


# A bounded cache of facts about models. It is bounded because clients choose the names.


MAX_REMEMBERED_MODELS = 1000


class RecentModels(Generic[T]):
    """Keeps one value per model, and drops the least recently used model."""

    def __init__(self, most: int = MAX_REMEMBERED_MODELS):
        self._most = most
        self._known: OrderedDict[str, T] = OrderedDict()

    def of(self, model: str) -> T | None:
        if model in self._known:
            self._known.move_to_end(model)
        return self._known.get(model)

    def keep(self, model: str, what: T) -> None:
        self._known[model] = what
        self._known.move_to_end(model)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
