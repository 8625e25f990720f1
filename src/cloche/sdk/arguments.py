"""Callers' arguments, converted to the engine's types and checked."""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from cloche import errors
from cloche.file_content import Chunk, Content
from cloche.input_answers import InputSource
from cloche.model import (
    Limits,
    Mark,
    OnDeadline,
    SandboxSpec,
    SnapshotInfo,
    VolumeInfo,
    check_command_size,
    check_cwd,
    check_environment,
    check_input_line,
    check_user,
)
from cloche.network_policy import REDACTED, NetworkPolicy, Secret, check_pattern_lists

# Callers' arguments for a network and its secrets, converted to a policy.

NetworkLike = NetworkPolicy | Mapping[str, Any] | Literal[False] | None
SecretsLike = Iterable[Secret | Mapping[str, str]] | None

_POLICY_FIELDS = ("allow", "deny", "rules")


def requested_policy(network: NetworkLike, secrets: SecretsLike = None) -> NetworkPolicy | None:
    """The policy that a new sandbox is asked for; None where that is left to the template and the host.

    Raises InvalidRequest, which never has a secret's value in it.
    """
    if network is None:
        if secrets is not None and parse_secrets(secrets):
            raise errors.InvalidRequest(
                "secrets need a network that allows their domains: give it too, like "
                'network={"allow": ["api.example.com"]}'
            )
        return None
    policy = parse_policy(network)
    if secrets is not None:
        return msgspec.structs.replace(policy, secrets=parse_secrets(secrets))
    if any(each.value == REDACTED for each in policy.secrets):
        raise errors.InvalidRequest("the values of a sandbox's secrets are not shown: give them again, with secrets=")
    return policy


def changed_policy(network: NetworkLike, secrets: SecretsLike) -> tuple[NetworkPolicy, bool]:
    """The policy that replaces another, and whether the other's secrets stay. Raises InvalidRequest.

    They stay where none are given, since no caller can read their values to give them again.
    """
    if network is None:
        raise errors.InvalidRequest("a policy is needed: {} or False for no network at all")
    policy = parse_policy(network)
    if secrets is not None:
        return msgspec.structs.replace(policy, secrets=parse_secrets(secrets)), False
    shown = all(each.value == REDACTED for each in policy.secrets)  # none, or those of a policy that was shown
    return (msgspec.structs.replace(policy, secrets=()), True) if shown else (policy, False)


def parse_policy(network: NetworkPolicy | Mapping[str, Any] | Literal[False]) -> NetworkPolicy:
    if isinstance(network, NetworkPolicy):
        return network
    if network is False:
        return NetworkPolicy()
    if not isinstance(network, Mapping):
        raise errors.InvalidRequest(
            f"network must be a mapping like {{'allow': ['pypi.org']}}, False or None, not {network!r:.100}"
        )
    for name in network:
        if name not in _POLICY_FIELDS:
            hint = (
                "these go beside it, as secrets=[...]" if name == "secrets" else f"it has {', '.join(_POLICY_FIELDS)}"
            )
            raise errors.InvalidRequest(f"a network policy has no {name!r}: {hint}")
    check_pattern_lists(network.get("allow"), network.get("deny"))
    try:
        return msgspec.convert(dict(network), NetworkPolicy)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad network policy: {error}") from None


def parse_secrets(secrets: Iterable[Secret | Mapping[str, str]]) -> tuple[Secret, ...]:
    if isinstance(secrets, (str, bytes, Mapping)) or not isinstance(secrets, Iterable):
        raise errors.InvalidRequest("secrets must be a list of mappings, each with domain, value, and header or name")
    return tuple(map(_parse_secret, secrets))


def _parse_secret(given: Secret | Mapping[str, str]) -> Secret:
    if isinstance(given, Secret):
        return given
    if not isinstance(given, Mapping):
        raise errors.InvalidRequest("a secret must be a mapping with domain, value, and header or name")
    known = Secret.__struct_fields__
    for name in given:
        if name not in known:
            raise errors.InvalidRequest(f"a secret has no {name!r:.100}: it has {', '.join(known)}")
    try:
        return msgspec.convert(dict(given), Secret)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad secret: {error}") from None


LimitsLike = Limits | Mapping[str, float] | None
TemplateLike = str | SnapshotInfo
SnapshotLike = str | SnapshotInfo
VolumeLike = str | VolumeInfo
VolumesLike = Mapping[str, VolumeLike] | None
SandboxState = Literal["running", "paused"]

PathLike = str | os.PathLike[str]

LOCAL_OWNER = "local"
_END = object()


def sandbox_spec(
    template: TemplateLike,
    env: Mapping[str, str] | None,
    metadata: Mapping[str, str] | None,
    limits: LimitsLike,
    timeout: float | None,
    network: NetworkLike,
    secrets: SecretsLike,
    on_timeout: OnDeadline = "kill",
    pause_memory: bool = True,
    auto_resume: bool = False,
    volumes: VolumesLike = None,
) -> SandboxSpec:
    """The spec of a new sandbox. Raises InvalidRequest, or TemplateNotFound for an impossible template name."""
    if on_timeout not in get_args(OnDeadline):
        raise errors.InvalidRequest(f"on_timeout must be 'kill' or 'pause', not {on_timeout!r}")
    check_flag("pause_memory", pause_memory)
    check_flag("auto_resume", auto_resume)
    return SandboxSpec(
        template=template_ref(template),
        env=checked_env(env) or {},
        metadata=_parse_metadata(metadata),
        limits=parse_limits(limits),
        lifetime_seconds=timeout,
        network=requested_policy(network, secrets),
        owner=LOCAL_OWNER,
        on_deadline=on_timeout,
        pause_memory=pause_memory,
        auto_resume=auto_resume,
        volumes=_parse_volumes(volumes),
    )


def template_ref(template: TemplateLike) -> str:
    """The name of a template, or the id of a snapshot. Raises InvalidRequest."""
    if isinstance(template, SnapshotInfo):
        return template.id
    if not isinstance(template, str):
        raise errors.InvalidRequest(f"template must be a string or a snapshot, not {type(template).__name__}")
    return template


def snapshot_ref(snapshot: SnapshotLike) -> str:
    """Its id or name. Raises InvalidRequest."""
    ref = snapshot.id if isinstance(snapshot, SnapshotInfo) else snapshot
    if not isinstance(ref, str) or not ref:
        raise errors.InvalidRequest(f"a snapshot is named by its id or name, not {ref!r}")
    return ref


def volume_ref(volume: VolumeLike) -> str:
    """Its id or name. Raises InvalidRequest."""
    ref = volume.id if isinstance(volume, VolumeInfo) else volume
    if not isinstance(ref, str) or not ref:
        raise errors.InvalidRequest(f"a volume is named by its id or name, not {ref!r}")
    return ref


def _parse_volumes(volumes: VolumesLike) -> dict[str, str]:
    """Volumes by path. The engine checks the paths."""
    if volumes is not None and not isinstance(volumes, Mapping):
        raise errors.InvalidRequest(f"volumes must be a mapping of paths to volumes, not {type(volumes).__name__}")
    if not all(isinstance(path, str) for path in volumes or {}):
        raise errors.InvalidRequest("volumes: each is mounted at a path, which is a string")
    return {path: volume_ref(each) for path, each in (volumes or {}).items()}


def check_flag(name: str, value: object) -> None:
    """Raises InvalidRequest unless `value` is a bool: a truthy value such as the string "false" may be meant
    otherwise.
    """
    if not isinstance(value, bool):
        raise errors.InvalidRequest(f"{name} must be True or False, not {value!r}")


def check_state(state: object) -> None:
    """Raises InvalidRequest unless `state` is None or one that sandboxes are listed by."""
    if state is not None and state not in get_args(SandboxState):
        raise errors.InvalidRequest(f"state must be 'running' or 'paused', not {state!r}")


def check_count(count: object) -> None:
    """Raises InvalidRequest unless `count` is an int. The engine checks its range."""
    if type(count) is not int:
        raise errors.InvalidRequest(f"fork needs a whole number of sandboxes, not {count!r}")


def detached_input(input: object, on_event: object, tools: object) -> list[str] | None:
    """The input of a detached run, which has no caller to answer it or to be called. Raises InvalidRequest."""
    if on_event is not None:
        raise errors.InvalidRequest("on_event and detach do not go together: attach to the run to see its events")
    if tools is not None:
        raise errors.InvalidRequest("tools and detach do not go together: a detached run has no client to answer them")
    if input is None or input is False:
        return None
    if isinstance(input, str):
        return input.splitlines()
    if not isinstance(input, (list, tuple)):
        raise errors.InvalidRequest(
            "with detach, input must be text or a list of lines: no client answers a detached run"
        )
    for line in input:
        check_input_line(line)
    return list(input)


def checkpoint_id(mark: Mark | str) -> str:
    """The id of a checkpoint. Raises InvalidRequest for a value that cannot name one."""
    id = mark.id if isinstance(mark, Mark) else mark
    if not isinstance(id, str) or not id:
        raise errors.InvalidRequest(f"expected a checkpoint or its id, not {mark!r}")
    return id


def check_event_number(after: object) -> None:
    """Raises InvalidRequest."""
    if type(after) is not int or after < 0:
        raise errors.InvalidRequest(f"after must be the number of an event, 0 for all of them, not {after!r}")


def writable_path(path: PathLike) -> Path:
    """Raises FileNotFoundError that names the directory which is missing."""
    place = Path(path)
    if not (directory := place.absolute().parent).is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such directory", str(directory))
    return place


def checked_env(env: Mapping[str, str] | None) -> dict[str, str] | None:
    """The environment. Raises InvalidRequest for values that no environment can hold."""
    values = _copy_mapping("env", env)
    check_environment(values)
    return values or None


def run_env(env: Mapping[str, str] | None, cwd: object) -> dict[str, str] | None:
    """The environment of `run` and `stream`. Raises InvalidRequest or InvalidPath before anything is sent."""
    check_cwd(cwd)
    return checked_env(env)


def command_env(
    cmd: str | Sequence[str], user: object, env: Mapping[str, str] | None, cwd: object
) -> dict[str, str] | None:
    """The same for commands. The engine checks the command itself."""
    check_user(user)
    values = run_env(env, cwd)
    words = [cmd] if isinstance(cmd, str) else cmd if isinstance(cmd, Sequence) else []
    check_command_size([word for word in words if isinstance(word, str)], values or {})
    return values


def checked_stdin(stdin: str | bytes | bool | None) -> str | bytes | None:
    if isinstance(stdin, bool):
        raise errors.InvalidRequest("stdin=True needs background=True; else stdin is the text itself")
    return None if stdin is None else encode_stdin(stdin)


def encode_stdin(data: str | bytes) -> bytes:
    """The bytes for a command's stdin. Raises InvalidRequest unless `data` is bytes or text."""
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    if not isinstance(data, str):
        raise errors.InvalidRequest(f"stdin must be bytes or text, not {type(data).__name__}")
    try:
        return data.encode()
    except UnicodeEncodeError:
        raise errors.InvalidRequest("text for stdin must be valid Unicode: give bytes for anything else") from None


def checked_answer(text: str) -> str:
    """The text. Raises InvalidRequest if it cannot be a line of input."""
    check_input_line(text)
    return text


def parse_limits(limits: LimitsLike) -> Limits | None:
    if limits is None or isinstance(limits, Limits):
        return limits
    if not isinstance(limits, Mapping):
        raise errors.InvalidRequest(f"limits must be Limits or a mapping, not {type(limits).__name__}")
    unknown = set(limits) - set(Limits.__struct_fields__)
    if unknown:
        known = ", ".join(Limits.__struct_fields__)
        raise errors.InvalidRequest(f"there is no limit {sorted(unknown)[0]!r}: there are {known}")
    try:
        return msgspec.convert(dict(limits), Limits)
    except msgspec.ValidationError as error:
        raise errors.InvalidRequest(f"bad limits: {error}") from None


def content_in_thread(content: Content) -> Content:
    """Chunks of a caller's iterable are taken in a thread, so that a slow one does not stop the engine."""
    if isinstance(content, (str, bytes, bytearray, memoryview, AsyncIterable)) or not isinstance(content, Iterable):
        return content
    return _chunks_in_thread(iter(content))


def content_from_loop(content: Content) -> Content:
    """The same where the caller has an event loop, on which their async iterable must run."""
    if not isinstance(content, AsyncIterable):
        return content_in_thread(content)
    return _chunks_on_loop(aiter(content), asyncio.get_running_loop())


def input_from_loop(source: InputSource | Callable[[str], Awaitable[str]]) -> InputSource:
    """Answers of a coroutine function come from the caller's own event loop."""
    if not inspect.iscoroutinefunction(source):
        return source
    loop = asyncio.get_running_loop()
    return lambda prompt: asyncio.run_coroutine_threadsafe(source(prompt), loop).result()


async def _chunks_in_thread(chunks: Iterator[Chunk]) -> AsyncIterator[Chunk]:
    while (chunk := await asyncio.to_thread(next, chunks, _END)) is not _END:
        yield chunk  # type: ignore[misc]


async def _chunks_on_loop(chunks: AsyncIterator[Chunk], loop: asyncio.AbstractEventLoop) -> AsyncIterator[Chunk]:
    async def take() -> Chunk | None:
        return await anext(chunks, None)

    while (chunk := await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(take(), loop))) is not None:
        yield chunk


def _copy_mapping(name: str, given: Mapping[str, str] | None) -> dict[str, str]:
    if given is not None and not isinstance(given, Mapping):
        raise errors.InvalidRequest(f"{name} must be a mapping of names to values, not {type(given).__name__}")
    return dict(given or {})


def _parse_metadata(metadata: Mapping[str, str] | None) -> dict[str, str]:
    values = _copy_mapping("metadata", metadata)
    if not all(isinstance(name, str) and isinstance(value, str) for name, value in values.items()):
        raise errors.InvalidRequest("metadata must be strings with string values")
    try:
        "".join([*values, *values.values()]).encode()
    except UnicodeEncodeError:
        raise errors.InvalidRequest("metadata must be valid Unicode") from None
    return values
