"""A sandbox as OpenSandbox knows it, beside what the engine knows of it."""

from __future__ import annotations

from typing import Literal

from cloche.api.opensandbox.vault_wire import Vault
from cloche.api.tokens import token_of
from cloche.engine.context import Context
from cloche.engine.engine import Engine
from cloche.engine.execution import Execution
from cloche.engine.sandbox import DEFAULT_CONTEXT

Plane = Literal["execd", "egress"]

IDLE_ENTRYPOINT = ("tail", "-f", "/dev/null")


class Known:
    """One sandbox. Those that another dialect made are known too, with everything as by default."""

    def __init__(
        self,
        *,
        image: str = "",
        entrypoint: tuple[str, ...] = IDLE_ENTRYPOINT,
        extensions: dict[str, str] | None = None,
        renew_seconds: int = 0,
    ):
        self.image = image  # empty: its template's name
        self.entrypoint = entrypoint
        self.extensions = extensions or {}
        self.renew_seconds = renew_seconds  # how long it lives, at least, after each use
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
    """All live sandboxes, as OpenSandbox knows them."""

    def __init__(self, engine: Engine, secret: bytes):
        self._engine = engine
        self._secret = secret
        self._known: dict[str, Known] = {}

    def add(self, id: str, known: Known) -> None:
        """A sandbox that was just made by this dialect, or is used by it for the first time."""
        running = {each.id for each in self._engine.list(None)}
        self._known = {each: about for each, about in self._known.items() if each in running} | {id: known}

    def of(self, id: str) -> Known:
        """Of one that is used: what is learnt of it is kept."""
        if id not in self._known:
            self.add(id, Known())
        return self._known[id]

    def about(self, id: str) -> Known:
        """The same, of one that is only looked at."""
        return self._known.get(id) or Known()

    def token(self, id: str, plane: Plane = "execd") -> str:
        """What opens that plane of that sandbox."""
        return token_of(self._secret, f"opensandbox:{plane}", id)
