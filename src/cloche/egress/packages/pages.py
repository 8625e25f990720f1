"""Pages of indexes: kept for a while, then asked for again, and served as they were where the index is down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec

from cloche.egress.packages.cache import Cache, url_key
from cloche.egress.packages.memory import Memory
from cloche.egress.packages.problems import NotThere, UpstreamError
from cloche.egress.packages.saying import Seldom
from cloche.egress.packages.threads import Threads
from cloche.egress.packages.upstream import PAGE_SECONDS, Answer, Upstream
from cloche.egress.packages.urls import origin
from cloche.structs import Struct

MAX_PAGE_BYTES = 64 << 20
MISSING_SECONDS = 60.0  # for which a page that was not there is not asked for again
MAX_MISSING = 10_000
MEMORY_BYTES = 16 << 20  # of pages that are in memory, too

Convert = Callable[[bytes, str, str], bytes]
"""A page's body, its content type and its URL, as what is to be kept. Raises UpstreamError. It runs in a thread."""


class Page(Struct):
    url: str  # where it came from in the end
    body: bytes
    at: float  # when it was known to be so
    etag: str = ""
    modified: str = ""


class Pages:
    def __init__(self, cache: Cache, threads: Threads, fresh_seconds: float):
        self._threads = threads
        self._cache = cache
        self._fresh_seconds = fresh_seconds
        self._seldom = Seldom()
        self._memory: Memory[Page] = Memory(MEMORY_BYTES)
        self._asked: dict[str, asyncio.Task[Page]] = {}
        self._missing: dict[str, float] = {}

    async def get(self, upstream: Upstream, url: str, accept: str, convert: Convert) -> Page:
        """Who asks for what somebody asks for already gets the same answer. Raises NotThere, UpstreamError."""
        key = url_key(f"{accept} {url}")
        if time.monotonic() - self._missing.get(key, -MISSING_SECONDS) < min(MISSING_SECONDS, self._fresh_seconds):
            raise NotThere("the index has no such thing")
        known = self._memory.get(key)
        if known is not None and self._is_fresh(known):
            return known
        if key not in self._asked:
            task = asyncio.get_running_loop().create_task(self._page(upstream, url, accept, convert, key))
            self._asked[key] = task
            task.add_done_callback(lambda task: self._forget(key, task))
        return await asyncio.shield(self._asked[key])

    def _is_fresh(self, page: Page) -> bool:
        return 0 <= time.time() - page.at < self._fresh_seconds

    def _forget(self, key: str, task: asyncio.Task[Page]) -> None:
        self._asked.pop(key, None)
        if not task.cancelled():
            task.exception()  # whoever asked has seen it, or has left

    async def _page(self, upstream: Upstream, url: str, accept: str, convert: Convert, key: str) -> Page:
        kept = await self._threads.run(self._read, key)
        if kept is not None and self._is_fresh(kept):
            self._memory.put(key, kept, len(kept.body))
            return kept
        try:
            async with asyncio.timeout(PAGE_SECONDS):
                page = await self._ask(upstream, url, accept, convert, kept)
        except NotThere:
            self._remember_missing(key)
            raise
        except (UpstreamError, TimeoutError) as error:
            failure = error if isinstance(error, UpstreamError) else _took_too_long(url)
            if kept is None:
                raise failure from None
            self._say_down(url, kept, failure)
            return kept
        await self._threads.run(self._cache.write, key, msgspec.msgpack.encode(page))
        self._memory.put(key, page, len(page.body))
        return page

    async def _ask(self, upstream: Upstream, url: str, accept: str, convert: Convert, kept: Page | None) -> Page:
        async with upstream.get(url, _headers(accept, kept)) as answer:
            if answer.status == 304:
                if kept is None:
                    raise UpstreamError("the index answered 304 to who knows nothing")
                return msgspec.structs.replace(kept, at=time.time())
            body = await answer.whole(MAX_PAGE_BYTES)
            return await self._threads.run(_converted, answer, body, convert)

    def _say_down(self, url: str, kept: Page, failure: UpstreamError) -> None:
        age_seconds = int(time.time() - kept.at)
        reason = f"{failure}; its old pages are served"
        self._seldom.warn("packages.index_down", host=origin(url).host, reason=reason, age_seconds=age_seconds)

    def _read(self, key: str) -> Page | None:
        content = self._cache.read(key)
        try:
            return msgspec.msgpack.decode(content, type=Page) if content is not None else None
        except (msgspec.MsgspecError, ValueError):
            return None  # of another version of Cloche

    def _remember_missing(self, key: str) -> None:
        while len(self._missing) >= MAX_MISSING:
            self._missing.pop(next(iter(self._missing)))
        self._missing[key] = time.monotonic()

    async def aclose(self) -> None:
        tasks = list(self._asked.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _converted(answer: Answer, body: bytes, convert: Convert) -> Page:
    return Page(
        url=answer.url,
        body=convert(body, answer.header("content-type"), answer.url),
        at=time.time(),
        etag=answer.header("etag")[:1000],
        modified=answer.header("last-modified")[:100],
    )


def _headers(accept: str, kept: Page | None) -> dict[str, str]:
    known = {} if kept is None else {"if-none-match": kept.etag, "if-modified-since": kept.modified}
    return {"accept": accept, "user-agent": "cloche", **{name: value for name, value in known.items() if value}}


def _took_too_long(url: str) -> UpstreamError:
    return UpstreamError(f"{origin(url).host} did not answer within {PAGE_SECONDS:g} s")
