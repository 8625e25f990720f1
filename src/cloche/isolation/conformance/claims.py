"""The types of conformance: a claim, the sandbox that it is tried in, its neighbour, and constructors of
claims.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, NamedTuple, Protocol

from cloche.linux.syscalls import SYSCALL_NUMBERS
from cloche.model import Limits, Outcome, Struct, User

ClaimKind = Literal["function", "wall"]


class CodeResult(Struct):
    """The result of a piece of code in a context."""

    outcome: Outcome
    stdout: str
    stderr: str
    text: str | None
    error: str | None  # the exception's name


class CommandOutcome(Struct):
    """The result of a command."""

    exit_code: int
    stdout: str
    stderr: str


class ClaimSandbox(Protocol):
    """A sandbox, as far as claims need one."""

    limits: Limits

    async def run(
        self, code: str, *, context: str | None = None, seconds: float = 30.0, interrupt_at: str | None = None
    ) -> CodeResult:
        """Runs code; interrupts it as soon as its output contains `interrupt_at`."""

    async def command(
        self, command: str, *, user: User = "user", stdin: str = "", env: dict[str, str] | None = None
    ) -> CommandOutcome: ...

    async def terminal(self, command: str) -> CommandOutcome:
        """Runs a command in a terminal of 30 rows and 100 columns."""

    async def context(self) -> str:
        """A new context's id."""

    async def read(self, path: str) -> bytes: ...

    async def write(self, path: str, content: bytes) -> None: ...


class HostTraces(NamedTuple):
    """Things on the host that no sandbox may reach."""

    file: str
    port: int
    abstract: str


class ClaimScene(NamedTuple):
    box: ClaimSandbox
    neighbour: ClaimSandbox
    host: HostTraces


Examine = Callable[[ClaimScene], Awaitable[None]]
OpenSandbox = Callable[[Limits], AbstractAsyncContextManager[ClaimSandbox]]


class Claim(NamedTuple):
    """A sentence about sandboxes that is true or not. `limits`: it needs a sandbox of its own, with these."""

    name: str
    kind: ClaimKind
    text: str
    examine: Examine
    limits: Limits | None = None


class ClaimFailed(Exception):
    """A claim does not hold; the message has the observation."""


def expect_that(condition: object, seen: object) -> None:
    """Raises ClaimFailed with the observation `seen` unless `condition` holds."""
    if not condition:
        raise ClaimFailed(f"saw {seen!r}"[:1000])


def prints_claim(name: str, text: str, code: str, expected: str, kind: ClaimKind = "function") -> Claim:
    """The claim that `code`, run in a context, prints `expected` and nothing goes wrong."""

    async def examine(scene: ClaimScene) -> None:
        ran = await scene.box.run(code)
        expect_that(ran.outcome == "ok" and ran.stdout.strip() == expected, ran)

    return Claim(name, kind, text, examine)


CLAIM_USERS: tuple[User, ...] = ("user", "root")
_PRELUDE = """
import ctypes, errno, json, os, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    if libc.syscall(ctypes.c_long(NUMBERS[name]), *words) < 0:
        raise OSError(ctypes.get_errno(), "")
def attempt(work):
    try:
        return f"done: {work()!r}"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
"""


def whole_program(code: str) -> str:
    """A whole program of `code`, which may use the names listed at `refused_claim`; it prints its `answer` as
    JSON.
    """
    return f"NUMBERS = {SYSCALL_NUMBERS[platform.machine()]}{_PRELUDE}{code}\nprint(json.dumps(answer), flush=True)\n"


async def run_python(box: ClaimSandbox, code: str, user: User) -> Any:
    """The value of `answer` after `code`, run by a plain interpreter as `user`."""
    done = await box.command("exec python3 -I -S -", user=user, stdin=whole_program(code))
    expect_that(done.exit_code == 0, done)
    return json.loads(done.stdout.splitlines()[-1])


async def run_attempts(box: ClaimSandbox, tries: dict[str, str], user: User) -> dict[str, str]:
    """The result of each expression: `done: ..`, or the name of the errno it failed with."""
    lines = [f"answer[{label!r}] = attempt(lambda: {expression})" for label, expression in tries.items()]
    found: dict[str, str] = await run_python(box, "\n".join(["answer = {}", *lines]), user)
    return found


def refused_claim(
    name: str, text: str, tries: dict[str, str], answers: Iterable[str], users: tuple[User, ...] = CLAIM_USERS
) -> Claim:
    """The claim that each of these expressions fails with one of these errnos, as `user` and as `root`.

    An expression may use `call("name of a system call", ..)`, `libc`, `os`, `socket`. The errnos are those of a
    refusal: any other would mean that the kernel looked at the request.
    """
    expected = frozenset(answers)

    async def examine(scene: ClaimScene) -> None:
        for user in users:
            found = await run_attempts(scene.box, tries, user)
            expect_that(not {label: seen for label, seen in found.items() if seen not in expected}, (user, found))

    return Claim(name, "wall", text, examine)


def answers_claim(
    name: str, text: str, code: str, verdict: Callable[[Any], object], users: tuple[User, ...] = CLAIM_USERS
) -> Claim:
    """The claim that `verdict` holds for the `answer` of `code`, as `user` and as `root`."""

    async def examine(scene: ClaimScene) -> None:
        for user in users:
            answer = await run_python(scene.box, code, user)
            expect_that(verdict(answer), (user, answer))

    return Claim(name, "wall", text, examine)


def call_expressions(*names: str, arguments: str = "0, 0, 0, 0, 0") -> dict[str, str]:
    """Bare system calls as expressions for `refused_claim`; calls that this machine never had are left out."""
    return {name: f"call({name!r}, {arguments})" for name in names if name in SYSCALL_NUMBERS[platform.machine()]}
