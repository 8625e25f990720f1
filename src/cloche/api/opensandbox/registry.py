"""A sandbox as OpenSandbox knows it, beside what the engine knows of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from cloche.api.auth import token_of
from cloche.api.opensandbox.credentials_schema import Vault
from cloche.engine.engine import Engine
from cloche.engine.executions.context import Context
from cloche.engine.executions.execution import Execution
from cloche.engine.sandboxes.sandbox import DEFAULT_CONTEXT
from cloche.model import Struct

Plane = Literal["execd", "egress"]

IDLE_ENTRYPOINT = ("tail", "-f", "/dev/null")
NOTE = "opensandbox"


class Asked(Struct):
    """What was said when it was made, kept with it through pauses and restarts."""

    image: str = ""  # empty: its template's name
    snapshot: str = ""  # of which it was made, instead of an image
    entrypoint: tuple[str, ...] = IDLE_ENTRYPOINT
    extensions: dict[str, str] = {}
    renew_seconds: int = 0  # how long it lives, at least, after each use

    @property
    def notes(self) -> dict[str, str]:
        return {NOTE: msgspec.json.encode(self).decode()}


def asked_of(notes: Mapping[str, str]) -> Asked:
    """Of a sandbox that another dialect made: everything as by default."""
    return msgspec.json.decode(notes[NOTE], type=Asked) if NOTE in notes else Asked()


class Known:
    """One sandbox, while it lives here."""

    def __init__(self) -> None:
        self.vault: Vault | None = None
        self._used: set[str] = set()  # default contexts
        self._waiting: dict[Execution, Context] = {}
        self._interrupted: set[Execution] = set()

    # -- contexts: default ones are there when they are first used, as in execd

    def use(self, context: Context) -> None:
        self._used.add(context.id)

    def lists(self, context: Context) -> bool:
        return context.id in self._used or not context.id.startswith(DEFAULT_CONTEXT)

    def forget(self, context: Context) -> None:
        self._used.discard(context.id)

    # -- interrupts: one that comes while a program waits for its kernel is kept for it

    def wait(self, execution: Execution, context: Context) -> None:
        self._waiting[execution] = context

    def begin(self, execution: Execution) -> None:
        """It has its kernel."""
        if execution in self._interrupted:
            execution.interrupt()
        self.leave(execution)

    def leave(self, execution: Execution) -> None:
        self._waiting.pop(execution, None)
        self._interrupted.discard(execution)

    def interrupt(self, context: Context) -> None:
        """What runs there; where nothing runs yet, what is about to."""
        if not context.interrupt():
            self._interrupted.update(each for each, where in self._waiting.items() if where is context)


class KnownSandboxes:
    """All live sandboxes, also paused ones, as OpenSandbox knows them."""

    def __init__(self, engine: Engine, secret: bytes):
        self._engine = engine
        self._secret = secret
        self._known: dict[str, Known] = {}

    def of(self, id: str) -> Known:
        """Of one that is used: what is learnt of it is kept."""
        if id not in self._known:
            living = {each.id for each in self._engine.list(None)}
            self._known = {each: about for each, about in self._known.items() if each in living} | {id: Known()}
        return self._known[id]

    def token(self, id: str, plane: Plane = "execd") -> str:
        """What opens that plane of that sandbox."""
        return token_of(self._secret, f"opensandbox:{plane}", id)
