"""Requests of a client: bodies, queries, and its WebSocket messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, dataclass_transform

import msgspec

from cloche.network_policy import REDACTED, NetworkPolicy, NetworkRule, Secret, check_policy_size
from cloche.protocol import responses


@dataclass_transform(frozen_default=True, kw_only_default=True)  # for mypy
class ApiRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the client's messages. Unknown fields are refused: they were meant to have an effect."""


# --- requests


class LimitsRequest(ApiRequest):
    """Limits that differ from the template's own."""

    memory_bytes: int | None = None
    cpus: float | None = None
    processes: int | None = None
    open_files: int | None = None
    space_bytes: int | None = None
    output_bytes: int | None = None
    execution_seconds: float | None = None


class NetworkRuleRequest(ApiRequest):
    """Allows or denies hosts that match a pattern such as `pypi.org`, `*.example.com:443` or `192.0.2.0/24`."""

    action: Literal["allow", "deny"]
    host: str


class SecretRequest(ApiRequest):
    """`value` goes into `header` of requests to `domain`, or takes the place of the placeholder of that `name`."""

    domain: str
    value: str
    header: str | None = None
    name: str | None = None

    def __repr__(self) -> str:  # it ends up in tracebacks
        return f"SecretRequest(domain={self.domain!r}, value=...)"


class NetworkRequest(ApiRequest):
    """The first matching rule decides: `rules`, then `deny`, then `allow`. Without a match access is denied."""

    allow: list[str] = []
    deny: list[str] = []
    rules: list[NetworkRuleRequest] = []


class SetNetworkRequest(ApiRequest):
    """Replaces the policy. Without `secrets` the present ones stay where their domains are still allowed."""

    allow: list[str] = []
    deny: list[str] = []
    rules: list[NetworkRuleRequest] = []
    secrets: list[SecretRequest] | None = None


class CreateSandbox(ApiRequest):
    """`template`: a template's name, or the id or name of a snapshot.

    Without `timeout_seconds` it lives until it is killed, or as long as the server allows. With `on_timeout`
    "pause" it is paused then, with its memory unless `pause_memory` is false. With `auto_resume` any use while it
    is paused resumes it.

    `volumes`: by a path like /mnt/NAME, the id or name of each.

    Without `network` it may reach the hosts of its template's policy, else of the server's default; `{}` is
    nothing.
    """

    template: str = "python"
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    limits: LimitsRequest | None = None
    timeout_seconds: float | None = None
    network: NetworkRequest | None = None
    secrets: list[SecretRequest] = []
    on_timeout: Literal["kill", "pause"] = "kill"
    pause_memory: bool = True
    auto_resume: bool = False
    volumes: dict[str, str] = {}


class RenewRequest(ApiRequest):
    """Moves the deadline to so many seconds from now."""

    seconds: float


class PauseRequest(ApiRequest):
    """With `memory` its programs stand still; without, they end, and only its files are kept."""

    memory: bool = True


class ResumeRequest(ApiRequest):
    """With `timeout_seconds` its deadline is so many seconds from now, also where it runs already."""

    timeout_seconds: float | None = None


class RollbackRequest(ApiRequest):
    """`checkpoint`: the id of one of this context's."""

    checkpoint: str


class ForkContextRequest(ApiRequest):
    """Makes `count` new contexts that have the state of this one."""

    count: int = 1


class MakeSnapshotRequest(ApiRequest):
    """Takes a snapshot. A `name` in use moves from the other snapshot to this one."""

    name: str | None = None


class MakeVolumeRequest(ApiRequest):
    name: str


class ForkSandboxRequest(ApiRequest):
    """So many new sandboxes with its files and environment. By default each lives as long as it was first given."""

    count: int = 1
    timeout_seconds: float | None = None


class CreateContextRequest(ApiRequest):
    language: str = "python"
    cwd: str | None = None


class CodeQuestionRequest(ApiRequest):
    """A question about code, of which nothing runs. `cursor` counts characters; by default it is at the end."""

    code: str
    cursor: int | None = None
    detail: bool = False


class ToolRequest(ApiRequest):
    """A tool that the program may call. `parameters` is a JSON schema of its argument object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ExecuteRequest(ApiRequest):
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
    tools: list[ToolRequest] = []


class DetachRequest(ExecuteRequest):
    """Code that runs without its client: `input` is a list of lines, and there are no `tools`.

    `last`: the sandbox ends when it has ended.
    """

    last: bool = False


class RunCommandRequest(ApiRequest):
    """A command to run to its end: a string is for the shell, a list is a program with its arguments."""

    command: str | list[str]
    user: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_seconds: float | None = None
    stdin: str | None = None
    stdin_base64: bytes | None = None


class TerminalSize(ApiRequest):
    rows: int
    columns: int


class StartProcessRequest(ApiRequest):
    """A command that goes on after the response. With `terminal` it has one; then stdin is it too."""

    command: str | list[str]
    user: str | None = None
    env: dict[str, str] = {}
    cwd: str | None = None
    timeout_seconds: float | None = None
    stdin: bool = False
    terminal: TerminalSize | None = None
    attached: bool = False  # over a WebSocket: it ends when the client leaves


class SignalRequest(ApiRequest):
    signal: int


class MovePathRequest(ApiRequest):
    path: str
    to: str
    user: str | None = None


class FilePathRequest(ApiRequest):
    path: str
    user: str | None = None


class PathQuery(ApiRequest):
    path: str
    user: str | None = None


class ReadQuery(ApiRequest):
    """`whole`: a file that is too large to be held at once is refused."""

    path: str
    user: str | None = None
    whole: bool = False


class SandboxQuery(ApiRequest):
    """`running`: a sandbox that has ended is an error with the time and the reason."""

    running: bool = False


class WriteQuery(ApiRequest):
    """`mode` is octal, such as 644."""

    path: str
    user: str | None = None
    mode: str | None = None


class ListQuery(ApiRequest):
    path: str = "."
    depth: int = 1
    user: str | None = None


class WatchQuery(ApiRequest):
    path: str
    recursive: bool = False
    user: str | None = None


class HistoryQuery(ApiRequest):
    """`context`: only the cells of that context."""

    context: str | None = None


class SandboxesQuery(ApiRequest):
    """`all`: of all owners, for operators. Without `state`: the running and the paused ones."""

    all: bool = False
    state: Literal["running", "paused"] | None = None


class SnapshotsQuery(ApiRequest):
    """`all`: of all owners, for operators. `sandbox`: only snapshots of that sandbox."""

    all: bool = False
    sandbox: str | None = None


class AttachQuery(ApiRequest):
    """`raw`: output comes as binary messages, byte for byte."""

    raw: bool = False


class RunEventsQuery(ApiRequest):
    """`after`: the number of the last event that was seen; 0 for all."""

    after: int = 0


class LogsQuery(ApiRequest):
    """`sandbox`: only entries about that sandbox."""

    sandbox: str | None = None


# --- what is said over a WebSocket, besides events. A binary message from the client is input for a process.


class StartExecutionRequest(ApiRequest, tag="start"):
    """The client is ready: let the program begin."""


class InputAnswerRequest(ApiRequest, tag="answer"):
    """A line for the program's `input()`. Without text, `input()` raises EOFError with the message `problem`."""

    text: str | None
    problem: str = "EOF when reading a line"


class ToolAnswerRequest(ApiRequest, tag="tool_result"):
    """The result of a tool call: a JSON value, or, with `error`, the reason why there is none."""

    call_id: str
    result: Any = None
    error: str | None = None


class InterruptRequest(ApiRequest, tag="interrupt"):
    """Interrupts the program; its events go on to `ended`."""


class LeaveRequest(ApiRequest, tag="leave"):
    """Ends the program: interrupts it, and kills it where that does not help. Then the server closes."""


class CloseStdinRequest(ApiRequest, tag="close_stdin"):
    """There is no more input for the process."""


class KillRequest(ApiRequest, tag="signal"):
    """Signals a process with all that it started."""

    signal: int = 9


class ResizeRequest(ApiRequest, tag="resize"):
    """The size of a process's terminal."""

    rows: int
    columns: int


# Network policies: conversion between requests, responses and the engine's value.


def policy_to_request(policy: NetworkPolicy) -> NetworkRequest:
    """The request for the policy, without its secrets, which are sent beside it."""
    rules = [NetworkRuleRequest(action=each.action, host=each.host) for each in policy.rules]
    return NetworkRequest(allow=list(policy.allow), deny=list(policy.deny), rules=rules)


def secrets_to_requests(policy: NetworkPolicy) -> list[SecretRequest]:
    return [SecretRequest(**msgspec.structs.asdict(each)) for each in policy.secrets]


def request_to_policy(request: NetworkRequest | SetNetworkRequest, secrets: Sequence[SecretRequest]) -> NetworkPolicy:
    """The policy of a request. Raises InvalidRequest, which never contains a secret's value."""
    check_policy_size(len(request.allow) + len(request.deny) + len(request.rules), len(secrets))
    return NetworkPolicy(
        allow=tuple(request.allow),
        deny=tuple(request.deny),
        rules=tuple(NetworkRule(action=each.action, host=each.host) for each in request.rules),
        secrets=tuple(Secret(**msgspec.structs.asdict(each)) for each in secrets),
    )


def policy_to_info(policy: NetworkPolicy) -> responses.NetworkInfo:
    secrets = [responses.SecretInfo(domain=each.domain, header=each.header, name=each.name) for each in policy.secrets]
    return responses.NetworkInfo(
        allow=list(policy.allow), deny=list(policy.deny), rules=list(policy.rules), secrets=secrets
    )


def info_to_policy(info: responses.NetworkInfo) -> NetworkPolicy:
    """The policy of a response, with a placeholder for secret values. Raises InvalidRequest for an invalid one."""
    secrets = (Secret(**msgspec.structs.asdict(each), value=REDACTED) for each in info.secrets)
    return NetworkPolicy(
        allow=tuple(info.allow), deny=tuple(info.deny), rules=tuple(info.rules), secrets=tuple(secrets)
    )
