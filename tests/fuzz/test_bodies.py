"""Every decoder of every dialect: whatever a client sends, it is understood or refused, in words of bounded length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.fuzz.mutations import EXAMPLES, Claim, bodies, holds, only_our_errors

from cloche.api import admin
from cloche.api.e2b import (
    code,
    connect,
    envd,
    filesystem,
    network_schema,
    process,
    sandboxes_schema,
    snapshots,
    templates_schema,
    volumes,
)
from cloche.api.librechat import request
from cloche.api.librechat import request as librechat
from cloche.api.native import context
from cloche.api.openai import chat_request, containers, conversations, responses_request
from cloche.api.opensandbox import code as execd_code
from cloche.api.opensandbox import commands as execd_commands
from cloche.api.opensandbox import credentials_schema, lifecycle_schema
from cloche.api.opensandbox import files as execd_files
from cloche.api.opensandbox import network_schema as opensandbox_network
from cloche.gateway.upstream import http
from cloche.protocol import requests, responses

NETWORK = {"allowOut": ["pypi.org", "1.1.1.1/32"], "denyOut": ["0.0.0.0/0"], "allowPublicTraffic": True}
LIMITS = {"memory_bytes": 1 << 28, "cpus": 1.5, "processes": 64}
POLICY: dict[str, Any] = {
    "allow": ["pypi.org"],
    "deny": ["*.evil.test"],
    "rules": [{"action": "deny", "host": "a.test"}],
}
TOOL = {"name": "add", "description": "Adds", "parameters": {"type": "object", "properties": {"x": {}}}}
MESSAGE = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def of(kind: Any) -> Callable[[bytes], object]:
    return lambda body: context.decode_client_message(body or b"{}", kind)


def connected(kind: Any) -> Callable[[bytes], object]:
    return lambda body: connect.decode_message(kind, body)


def e2b_sandbox(body: bytes) -> object:
    return sandboxes_schema.decode_json_body(body, sandboxes_schema.E2bCreateBody)


def programmatic(body: bytes) -> object:
    given = librechat.decode_object(body)
    if "tool_results" in given:
        return request.decode_results(given["tool_results"])
    return request.decode_program(given, 64)


NATIVE = {
    requests.CreateSandbox: {
        "template": "python",
        "env": {"A": "b"},
        "metadata": {"k": "v"},
        "limits": LIMITS,
        "timeout_seconds": 60,
        "network": POLICY,
        "volumes": {"/mnt/v": "name"},
    },
    requests.ExecuteRequest: {"code": "1+1", "context": "default", "env": {"A": "b"}, "cwd": "/tmp", "tools": [TOOL]},
    requests.DetachRequest: {"code": "1+1", "timeout_seconds": 5, "input": ["a"]},
    requests.RunCommandRequest: {"command": ["ls", "-l"], "user": "root", "env": {}, "cwd": "/", "stdin": "x"},
    requests.StartProcessRequest: {"command": "ls", "terminal": {"rows": 24, "columns": 80}},
    requests.SetNetworkRequest: {**POLICY, "secrets": [{"domain": "pypi.org", "header": "X", "value": "y"}]},
    requests.ForkSandboxRequest: {"count": 2, "timeout_seconds": 3},
    requests.RenewRequest: {"seconds": 5},
    requests.SignalRequest: {"signal": 9},
    requests.MovePathRequest: {"path": "/a", "to": "/b"},
    requests.RollbackRequest: {"checkpoint": "c1"},
    requests.MakeSnapshotRequest: {"name": "a/b:c"},
    requests.MakeVolumeRequest: {"name": "v"},
}
E2B_PROCESS = {"cmd": "/bin/bash", "args": ["-l", "-c", "ls"], "envs": {"A": "b"}, "cwd": "/home"}
CONNECT = {
    process.EnvdStartRequest: {"process": E2B_PROCESS, "pty": {"size": {"cols": 80, "rows": 24}}, "stdin": True},
    process.EnvdSendInputRequest: {"process": {"pid": 5}, "input": {"stdin": "aGk="}},
    process.EnvdSendSignalRequest: {"process": {"pid": 5, "tag": "t"}, "signal": "SIGNAL_SIGKILL"},
    process.EnvdStreamInputRequest: {"start": {"process": {"pid": 1}}, "data": {"input": {"pty": "aGk="}}},
    process.EnvdUpdateRequest: {"process": {"pid": 1}, "pty": {"size": {"cols": 1, "rows": 2}}},
    filesystem.EnvdListDirRequest: {"path": "/home", "depth": 2},
    filesystem.EnvdMoveRequest: {"source": "/a", "destination": "/b"},
    filesystem.EnvdWatchRequest: {"path": "/home", "recursive": True},
}
E2B = {
    "new sandbox": (
        e2b_sandbox,
        {"templateID": "base", "timeout": 15, "metadata": {"a": "b"}, "envVars": {"X": "y"}, "network": NETWORK},
    ),
    "network": (lambda body: sandboxes_schema.decode_json_body(body, network_schema.E2bNetworkBody), NETWORK),
    "timeout": (lambda body: sandboxes_schema.decode_json_body(body, sandboxes_schema.SetTimeoutBody), {"timeout": 5}),
    "connection": (
        lambda body: sandboxes_schema.decode_json_body(body, sandboxes_schema.ConnectSandboxBody),
        {"timeout": 5},
    ),
    "fork": (lambda body: sandboxes_schema.decode_json_body(body, sandboxes_schema.ForkSandboxBody), {"count": 2}),
    "build": (templates_schema.decode_build_request, {"name": "a:b", "tags": ["v1"], "cpuCount": 2, "memoryMB": 512}),
    "build plan": (
        templates_schema.decode_build_plan,
        {
            "fromTemplate": "base",
            "steps": [{"type": "RUN", "args": ["ls", "root"]}, {"type": "ENV", "args": ["A", "b"]}],
            "startCmd": "sleep 1",
            "readyCmd": "true",
            "force": False,
        },
    ),
    "tags": (templates_schema.decode_tag_request, {"target": "a:v1", "tags": ["v2"]}),
    "no tags": (templates_schema.decode_untag_request, {"name": "a", "tags": ["v2"]}),
    "snapshot": (snapshots.decode_snapshot_name, {"name": "s"}),
    "volume": (volumes.decode_volume_name, {"name": "v"}),
    "volume's file": (volumes.decode_metadata_change, {"uid": 0, "gid": 0, "mode": 420}),
    "files' composition": (
        envd.decode_compose_request,
        {"source_paths": ["/a", "/b"], "destination": "/c", "username": "user"},
    ),
    "execution": (
        code.decode_execute_request,
        {"code": "1", "context_id": "c", "language": None, "env_vars": {"A": "b"}},
    ),
    "context": (execd_code.decode_context_request, {"language": "python", "cwd": "/tmp"}),
}
OPENAI = {
    "response": (
        responses_request.decode_response,
        {
            "model": "cloche/echo",
            "input": [MESSAGE],
            "tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-1"]}}],
            "previous_response_id": None,
            "include": ["code_interpreter_call.outputs"],
            "metadata": {"a": "b"},
            "stream": True,
        },
    ),
    "chat": (
        chat_request.decode_chat,
        {
            "model": "m",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
                {"role": "tool", "tool_call_id": "c", "content": "1"},
            ],
            "tools": [FUNCTION],
            "stream_options": {"include_usage": True},
        },
    ),
    "container": (
        lambda body: containers.decode_container(body, 60),
        {
            "name": "c",
            "expires_after": {"anchor": "last_active_at", "minutes": 5},
            "file_ids": ["file-1"],
            "memory_limit": "1g",
            "network_policy": {"type": "allowlist", "allowed_domains": ["a.test"]},
        },
    ),
    "conversation": (conversations.decode_conversation, {"items": [MESSAGE], "metadata": {"a": "b"}}),
}
OPENSANDBOX_POLICY = {"defaultAction": "deny", "egress": [{"action": "allow", "target": "a.test"}]}
OPENSANDBOX = {
    "sandbox": (
        lifecycle_schema.decode_create_request,
        {
            "image": {"uri": "python:3.12"},
            "timeout": 60,
            "resourceLimits": {"cpu": "500m", "memory": "512Mi"},
            "env": {"A": "b"},
            "metadata": {"k": "v"},
            "entrypoint": ["sleep", "infinity"],
            "networkPolicy": OPENSANDBOX_POLICY,
            "extensions": {"access.renew.extend.seconds": "600"},
        },
    ),
    "volumes": (
        lifecycle_schema.decode_create_request,
        {
            "image": {"uri": "python:3.12"},
            "volumes": [{"mountPath": "/mnt/v", "pvc": {"claimName": "v"}, "subPath": "a/b", "readOnly": True}],
        },
    ),
    "metadata": (lifecycle_schema.decode_metadata_patch, {"a": "1", "b": None}),
    "command": (
        lambda body: lifecycle_schema.decode_json_body(body, execd_commands.ExecdCommandBody).words,
        {"command": "id", "cwd": "/tmp", "timeout": 5, "uid": 0, "gid": 0, "envs": {"A": "1"}, "background": False},
    ),
    "modes": (
        lambda body: [
            execd_files.decode_mode(each.mode)
            for each in lifecycle_schema.decode_json_body(body, dict[str, execd_files.PermissionBody]).values()
        ],
        {"/tmp/d": {"mode": 755, "owner": "user", "group": "user"}},
    ),
    "renewal": (lifecycle_schema.decode_expiration, {"expiresAt": "2026-01-31T12:00:00Z"}),
    "policy": (
        lambda body: opensandbox_network.policy_from_body(
            lifecycle_schema.decode_json_body(body, opensandbox_network.OpenSandboxNetworkBody)
        ),
        OPENSANDBOX_POLICY,
    ),
    "vault": (
        lambda body: lifecycle_schema.decode_json_body(body, credentials_schema.CreateVaultBody),
        {"credentials": [{"name": "a", "source": {"type": "inline", "value": "x"}}], "bindings": []},
    ),
    "code": (execd_code.decode_code_request, {"code": "1", "context": {"id": "c", "language": "python"}}),
    "context": (execd_code.decode_context_request, {"language": "python", "cwd": "/tmp"}),
}
LIBRECHAT_FILE = {"id": "a" * 21, "storage_session_id": "b" * 21, "name": "x.csv", "kind": "user", "resource_id": "u"}
LIBRECHAT = {
    "exec": (
        librechat.decode_exec,
        {"lang": "py", "code": "1", "args": ["a"], "files": [LIBRECHAT_FILE], "user_id": "u"},
    ),
    "programmatic": (
        programmatic,
        {"code": "await f(x=1)", "tools": [TOOL], "session_id": "b" * 21, "timeout": 1000, "files": [LIBRECHAT_FILE]},
    ),
    "results": (
        programmatic,
        {"continuation_token": "t", "tool_results": [{"call_id": "call_001", "result": 1, "is_error": False}]},
    ),
}
OTHERS = {
    "admin's key": (
        lambda body: admin.decode_key_request(body, admin.NewKeyRequest),
        {"owner": "ann", "role": "user", "name": "n"},
    ),
    "admin's quota": (admin.decode_quota_override, {}),
    "told event": (responses.decode_event, {"type": "output", "stream": "stdout", "text": "hi"}),
    "told run": (
        responses.decode_run,
        {
            "id": "x",
            "results": [{"data": {"text/plain": "1"}, "is_main_result": True}],
            "stdout": "",
            "stderr": "",
            "error": None,
            "outcome": "ok",
            "usage": {},
        },
    ),
    "told error": (
        lambda body: responses.exception_from_response(body, 404),
        {"error": {"code": "sandbox_not_found", "message": "m", "request_id": "r"}},
    ),
    "upstream's answer": (http.parse_json_object, {"id": "x", "output": []}),
    "upstream's error": (http.parse_error, {"error": {"message": "m", "code": 5}}),
}


def _claims() -> list[Claim]:
    found = [Claim(f"native {kind.__name__}", of(kind), bodies(right)) for kind, right in NATIVE.items()]
    found += [Claim(f"connect {kind.__name__}", connected(kind), bodies(right)) for kind, right in CONNECT.items()]
    groups = {"e2b": E2B, "openai": OPENAI, "opensandbox": OPENSANDBOX, "librechat": LIBRECHAT, "other": OTHERS}
    for dialect, table in groups.items():
        found += [Claim(f"{dialect} {name}", decode, bodies(right)) for name, (decode, right) in table.items()]
    return found


CLAIMS = _claims()


@EXAMPLES
@pytest.mark.parametrize("claim", CLAIMS, ids=[claim.name for claim in CLAIMS])
def test_a_body_is_understood_or_refused(claim: Claim, examples: int) -> None:
    holds(lambda body: only_our_errors(claim.decode, body), claim.inputs, examples)


@pytest.mark.parametrize("kind", NATIVE, ids=[kind.__name__ for kind in NATIVE])
def test_valid_bodies_are_decoded_and_encoded_alike(kind: Any) -> None:
    """Otherwise the examples would be refused for something else than what was changed in them."""
    asked = context.decode_client_message(msgspec.json.encode(NATIVE[kind]), kind)
    assert context.decode_client_message(msgspec.json.encode(asked), kind) == asked


@pytest.mark.parametrize("name", [claim.name for claim in CLAIMS if not claim.name.startswith("native")])
def test_the_examples_of_other_dialects_are_right(name: str) -> None:
    tables = {"e2b": E2B, "openai": OPENAI, "opensandbox": OPENSANDBOX, "librechat": LIBRECHAT, "other": OTHERS}
    dialect, _, rest = name.partition(" ")
    if dialect == "connect":
        kind, right = next((kind, right) for kind, right in CONNECT.items() if kind.__name__ == rest)
        assert connect.decode_message(kind, msgspec.json.encode(right)) is not None
    else:
        decode, right = tables[dialect][rest]
        assert decode(msgspec.json.encode(right)) is not None
