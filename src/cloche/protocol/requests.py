"""What a client sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, dataclass_transform

import msgspec

from cloche.network_policy import REDACTED, NetworkPolicy, NetworkRule, Secret, check_counts
from cloche.protocol import responses


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of what a client sends. A field that does not exist is refused: it was meant to do something."""


# --- what is asked


class LimitsAsked(Ask):
    """Limits that differ from the template's own."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    open_files: int | None = None
    space_bytes: int | None = None
    output_bytes: int | None = None
    execution_seconds: float | None = None


class RuleAsked(Ask):
    """Allows or denies what matches a pattern such as `pypi.org`, `*.example.com:443` or `192.0.2.0/24`."""

    action: Literal["allow", "deny"]
    host: str


class SecretAsked(Ask):
    """`value` goes into `header` of requests to `domain`, or takes the place of the placeholder of that `name`."""

    domain: str
    value: str
    header: str | None = None
    name: str | None = None

    def __repr__(self) -> str:  # it ends up in tracebacks
        return f"SecretAsked(domain={self.domain!r}, value=...)"


class NetworkAsked(Ask):
    """The first rule that matches decides: `rules`, then `deny`, then `allow`. What none matches is denied."""

    allow: list[str] = []
    deny: list[str] = []
    rules: list[RuleAsked] = []


class SetNetwork(Ask):
    """Replaces the policy. Without `secrets` those that there are stay where their domains are still allowed."""

    allow: list[str] = []
    deny: list[str] = []
    rules: list[RuleAsked] = []
    secrets: list[SecretAsked] | None = None


class CreateSandbox(Ask):
    """`template`: a template's name, or the id or name of a snapshot.

    Without `timeout_seconds` it lives until it is killed, or as long as the server allows. With `on_timeout` "pause" it
    is paused then, with its memory unless `pause_memory` is false. With `auto_resume` whoever uses it while it is
    paused resumes it.

    `volumes`: by a path like /mnt/NAME, the id or name of each.

    Without `network` it may reach what its template says, else what the server gives to all; `{}` is nothing.
    """

    template: str = "python"
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    limits: LimitsAsked | None = None
    timeout_seconds: float | None = None
    network: NetworkAsked | None = None
    secrets: list[SecretAsked] = []
    on_timeout: Literal["kill", "pause"] = "kill"
    pause_memory: bool = True
    auto_resume: bool = False
    volumes: dict[str, str] = {}


class Renew(Ask):
    """Moves the deadline to so many seconds from now."""

    seconds: float


class Pause(Ask):
    """With `memory` its programs stand still; without, they end, and only its files are kept."""

    memory: bool = True


class Resume(Ask):
    """With `timeout_seconds` its deadline is so many seconds from now, also where it runs already."""

    timeout_seconds: float | None = None


class Rollback(Ask):
    """`checkpoint`: the id of one of this context's."""

    checkpoint: str


class ForkContext(Ask):
    """Makes `count` new contexts that have the state of this one."""

    count: int = 1


class MakeSnapshot(Ask):
    """A `name` that another snapshot has is its own from now on."""

    name: str | None = None


class MakeVolume(Ask):
    name: str


class Fork(Ask):
    """So many new sandboxes with its files and environment. By default each lives as long as it was first given."""

    count: int = 1
    timeout_seconds: float | None = None


class CreateContext(Ask):
    language: str = "python"
    cwd: str | None = None


class ToolAsked(Ask):
    """What the program may call. `parameters` is a JSON schema of the object that it is called with."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class Execute(Ask):
    """Code to run. `input`: the lines that `input()` gets; over a WebSocket true means that the client answers.

    `tools` need a WebSocket: the client answers their calls.
    """

    code: str
    context: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_seconds: float | None = None
    input: list[str] | bool | None = None
    argv: list[str] | None = None
    tools: list[ToolAsked] = []


class Detach(Execute):
    """Code that runs whoever leaves: nobody answers it, so that `input` is lines, and there are no `tools`.

    `last`: the sandbox ends when it has ended.
    """

    last: bool = False


class RunCommand(Ask):
    """A command to run to its end: a string is for the shell, a list is a program with its arguments."""

    command: str | list[str]
    user: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_seconds: float | None = None
    stdin: str | None = None
    stdin_base64: bytes | None = None


class Terminal(Ask):
    rows: int
    columns: int


class StartProcess(Ask):
    """A command that goes on when the answer has come. With `terminal` it has one; then stdin is it too."""

    command: str | list[str]
    user: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_seconds: float | None = None
    stdin: bool = False
    terminal: Terminal | None = None
    attached: bool = False  # over a WebSocket: it ends when the client leaves


class Signal(Ask):
    signal: int


class MovePath(Ask):
    path: str
    to: str
    user: str | None = None


class Path(Ask):
    path: str
    user: str | None = None


class PathQuery(Ask):
    path: str
    user: str | None = None


class ReadQuery(Ask):
    """`whole`: a file that is too large to be held at once is refused."""

    path: str
    user: str | None = None
    whole: bool = False


class SandboxQuery(Ask):
    """`running`: one that has ended is an error that says when and why."""

    running: bool = False


class WriteQuery(Ask):
    """`mode` is octal, such as 644."""

    path: str
    user: str | None = None
    mode: str | None = None


class ListQuery(Ask):
    path: str = "."
    depth: int = 1
    user: str | None = None


class WatchQuery(Ask):
    path: str
    recursive: bool = False
    user: str | None = None


class HistoryQuery(Ask):
    """`context`: only what ran in that one."""

    context: str | None = None


class SandboxesQuery(Ask):
    """`all`: those of all owners, for whoever may see them. Without `state`: those that run, and those paused."""

    all: bool = False
    state: Literal["running", "paused"] | None = None


class SnapshotsQuery(Ask):
    """`all`: those of all owners, for whoever may see them. `sandbox`: only those made of that one."""

    all: bool = False
    sandbox: str | None = None


class AttachQuery(Ask):
    """`raw`: output comes as binary messages, byte for byte."""

    raw: bool = False


class RunEventsQuery(Ask):
    """`after`: the number of the last event that was seen; 0 for all."""

    after: int = 0


class LogsQuery(Ask):
    """`sandbox`: only what is about that one."""

    sandbox: str | None = None


# --- what is said over a WebSocket, besides events. A binary message from the client is input for a process.


class Start(Ask, tag="start"):
    """The client is ready: let the program begin."""


class Answer(Ask, tag="answer"):
    """A line for the program's `input()`. Without text, `input()` raises EOFError, which says `problem`."""

    text: str | None
    problem: str = "EOF when reading a line"


class ToolAnswer(Ask, tag="tool_result"):
    """What a call of a tool came to: a JSON value, or, with `error`, why there is none."""

    call_id: str
    result: Any = None
    error: str | None = None


class Interrupt(Ask, tag="interrupt"):
    """Interrupts the program; its events go on to `ended`."""


class Leave(Ask, tag="leave"):
    """Ends the program: interrupts it, and kills it where that does not help. Then the server closes."""


class CloseStdin(Ask, tag="close_stdin"):
    """There is no more input for the process."""


class Kill(Ask, tag="signal"):
    """Signals a process with all that it started."""

    signal: int = 9


class Resize(Ask, tag="resize"):
    """The size of a process's terminal."""

    rows: int
    columns: int


# A network policy as it is asked for and told of, and as the engine has it.


def asked_of(policy: NetworkPolicy) -> NetworkAsked:
    """Without its secrets, which are asked for beside it."""
    rules = [RuleAsked(action=each.action, host=each.host) for each in policy.rules]
    return NetworkAsked(allow=list(policy.allow), deny=list(policy.deny), rules=rules)


def secrets_asked(policy: NetworkPolicy) -> list[SecretAsked]:
    return [SecretAsked(**msgspec.structs.asdict(each)) for each in policy.secrets]


def policy_asked(asked: NetworkAsked | SetNetwork, secrets: Sequence[SecretAsked]) -> NetworkPolicy:
    """Raises InvalidRequest, which never has a secret's value in it."""
    check_counts(len(asked.allow) + len(asked.deny) + len(asked.rules), len(secrets))
    return NetworkPolicy(
        allow=tuple(asked.allow),
        deny=tuple(asked.deny),
        rules=tuple(NetworkRule(action=each.action, host=each.host) for each in asked.rules),
        secrets=tuple(Secret(**msgspec.structs.asdict(each)) for each in secrets),
    )


def info_of(policy: NetworkPolicy) -> responses.NetworkInfo:
    secrets = [responses.SecretInfo(domain=each.domain, header=each.header, name=each.name) for each in policy.secrets]
    return responses.NetworkInfo(
        allow=list(policy.allow), deny=list(policy.deny), rules=list(policy.rules), secrets=secrets
    )


def policy_told(info: responses.NetworkInfo) -> NetworkPolicy:
    """What is told of a policy, with something in the place of the values. Raises InvalidRequest for what is none."""
    secrets = (Secret(**msgspec.structs.asdict(each), value=REDACTED) for each in info.secrets)
    return NetworkPolicy(
        allow=tuple(info.allow), deny=tuple(info.deny), rules=tuple(info.rules), secrets=tuple(secrets)
    )
