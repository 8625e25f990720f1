"""Tool calls: programs in a sandbox call a client's tools. The offer to one program, and its rounds."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import msgspec

from cloche import errors
from cloche.engine.executions.tool_server import RawToolCall, ToolConnection, ToolServer
from cloche.engine.sandboxes.init_client import InitClient
from cloche.events import Signal, ToolsCalled
from cloche.isolation.channel import clean_text
from cloche.json_text import count_json_values
from cloche.model import (
    MAX_TOOL_RESULT_BYTES,
    ToolCall,
    ToolDefinition,
    ToolLanguage,
    ToolResult,
    check_tool_language,
    tools_by_identifier,
)

# Tools as bash functions: one JSON argument; result as JSON on stdout, or message on stderr and status 1.
#
# A call opens a connection by bash's own /dev/tcp, so that it starts no program. A shell cannot hand over
# NUL, which therefore ends each field; nothing needs to be quoted.

MAX_MISSING_NAMED = 10  # of arguments that are missing
SHARED_FUNCTION = "_cloche_call"  # by all of them
# The answer: "PLACE ok|error SIZE", a line feed, so many bytes. A short one is read by the shell, which reads byte by
# byte; else `cat` is worth its start. Everything is guarded against `set -e`, and the shell's own words have a `\` or a
# `builtin` against a program's aliases and functions.
_BODY = r"""{
    \builtin local LC_ALL=C IFS=' ' place verdict size answer='' out=1
    if [[ $# -gt 2 ]]; then
        \builtin printf '%s takes one argument, a JSON object; quote it\n' "$1" >&2
        \builtin return 1
    fi
    {
        if ! \builtin printf '%s\0' TOKEN 0 "$1" "${2-}" >&59 || ! \builtin read -r place verdict size <&59; then
            \builtin printf '%s: the tools are gone: the caller does not answer any more\n' "$1" >&58
            \builtin return 1
        fi
        [[ $verdict == ok ]] || out=58
        if [[ $size -gt 512 ]] && \builtin command cat <&59 >&"$out"; then :; else
            IFS='' \builtin read -r -d '' answer <&59 || :
            \builtin printf '%s' "$answer" >&"$out"
        fi
        [[ $verdict == ok ]] && \builtin return 0
        \builtin return 1
    } 58>&2 2>/dev/null 59<>/dev/tcp/127.0.0.1/PORT ||
        \builtin printf '%s' "${2-}" | \builtin command python3 -c CLIENT "$1"
}"""
# For a bash that was built without /dev/tcp.
_CLIENT = """
import os, socket, sys
given = sys.stdin.buffer.read()
with socket.create_connection(("127.0.0.1", PORT)) as line:
    line.sendall(b"\\0".join((b"TOKEN", b"0", os.fsencode(sys.argv[1]), given, b"")))
    answer = line.makefile("rb").read()
head, _, content = answer.partition(b"\\n")
success = head.split()[1:2] == [b"ok"]
out = sys.stdout if success else sys.stderr
out.buffer.write(content or b"the tools are gone: the caller does not answer any more\\n")
out.flush()
sys.exit(0 if success else 1)
"""


def check_required_arguments(tool: ToolDefinition, given: Mapping[str, Any]) -> None:
    """Raises InvalidRequest if a call lacks required arguments. Python's functions check this themselves."""
    required = tool.parameters.get("required")
    known = required if isinstance(required, list | tuple) else ()
    missing = [each for each in known if isinstance(each, str) and each not in given]
    if missing:
        example = ", ".join(f'"{each}": ..' for each in missing[:MAX_MISSING_NAMED])
        raise errors.InvalidRequest(
            f"{tool.name} needs {{{example}}}: give it one JSON object as its argument. It reads no stdin"
        )


def exported_function_variables(tools: Mapping[str, ToolDefinition], port: int, token: str) -> dict[str, str]:
    """Environment variables that define the functions in every bash that inherits them."""
    return {f"BASH_FUNC_{name}%%": f"() {body}" for name, body in _function_bodies(tools, port, token).items()}


def define_bash_functions(tools: Mapping[str, ToolDefinition], port: int, token: str) -> str:
    """A script that defines the functions, also for the shells that it starts."""
    bodies = _function_bodies(tools, port, token)
    defined = "\n".join(f"{name} () {body}" for name, body in bodies.items())
    return f"{defined}\n\\builtin export -f {' '.join(bodies)}\n"


def _function_bodies(tools: Mapping[str, ToolDefinition], port: int, token: str) -> dict[str, str]:
    """The body of each function. Each tool's own is short: there may be many, and an environment is limited."""
    client = shlex.quote(_CLIENT.replace("PORT", str(port)).replace("TOKEN", token))
    shared = _BODY.replace("CLIENT", client).replace("PORT", str(port)).replace("TOKEN", token)
    own = {name: f'{{ {SHARED_FUNCTION} {shlex.quote(tool.name)} "$@"; }}' for name, tool in tools.items()}
    return {SHARED_FUNCTION: shared, **own}


# Tools as Python functions: the description of a tool that a program gets. See `cloche.guest.kernel.tools`.

MAX_DESCRIPTION = 2000


def describe_tool(identifier: str, tool: ToolDefinition) -> dict[str, Any]:
    """The description of a tool for a program: of its schema only the parts that a signature can express."""
    properties = tool.parameters.get("properties")
    required = tool.parameters.get("required")
    shape: dict[str, Any] = {"required": list(required) if isinstance(required, list | tuple) else []}
    if isinstance(properties, dict):
        shape["properties"] = {str(name): _parameter_type(schema) for name, schema in properties.items()}
    if "additionalProperties" in tool.parameters:
        shape["additionalProperties"] = tool.parameters["additionalProperties"] is not False
    description = tool.description[:MAX_DESCRIPTION]
    return {"identifier": identifier, "name": tool.name, "description": description, "parameters": shape}


def _parameter_type(schema: object) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    several = schema.get("anyOf")
    kinds = [each.get("type") for each in several if isinstance(each, dict)] if isinstance(several, list) else None
    kind = schema.get("type", kinds)
    return {"type": kind} if isinstance(kind, str | list) else {}


MAX_CALLS = 200
MAX_CALLS_TOGETHER = 1000  # calls that one connection announces, most of which would be refused
MAX_CALL_BYTES = 5 << 20
MAX_PROGRAM_BYTES = 40 << 20  # of all that one program says to its tools
MAX_CALL_VALUES = 200_000
MAX_PROGRAM_VALUES = 1_000_000
MAX_UNREAD_BYTES = 64 << 20  # of results that a program was sent, and has not read
MAX_HEADER_BYTES = 1 << 20
MAX_ERROR = 100_000
CHECK_BYTES = 1 << 20  # the room for a program's data is checked each time it has sent so much more

# Calls of a shell come one by one. A round of them is over when nothing of the program runs any more: all wait.
ROUND_QUIET_SECONDS = 0.01
ROUND_CHECK_SECONDS = 0.002
ROUND_LONGEST_SECONDS = 0.5

_RAW_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


class ToolCallRunner(Protocol):
    """Runs the program that gets an offer."""

    def hold_clock(self) -> None:
        """Stops its time limit until `release_clock` was called as often."""

    def release_clock(self) -> None: ...

    def catch_up(self) -> None:
        """Reads the program's output so far."""

    async def is_active(self) -> bool:
        """Whether anything of it runs just now, and does not wait. Raises Gone."""


class SandboxTools:
    """The tools of one sandbox's programs."""

    def __init__(self, guest: InitClient):
        self._door = ToolServer(guest)

    def make_offer(
        self,
        tools: Iterable[ToolDefinition],
        *,
        language: str = "python",
        max_calls: int = MAX_CALLS,
        raw: bool = False,
        no_room: Callable[[], str | None] = lambda: None,
    ) -> ToolOffer:
        """An offer to one program of that language, to be used as `async with`.

        `raw` is for callers that only pass calls on: the values in their inputs are `msgspec.Raw`, which takes
        neither the time nor the memory of objects. `no_room()` returns why the program's calls cannot be taken any
        more, with its `held_bytes` as they are; or None.

        Raises InvalidRequest for a language without tools, for invalid names, and for schemas that are too long.
        """
        return ToolOffer(self._door, tuple(tools), check_tool_language(language), max_calls, raw, no_room)

    def close(self) -> None:
        """The sandbox has ended."""
        self._door.close()


class _PendingCall:
    """A call that waits for its result. Its input stays text: as objects it can be much larger."""

    def __init__(self, id: str, said: RawToolCall, caller: ToolConnection, place: int, alone: bool):
        self.id = id
        self.name, self.content = said
        self.caller = caller
        self.place = place
        self.alone = alone

    def to_tool_call(self, *, raw: bool) -> ToolCall:
        """The call for the client, which owns its input from here on."""
        call = ToolCall(id=self.id, name=self.name, input=_parse_call_input(self.name, self.content, raw=raw))
        self.content = b""
        return call


class ToolOffer:
    """Tools as they are offered to one program, which must be started with `header` and `env`.

    `async with offer: ..`, then `next_round()` and `answer(results)` in turn, or several rounds at once. After
    it, calls fail with a message that the offer is over.
    """

    def __init__(
        self,
        door: ToolServer,
        tools: Sequence[ToolDefinition],
        language: ToolLanguage,
        max_calls: int,
        raw: bool,
        no_room: Callable[[], str | None],
    ):
        self.language = language
        self.tools = tools_by_identifier(tools, language)
        self._by_name = {tool.name: tool for tool in tools}
        self._door = door
        self._token = secrets.token_urlsafe(24)
        self._port = 0
        self._max_calls = max_calls
        self._raw = raw
        self._no_room = no_room
        self._unchecked_bytes = 0
        self._bytes_left = MAX_PROGRAM_BYTES
        self._values_left = MAX_PROGRAM_VALUES
        self._announced = 0  # calls, with any outcome
        self._tried = 0
        self._count = 0  # of those that were made
        self._new: dict[str, _PendingCall] = {}  # not yet reported
        self._out: dict[str, _PendingCall] = {}  # with the client
        self._runner: ToolCallRunner | None = None
        self._holds = False  # the runner's clock
        self._bell = Signal()
        self._is_open = False
        self._check_size()

    async def __aenter__(self) -> ToolOffer:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def open(self) -> None:
        """From now on its program may call. Raises Gone."""
        self._port = await self._door.open()
        self._door.add(self._token, self)
        self._is_open = True

    @property
    def header(self) -> dict[str, Any]:
        """For a script or a kernel: the input of `cloche.guest.kernel.tools.functions`, or a shell's definitions."""
        if self.language == "bash":
            return {
                "define": define_bash_functions(self.tools, self._port, self._token),
                "names": [SHARED_FUNCTION, *self.tools],
            }
        functions = [describe_tool(identifier, tool) for identifier, tool in self.tools.items()]
        return {"port": self._port, "token": self._token, "functions": functions}

    @property
    def env(self) -> dict[str, str]:
        """For a command: with it every bash knows the tools as functions. Empty for Python."""
        return exported_function_variables(self.tools, self._port, self._token) if self.language == "bash" else {}

    def runs(self, runner: ToolCallRunner) -> None:
        """Sets the program. Its clock stops while calls of it are with the client."""
        self._runner = runner
        self._update_clock()

    @property
    def calls(self) -> tuple[str, ...]:
        """The ids of the calls that the client has, and has not answered."""
        return tuple(self._out)

    @property
    def held_bytes(self) -> int:
        """The bytes of calls not yet reported to the client, and of results not yet read by the program."""
        return self._door.held_bytes(self) + sum(len(each.content) for each in self._new.values())

    async def next_round(self) -> tuple[ToolCall, ...]:
        """The calls that wait, once there are some; those that the program makes together come together.

        Empty when the offer is over. May be called while an earlier round is not answered yet.
        """
        while self._is_open:
            if not self._new:
                await self._bell.wait()
                continue
            await self._gather_round()
            if self._new and self._is_open:
                return self._hand_out_calls()
        return ()

    def answer(self, results: Iterable[ToolResult]) -> None:
        """Takes results of calls. A call that the program gave up meanwhile needs none; its result is dropped.

        Raises InvalidRequest, and sends the program nothing, for a call that was never made or is answered twice.
        """
        results = tuple(results)
        self._check_results(results)
        for result in results:
            waiting = self._out.pop(result.call_id, None)
            if waiting is not None:
                self._send_result(waiting, result)
        self._update_clock()

    def close(self) -> None:
        """The program has ended, or gets no more answers. Harmless when it has been called before."""
        if self._is_open:
            self._is_open = False
            self._new.clear()
            self._out.clear()
            self._update_clock()
            self._runner = None  # it knows us: else only the garbage collector would let go of either
            self._door.remove(self._token)
            self._bell.wake_all()

    # -- for the tool server

    def admit(self, size: int) -> str | None:
        self._bytes_left -= size
        self._unchecked_bytes += size
        if self._bytes_left >= 0 and self._unchecked_bytes < CHECK_BYTES:
            return None
        if self._bytes_left >= 0:
            self._unchecked_bytes = 0
            return self._no_room()
        return f"a program can say {MAX_PROGRAM_BYTES} bytes to its tools, and this one has: write less into its calls"

    def expect(self, calls: int) -> str | None:
        if calls > max(MAX_CALLS_TOGETHER, self._max_calls):
            return f"{calls} calls at once are too many: {max(MAX_CALLS_TOGETHER, self._max_calls)} are possible"
        left = self._max_calls - self._announced
        self._announced += calls
        return None if left > 0 else self._call_limit_message()

    def take(self, caller: ToolConnection, said: list[RawToolCall], *, alone: bool) -> None:
        for place, (name, content) in enumerate(said):
            try:
                id = self._register_call(name, content)
            except errors.InvalidRequest as error:
                caller.answer(place, success=False, content=str(error).encode("utf-8", "replace"))
            else:
                self._new[id] = _PendingCall(id, (name, content), caller, place, alone)
        self._bell.wake_all()

    def leave(self, caller: ToolConnection) -> None:
        for calls in (self._new, self._out):
            for id in [id for id, waiting in calls.items() if waiting.caller is caller]:
                del calls[id]
        self._update_clock()

    # -- inside

    def _check_size(self) -> None:
        try:
            size = len(msgspec.json.encode(self.header))
        except (UnicodeEncodeError, TypeError):
            raise errors.InvalidRequest("names, descriptions and parameters of tools must be JSON") from None
        if size > MAX_HEADER_BYTES:
            raise errors.InvalidRequest(
                f"the parameters of the tools have {size} bytes: {MAX_HEADER_BYTES} are possible; shorten their schemas"
            )

    def _register_call(self, name: str, content: bytes) -> str:
        """The id of the call. One that is refused counts, too: it costs no less."""
        self._tried += 1
        if self._tried > self._max_calls:
            raise errors.InvalidRequest(self._call_limit_message())
        if name not in self._by_name:
            raise errors.InvalidRequest(f"there is no tool {clean_text(name, 256)!r}")
        if len(content) > MAX_CALL_BYTES:
            raise errors.InvalidRequest(f"{name} was called with {len(content)} bytes: {MAX_CALL_BYTES} are possible")
        self._charge_values(name, content)
        given = _parse_call_input(name, content, raw=self._raw)
        if self.language == "bash":
            check_required_arguments(self._by_name[name], given)
        self._count += 1
        return f"call_{self._count:03}"

    def _call_limit_message(self) -> str:
        return f"a program can call tools {self._max_calls} times, and this one has"

    def _charge_values(self, name: str, content: bytes) -> None:
        """Counts the values: input that is small as text can be large as objects."""
        count = count_json_values(content, MAX_CALL_VALUES)
        self._values_left -= count
        if count > MAX_CALL_VALUES or self._values_left < 0:
            most = f"{MAX_CALL_VALUES} values, and all calls of a program {MAX_PROGRAM_VALUES}"
            raise errors.InvalidRequest(f"{name} was called with too much: a call can have {most}; put it into a text")

    async def _gather_round(self) -> None:
        """Waits for the rest of a round of calls that come one by one. It affects only the number of rounds."""
        began = quiet_since = time.monotonic()
        seen = len(self._new)
        while self._is_open and self._new and all(waiting.alone for waiting in self._new.values()):
            await asyncio.sleep(ROUND_CHECK_SECONDS)
            stirs = await self._is_program_active()
            now = time.monotonic()
            if stirs or len(self._new) != seen:
                quiet_since, seen = now, len(self._new)
            if now - quiet_since >= ROUND_QUIET_SECONDS or now - began >= ROUND_LONGEST_SECONDS:
                return

    async def _is_program_active(self) -> bool:
        try:
            return self._runner is not None and await self._runner.is_active()
        except errors.ClocheError:  # it has ended, or its sandbox has
            return False

    def _hand_out_calls(self) -> tuple[ToolCall, ...]:
        if self._runner is not None:
            self._runner.catch_up()
        handed, self._new = self._new, {}
        self._out.update(handed)
        self._update_clock()
        return tuple(waiting.to_tool_call(raw=self._raw) for waiting in handed.values())

    def _check_results(self, results: Sequence[ToolResult]) -> None:
        for id, count in Counter(result.call_id for result in results).items():
            if count > 1:
                raise errors.InvalidRequest(f"the call {id!r} has {count} results: give it one")
            if not self._was_call_made(id):
                raise errors.InvalidRequest(f"the program made no call {id!r}")

    def _was_call_made(self, id: str) -> bool:
        number = id.removeprefix("call_")
        if not number.isascii() or not number.isdigit() or len(number) > 9 or id != f"call_{int(number):03}":
            return False
        return 0 < int(number) <= self._count and id not in self._new

    def _send_result(self, waiting: _PendingCall, result: ToolResult) -> None:
        success, content = _encode_result(waiting.name, result)
        unread = self._door.unread_bytes(self)
        if success and unread + len(content) > MAX_UNREAD_BYTES:
            why = f"of the results of this program's calls {unread} bytes are unread: {MAX_UNREAD_BYTES} are possible"
            success, content = False, why.encode()
        waiting.caller.answer(waiting.place, success=success, content=content)

    def _update_clock(self) -> None:
        """The clock is stopped for as long as the client has calls."""
        if self._runner is None or self._holds == bool(self._out):
            return
        self._holds = bool(self._out)
        if self._holds:
            self._runner.hold_clock()
        else:
            self._runner.release_clock()


def tool_call_bytes(call: ToolCall) -> int:
    """The number of bytes of its input."""
    return len(msgspec.json.encode(call.input))


def _parse_call_input(name: str, content: bytes, *, raw: bool) -> dict[str, Any]:
    """Raises InvalidRequest, which the program gets, for an argument that is no JSON object."""
    content = content.strip() or b"{}"
    try:
        if raw:
            content.decode()  # skipped parts are not decoded otherwise
        given = _RAW_DECODER.decode(content) if raw else msgspec.json.decode(content)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"{name} takes one JSON object, such as {{}}: {error}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise errors.InvalidRequest(f"{name} takes one JSON object; the argument is no JSON: {error}") from None
    if not isinstance(given, dict):
        raise errors.InvalidRequest(f"{name} takes one JSON object, such as {{}}, not {type(given).__name__}")
    return given


def _encode_result(name: str, result: ToolResult) -> tuple[bool, bytes]:
    """Whether the call succeeded, and the bytes for the program."""
    if result.error is not None:
        return False, clean_text(result.error, MAX_ERROR).encode() or b"the tool failed"
    try:
        content = msgspec.json.encode(result.result)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        problem = f"the result of {name} is no JSON value: {error}"
    else:
        if len(content) <= MAX_TOOL_RESULT_BYTES:
            return True, content
        problem = f"the result of {name} has {len(content)} bytes: {MAX_TOOL_RESULT_BYTES} are possible"
    return False, problem.encode("utf-8", "replace")


# The rounds of tool calls of one execution, reported in its stream of events.


class ToolRounds:
    """Calls `tell(event)` for each round of calls, from `begin` to `close`. Rounds do not wait for each other."""

    def __init__(self, offer: ToolOffer, tell: Callable[[ToolsCalled], None]):
        self._offer = offer
        self._tell = tell
        self._telling: asyncio.Task[None] | None = None

    async def open(self) -> dict[str, Any]:
        """The header fields for the program's kernel. Empty if the sandbox has ended, which its context reports."""
        try:
            await self._offer.open()
        except errors.Gone:
            return {}
        return {"tools": self._offer.header}

    def begin(self, runner: ToolCallRunner) -> None:
        """The program runs."""
        self._offer.runs(runner)
        self._telling = asyncio.create_task(self._report_rounds())

    def answer(self, results: Iterable[ToolResult]) -> None:
        self._offer.answer(results)

    def close(self) -> None:
        """The program has ended. Harmless when it has been called before."""
        self._offer.close()
        if self._telling is not None:
            self._telling.cancel()

    async def _report_rounds(self) -> None:
        while calls := await self._offer.next_round():
            self._tell(ToolsCalled(calls=calls))
