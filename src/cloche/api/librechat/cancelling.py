"""Requests that their client may cancel: it names them in a header, and says later that it wants no answer any more.

It says so on another connection. That may come before the request itself, and mostly comes just after the request's own
connection has ended: so both are remembered for a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator

from starlette.requests import ClientDisconnect

from cloche.api.librechat.identity import Caller
from cloche.api.librechat.replies import Refusal

HEADER = "x-librechat-code-request-id"
MAX_REMEMBERED_OF_USER = 100  # beyond those that are being answered
MAX_REMEMBERED_OF_KEY = 1000  # which may stand for many users
MAX_REMEMBERED = 10_000
REMEMBERED_SECONDS = 60.0
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Cancellable:
    """A request. Whoever answers it says what there is to end."""

    def __init__(self, is_cancelled: bool = False) -> None:
        self.is_cancelled = is_cancelled
        self.is_here = False  # not yet, or no more: its client may send it again
        self._end: Callable[[], None] | None = None

    def ends(self, end: Callable[[], None]) -> None:
        """`end()` is called when the request is cancelled, or now, if it was."""
        self._end = end
        if self.is_cancelled:
            end()

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._end is not None:
            self._end()


class Cancelling:
    """The requests that are being answered, those whose clients have left, and those that were cancelled too early."""

    def __init__(self) -> None:
        self._requests: dict[tuple[Caller, str], Cancellable] = {}
        self._remembered: Counter[Caller] = Counter()  # how many are forgotten later
        self._remembered_in_all = 0

    def cancel(self, caller: Caller, id: object) -> None:
        """Raises Refusal (400)."""
        if not isinstance(id, str) or not _ID.fullmatch(id):
            raise Refusal(400, "Invalid or missing request_id")
        request = self._requests.get((caller, id))
        if request is not None:
            request.cancel()
        else:
            self._requests[caller, id] = Cancellable(is_cancelled=True)
            self._forget_later((caller, id))

    @contextlib.contextmanager
    def cancellable(self, caller: Caller, id: str | None) -> Iterator[Cancellable]:
        """A request, until it is answered. Raises Refusal (400, 409)."""
        if id is None:
            yield Cancellable()
            return
        request = self._requests[caller, id] = self._new(caller, id)
        request.is_here = True
        try:
            yield request
        except (ClientDisconnect, asyncio.CancelledError):
            request.is_here = False
            self._forget_later((caller, id))
            raise
        except BaseException:
            self._forget((caller, id), request)
            raise
        self._forget((caller, id), request)

    def _new(self, caller: Caller, id: str) -> Cancellable:
        if not _ID.fullmatch(id):
            raise Refusal(400, "Invalid programmatic request ID")
        before = self._requests.get((caller, id))
        if before is not None and before.is_here:
            raise Refusal(409, "Programmatic request ID is already in use")
        return Cancellable(is_cancelled=before is not None and before.is_cancelled)

    def _forget_later(self, key: tuple[Caller, str]) -> None:
        """Or at once, if so many are remembered of this caller that it would be at others' expense."""
        caller, request = key[0], self._requests[key]
        most = MAX_REMEMBERED_OF_USER if caller.user else MAX_REMEMBERED_OF_KEY
        if self._remembered[caller] >= most or self._remembered_in_all >= MAX_REMEMBERED:
            self._forget(key, request)
            return
        self._remembered[caller] += 1
        self._remembered_in_all += 1
        asyncio.get_running_loop().call_later(REMEMBERED_SECONDS, self._let_go, key, request)

    def _let_go(self, key: tuple[Caller, str], request: Cancellable) -> None:
        self._remembered_in_all -= 1
        self._remembered[key[0]] -= 1
        if not self._remembered[key[0]]:
            del self._remembered[key[0]]
        self._forget(key, request)

    def _forget(self, key: tuple[Caller, str], request: Cancellable) -> None:
        if self._requests.get(key) is request:
            del self._requests[key]
