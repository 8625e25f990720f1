"""What each route is sent, beside its path, to get at what is somebody else's.

In a query, a header or a body `<kind>` stands for an id of that kind (see `Belongings.ids`). The attacker sends it
twice: with the victim's, and with one that never existed. `<own kind>` and `<their kind>` stand for one thing in both,
the attacker's own and the victim's: a token of another sandbox than the one that is asked for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.tenants.belongings import ECHO, TOOL
from tests.tenants.wire import form

SANDBOXES = ("running", "paused", "asleep", "killed", "expired", "private", "cell")
SNAPSHOTS = ("snapshot", "snapshot_name", "picture")
TEMPLATES = ("template", "template_name", "template_tag", *SNAPSHOTS)

_TOOL = {"type": "code_interpreter", "container": "<container>"}
_AUTO = {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["<file>"]}}
_CALL = {"type": "code_interpreter_call", "id": "<call>", "code": "1", "container_id": "<container>", "outputs": None}
_CODE = "```python\nimport os; print(sorted(os.listdir('/mnt/data')))\n```"
FORM, FORM_HEADER = form({"kind": "agent", "id": "a"}, "f.txt", b"of the attacker")
_VAULT = {"credentials": [], "bindings": []}
_RULES = [{"action": "allow", "target": "api.example.com"}]
_PROCESS = {"process": {"selector": {"tag": "x"}}}


class Case(NamedTuple):
    """What a route is sent, beside its path."""

    body: Any = None
    query: str = ""
    headers: tuple[tuple[str, str], ...] = ()


def _cases(*bodies: Any) -> list[Case]:
    return [each if isinstance(each, Case) else Case(each) for each in bodies]


_EMPTY = _cases({})
_EXECD_FILES: dict[str, Case] = {
    "POST /files/upload": Case(FORM, headers=tuple(FORM_HEADER.items())),
    "GET /files/download": Case(query="path=/mnt/data/f.txt"),
    "GET /files/info": Case(query="path=/mnt/data/f.txt"),
    "GET /files/search": Case(query="path=/mnt/data"),
    "POST /files/mv": Case([{"src": "/mnt/data/f.txt", "dest": "/mnt/data/g.txt"}]),
    "POST /files/permissions": Case({"/mnt/data/f.txt": {"mode": 600}}),
    "POST /files/replace": Case({"/mnt/data/f.txt": {"old": "a", "new": "b"}}),
    "DELETE /files": Case(query="path=/mnt/data/f.txt"),
    "POST /directories": Case({"/mnt/data/d": {"mode": 755}}),
    "GET /directories/list": Case(query="path=/mnt/data"),
    "DELETE /directories": Case(query="path=/mnt/data"),
}
_CREATED = [
    {"template": "<snapshot>"},
    {"template": "<snapshot_name>"},
    {"template": "<template>"},
    {"template": "<template_name>"},
    {"template": "<template_tag>"},
    {"volumes": {"/mnt/v": "<volume>"}},
    {"volumes": {"/mnt/v": "<volume_name>"}},
]
_OF_E2B = [
    *({"templateID": f"<{kind}>"} for kind in TEMPLATES),
    {"templateID": "base", "volumeMounts": [{"name": "<volume_name>", "path": "/mnt/v"}]},
    {"templateID": "base", "volumeMounts": [{"name": "<volume>", "path": "/mnt/v"}]},
]

_SESSION = "api-version=2024-02-02-preview&identifier=<aca_session>"
_LISTING = {"code": "import os; print(os.listdir('/mnt/data'))"}
_ACA = {
    "POST /code/execute": [Case({"properties": _LISTING}, _SESSION)],
    "POST /code/execute/": [Case({"properties": _LISTING}, _SESSION)],
    "POST /executions": [Case({"shellCommand": "ls /mnt/data"}, _SESSION)],
    "GET /files": [Case(None, _SESSION)],
    "POST /files": [Case(FORM, _SESSION, tuple(FORM_HEADER.items()))],
    "POST /files/upload": [Case(FORM, _SESSION, tuple(FORM_HEADER.items()))],
    "GET /files/content/{name:path}": [Case(None, _SESSION)],
    "GET /files/{name}/content": [Case(None, _SESSION)],
    "DELETE /session": [Case(None, _SESSION)],
}

CASES: dict[str, dict[str, list[Case]]] = {
    "api": {
        "POST /api/v1/sandboxes": _cases(*_CREATED),
        "POST /api/v1/sandboxes/{id}/renew": _cases({"seconds": 1}),
        "POST /api/v1/sandboxes/{id}/contexts": _EMPTY,
        "POST /api/v1/sandboxes/{id}/contexts/{context}/restart": _EMPTY,
        "POST /api/v1/sandboxes/{id}/contexts/{context}/interrupt": _EMPTY,
        "POST /api/v1/sandboxes/{id}/contexts/{context}/checkpoints": _EMPTY,
        "POST /api/v1/sandboxes/{id}/contexts/{context}/rollback": _cases({"checkpoint": "<checkpoint>"}),
        "POST /api/v1/sandboxes/{id}/contexts/{context}/fork": _EMPTY,
        **{
            f"POST /api/v1/sandboxes/{{id}}/contexts/{{context}}/{verb}": _cases({"code": "mark"})
            for verb in ("complete", "describe", "check")
        },
        "POST /api/v1/sandboxes/{id}/pause": _EMPTY,
        "POST /api/v1/sandboxes/{id}/resume": _EMPTY,
        "POST /api/v1/sandboxes/{id}/snapshots": _cases({"name": "mine"}),
        "POST /api/v1/sandboxes/{id}/fork": _EMPTY,
        "GET /api/v1/snapshots": _cases(Case(query="sandbox=<running>")),
        "GET /api/v1/sandboxes/{id}/history": _cases(Case(query="context=<context>")),
        "GET /api/v1/sandboxes/{id}/notebook": _cases(Case(query="context=<context>")),
        "PUT /api/v1/sandboxes/{id}/network": _EMPTY,
        "POST /api/v1/sandboxes/{id}/run": _cases({"code": "1", "context": "<context>"}),
        "POST /api/v1/sandboxes/{id}/stream": _cases({"code": "1", "context": "<context>"}),
        "POST /api/v1/sandboxes/{id}/runs": _cases({"code": "1", "context": "<context>"}),
        "GET /api/v1/runs/{run}/events": _cases(Case(), Case(query="after=1")),
        "POST /api/v1/runs/{run}/interrupt": _EMPTY,
        "GET /api/v1/sandboxes/{id}/files/content": _cases(Case(query="path=/mnt/data/f.txt")),
        "PUT /api/v1/sandboxes/{id}/files/content": _cases(Case(b"attack", query="path=/mnt/data/f.txt")),
        "GET /api/v1/sandboxes/{id}/files/list": _cases(Case(query="path=/mnt/data")),
        "GET /api/v1/sandboxes/{id}/files/stat": _cases(Case(query="path=/mnt/data/f.txt")),
        "GET /api/v1/sandboxes/{id}/files/exists": _cases(Case(query="path=/mnt/data/f.txt")),
        "POST /api/v1/sandboxes/{id}/files/make_dir": _cases({"path": "/mnt/data/d"}),
        "POST /api/v1/sandboxes/{id}/files/move": _cases({"path": "/mnt/data/f.txt", "to": "/mnt/data/g.txt"}),
        "POST /api/v1/sandboxes/{id}/files/remove": _cases({"path": "/mnt/data/f.txt"}),
        "GET /api/v1/sandboxes/{id}/files/watch": _cases(Case(query="path=/mnt/data")),
        "POST /api/v1/sandboxes/{id}/commands": _cases({"command": "true"}),
        "POST /api/v1/sandboxes/{id}/processes": _cases({"command": "true"}),
        "POST /api/v1/sandboxes/{id}/processes/{process}/signal": _cases({"signal": 9}),
        "PUT /api/v1/sandboxes/{id}/processes/{process}/stdin": _cases(b"attack"),
    },
    "e2b": {
        "GET /sandboxes/metrics": _cases(*(Case(query=f"sandbox_ids=<{kind}>") for kind in SANDBOXES)),
        "POST /v2/sandboxes": _cases(*_OF_E2B),
        "POST /sandboxes": _cases(*_OF_E2B),
        "GET /v2/sandboxes": _cases(Case(query="template=<template_name>"), Case(query="metadata=mark%3D<agent>")),
        "POST /sandboxes/{id}/timeout": _cases({"timeout": 1}, {"timeout": 0}),
        "POST /sandboxes/{id}/refreshes": _cases({"duration": 1}),
        "POST /sandboxes/{id}/pause": _EMPTY,
        "POST /v2/sandboxes/{id}/connect": _EMPTY,
        "POST /sandboxes/{id}/connect": _cases({"timeout": 1}),
        "POST /sandboxes/{id}/resume": _EMPTY,
        "POST /sandboxes/{id}/fork": _EMPTY,
        "POST /sandboxes/{id}/snapshots": _cases({"name": "mine"}),
        "GET /snapshots": _cases(*(Case(query=f"sandboxID=<{kind}>") for kind in SANDBOXES)),
        "PUT /sandboxes/{id}/network": _EMPTY,
        "POST /volumecontent/{id}/dir": [],
        "PATCH /volumecontent/{id}/path": [],
        "PUT /volumecontent/{id}/file": [],
        "POST /templates/tags": _cases(
            *({"target": f"<{kind}>", "tags": ["t"]} for kind in TEMPLATES),
            {"target": "<template_name>", "tags": ["<template_tag>"]},
        ),
        "DELETE /templates/tags": _cases(*({"name": f"<{kind}>", "tags": ["mine"]} for kind in TEMPLATES)),
        "PUT /template-files/{id}/{hash}": _cases(b"attack", Case(b"attack", query="<own upload_query>")),
        "POST /v2/templates/{id}/builds/{build}": _cases({"fromTemplate": "base"}),
        "POST /templates/{rest:path}": _EMPTY,
        "PATCH /templates/{rest:path}": _EMPTY,
        "POST /v2/templates/{rest:path}": _EMPTY,
        "PATCH /v2/templates/{rest:path}": _EMPTY,
        "POST /secrets/{rest:path}": _EMPTY,
    },
    "49983": {
        "GET /health": _cases(None),
        "GET /envs": _cases(None),
        "GET /metrics": _cases(None),
        "GET /files": _cases(
            Case(query="path=/home/user/g.txt"), Case(query="path=/home/user/h.txt&signature=<signature>")
        ),
        "POST /files": _cases(
            Case(FORM, "path=/home/user/g.txt", tuple(FORM_HEADER.items())),
            Case(FORM, "path=/home/user/h.txt&signature=<signature>", tuple(FORM_HEADER.items())),
        ),
        "POST /files/compose": _cases({"source_paths": ["/home/user/g.txt"], "destination": "/home/user/h.txt"}),
        "POST /filesystem.Filesystem/Stat": _cases({"path": "/home/user/g.txt"}),
        "POST /filesystem.Filesystem/MakeDir": _cases({"path": "/home/user/d"}),
        "POST /filesystem.Filesystem/Move": _cases({"source": "/home/user/g.txt", "destination": "/home/user/h"}),
        "POST /filesystem.Filesystem/ListDir": _cases({"path": "/home/user"}),
        "POST /filesystem.Filesystem/Remove": _cases({"path": "/home/user/g.txt"}),
        "POST /filesystem.Filesystem/WatchDir": _cases({"path": "/home/user"}),
        "POST /filesystem.Filesystem/CreateWatcher": _cases({"path": "/home/user"}),
        "POST /filesystem.Filesystem/GetWatcherEvents": _cases({"watcherId": "<watcher>"}),
        "POST /filesystem.Filesystem/RemoveWatcher": _cases({"watcherId": "<watcher>"}),
        "POST /process.Process/List": _EMPTY,
        "POST /process.Process/Start": _cases({"process": {"cmd": "true"}}),
        "POST /process.Process/Connect": _cases(_PROCESS),
        "POST /process.Process/Update": _cases(_PROCESS),
        "POST /process.Process/SendInput": _cases(_PROCESS),
        "POST /process.Process/StreamInput": _cases(_PROCESS),
        "POST /process.Process/SendSignal": _cases({**_PROCESS, "signal": "SIGNAL_SIGKILL"}),
        "POST /process.Process/CloseStdin": _cases(_PROCESS),
    },
    "49999": {
        "GET /health": _cases(None),
        "POST /execute": _cases({"code": "1"}, {"code": "1", "context_id": "<kernel>"}),
        "GET /contexts": _cases(None),
        "POST /contexts": _EMPTY,
        "POST /contexts/{id}/restart": _EMPTY,
    },
    "v1": {
        "POST /v1/responses": _cases(
            *(
                {"model": ECHO, "input": _CODE, "store": False, **more}
                for more in (
                    {"previous_response_id": "<response>"},
                    {"previous_response_id": "<background>"},
                    {"previous_response_id": "<streaming>"},
                    {"conversation": "<conversation>"},
                    {"tools": [_TOOL]},
                    {"tools": [{**_TOOL, "container": "<expired_container>"}]},
                    {"tools": [_AUTO]},
                    {"input": [{"type": "item_reference", "id": "<item>"}]},
                    {"input": [{"type": "item_reference", "id": "<conversation_item>"}]},
                    {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "<file>"}]}]},
                    {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "<file>"}]}]},
                    {"input": [_CALL, {"role": "user", "content": _CODE}], "tools": [_AUTO]},
                )
            ),
        ),
        "POST /v1/responses/input_tokens": _cases(
            {"model": ECHO, "input": "hello", "previous_response_id": "<response>"},
            {"model": ECHO, "input": "hello", "conversation": "<conversation>"},
            {"model": ECHO, "input": [{"type": "item_reference", "id": "<item>"}]},
        ),
        "POST /v1/responses/compact": _cases({"model": ECHO, "input": "x", "previous_response_id": "<response>"}),
        "GET /v1/responses/{id}": _cases(None, Case(query="stream=true"), Case(query="stream=true&starting_after=0")),
        "POST /v1/responses/{id}/cancel": _EMPTY,
        "GET /v1/responses/{id}/input_items": _cases(None, Case(query="after=<conversation_item>")),
        "POST /v1/conversations": _cases({"items": [{"type": "item_reference", "id": "<item>"}]}),
        "POST /v1/conversations/{id}": _cases({"metadata": {"a": "b"}}),
        "POST /v1/conversations/{id}/items": _cases(
            {"items": [{"type": "message", "role": "user", "content": "attack"}]},
            {"items": [{"type": "item_reference", "id": "<conversation_item>"}]},
            {"items": [{"type": "item_reference", "id": "<item>"}]},
        ),
        "GET /v1/conversations/{id}/items": _cases(None, Case(query="after=<conversation_item>")),
        "POST /v1/chat/completions": _cases(
            *(
                {"model": ECHO, "messages": [{"role": "user", "content": _CODE}], **more}
                for more in (
                    {"tools": [_TOOL]},
                    {"tools": [{**_TOOL, "container": "<expired_container>"}]},
                    {"tools": [_AUTO]},
                    {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": "<file>"}}]}]},
                )
            ),
        ),
        "POST /v1/chat/completions/{rest:path}": _EMPTY,
        "POST /v1/containers": _cases(
            {"name": "c", "file_ids": ["<file>"]}, {"name": "c", "file_ids": ["<file_of_container>"]}
        ),
        "GET /v1/containers": _cases(
            Case(query="after=<container>"), Case(query="after=<expired_container>"), Case(query="name=<agent>")
        ),
        "POST /v1/containers/{container}/files": _cases({"file_id": "<file>"}, {"file_id": "<file_of_container>"}),
        "GET /v1/containers/{container}/files": _cases(None, Case(query="after=<file_of_container>")),
        "GET /v1/files": _cases(Case(query="after=<file>")),
    },
    "opensandbox": {
        "POST /sandboxes": _cases(
            *({"snapshotId": f"<{kind}>", "timeout": 60, "resourceLimits": {}} for kind in SNAPSHOTS),
            *({"image": {"uri": f"<{kind}>"}, "timeout": 60, "resourceLimits": {}} for kind in TEMPLATES),
            {"image": {"uri": "python"}, "timeout": 60, "extensions": {"poolRef": "<template>"}},
            {
                "image": {"uri": "python"},
                "timeout": 60,
                "volumes": [{"mountPath": "/mnt/v", "pvc": {"claimName": "<volume>", "createIfNotExists": False}}],
            },
        ),
        "POST /sandboxes/{id}/renew-expiration": _cases({"expiresAt": "2999-01-01T00:00:00Z"}),
        "POST /sandboxes/{id}/pause": _EMPTY,
        "POST /sandboxes/{id}/resume": _EMPTY,
        "POST /sandboxes/{id}/snapshots": _EMPTY,
        "GET /sandboxes/{id}/diagnostics/events": _cases(Case(query="scope=all")),
        "GET /sandboxes/{id}/diagnostics/logs": _cases(Case(query="scope=all")),
        "GET /snapshots": _cases(*(Case(query=f"sandboxId=<{kind}>") for kind in SANDBOXES)),
        "POST /sandboxes/{id}/proxy/44772/code": _cases({"code": "1"}, {"code": "1", "context": {"id": "<context>"}}),
        "DELETE /sandboxes/{id}/proxy/44772/code": _cases(Case(query="id=<context>")),
        "POST /sandboxes/{id}/proxy/44772/code/context": _EMPTY,
        "DELETE /sandboxes/{id}/proxy/44772/code/contexts": _cases(Case(query="language=python")),
        "PATCH /sandboxes/{id}/metadata": _cases({"mark": "attacker"}),
        "POST /sandboxes/{id}/proxy/44772/command": _cases(
            {"command": "true"}, {"command": "true", "background": True}
        ),
        "DELETE /sandboxes/{id}/proxy/44772/command": _cases(Case(query="id=<command>")),
        "POST /sandboxes/{id}/proxy/44772/session": _EMPTY,
        "POST /sandboxes/{id}/proxy/44772/session/{session}/run": _cases({"command": "true"}),
        **{
            f"{route.split()[0]} /sandboxes/{{id}}/proxy/44772{prefix}{route.split()[1]}": _cases(case)
            for prefix in ("", "/v1/filesystem/{uid}/{gid}")
            for route, case in _EXECD_FILES.items()
        },
        "POST /sandboxes/{id}/proxy/18080/credential-vault": _cases(_VAULT),
        "PATCH /sandboxes/{id}/proxy/18080/credential-vault": _cases(_VAULT),
        **{
            f"{method} /sandboxes/{{id}}/{place}": _cases(body)
            for place in ("networkpolicy", "proxy/18080/policy")
            for method, body in {"POST": {}, "PUT": {}, "PATCH": _RULES, "DELETE": ["api.example.com"]}.items()
        },
    },
    "jupyter": {
        f"{method} {base}/api/{path}": bodies
        for base in ("", "/in/{sandbox}")
        for method, path, bodies in (
            ("POST", "kernels", _EMPTY),
            ("POST", "kernels/{kernel}/interrupt", _EMPTY),
            ("POST", "kernels/{kernel}/restart", _EMPTY),
            ("POST", "sessions", _cases({"kernel": {"id": "<jupyter_kernel>"}, "path": "x"})),
            ("PATCH", "sessions/{session}", _cases({"path": "x"}, {"kernel": {"id": "<jupyter_kernel>"}})),
            ("PUT", "contents", _cases({"type": "directory"})),
            ("PUT", "contents/{path:path}", _cases({"format": "text", "content": "attack"})),
            ("POST", "contents", _cases({}, {"copy_from": "f.txt"})),
            ("POST", "contents/{path:path}", _EMPTY),
            ("PATCH", "contents", _cases({"path": "g.txt"})),
            ("PATCH", "contents/{path:path}", _cases({"path": "g.txt"})),
        )
    },
    "aca": {
        f"{route.split()[0]} {base}{route.split()[1]}": case for base in ("", "/{pool}") for route, case in _ACA.items()
    },
    "open-terminal": {
        "POST /execute/{process}/input": _cases({"input": "attack"}),
        "POST /files/write": _cases({"path": "attack.txt", "content": "attack"}),
        "POST /files/mkdir": _cases({"path": "attack"}),
        "POST /files/move": _cases({"source": "<agent>", "destination": "attack2.txt"}),
        "POST /files/replace": _cases({"path": "f.txt", "replacements": [{"target": "a", "replacement": "b"}]}),
        "POST /files/compare": _cases({"original": "f.txt", "revised": "f.txt"}),
        "POST /files/archive": _cases({"paths": ["f.txt"]}),
        "POST /files/cwd": _cases({"path": "."}),
        "POST /files/upload": _cases(Case(FORM, "directory=up", tuple(FORM_HEADER.items()))),
        "GET /files/read": _cases(Case(query="path=f.txt")),
        "GET /files/list": _cases(None),
        "GET /files/display": _cases(Case(query="path=f.txt")),
        "GET /files/view": _cases(Case(query="path=f.txt")),
        "GET /files/grep": _cases(Case(query="query=<agent>")),
        "GET /files/matches": _cases(Case(query="query=<agent>")),
        "GET /files/search": _cases(Case(query="query=f.txt")),
        "GET /files/glob": _cases(Case(query="pattern=*")),
        "DELETE /files/delete": _cases(Case(query="path=<agent>")),
        "GET /skills/read": _cases(Case(query="name=<agent>")),
        "POST /api/terminals/user/input": _cases({"input": "attack"}),
        "POST /notebooks/{notebook}/execute": _cases({"cell_index": 0}),
    },
    "librechat": {
        "POST /exec": [],
        "POST /exec/programmatic": [],
        "POST /exec/programmatic/cancel": [],
    },
}
"""By plane and route. A route that takes a body and is not here, nor in `NOTHING_FOREIGN`, is not tried: a failure."""

_REFERENCES = [
    {"id": f"<{kind}object>", "storage_session_id": f"<{kind}session>", "name": "f.txt", **space}
    for kind, space in {
        "": {},
        "users_": {"kind": "user", "resource_id": "u"},
        "agents_": {"kind": "agent", "resource_id": "<agent>"},
        "exec_": {},
    }.items()
]
_BARE = {"lang": "bash", "code": "ls /mnt/data"}
_RESULTS = [{"call_id": "call_001", "result": "attack", "is_error": False}]
CASES["librechat"].update(
    {
        "POST /exec": _cases(
            *({**_BARE, "files": [each]} for each in _REFERENCES),
            {**_BARE, "runtime_session_hint": "<hint>"},
            {**_BARE, "session_id": "<exec_session>"},
        ),
        "POST /exec/programmatic": _cases(
            {"continuation_token": "<continuation>", "tool_results": _RESULTS},
            *({"code": "print(1)", "tools": [TOOL], "files": [each]} for each in _REFERENCES[:1]),
        ),
        "POST /exec/programmatic/cancel": _cases({"request_id": "<agent>"}),
    }
)
_VOLUME_TOKENS = ("", "Bearer wrong", "Bearer <own volume_token>", "Bearer <their access_token>")
CASES["e2b"].update(
    {
        f"{method} /volumecontent/{{id}}/{place}": [
            Case(body, "path=/f.txt", (("authorization", token),)) for token in _VOLUME_TOKENS
        ]
        for method, place, body in (
            ("GET", "dir", None),
            ("POST", "dir", b""),
            ("GET", "path", None),
            ("PATCH", "path", {}),
            ("DELETE", "path", None),
            ("GET", "file", None),
            ("PUT", "file", b"attack"),
        )
    }
)

_THEIR_SESSION = (("mcp-session-id", "<mcp_session>"),)
_OWN_SESSION = (("mcp-session-id", "<own mcp_session>"),)


def _tool(name: str, **arguments: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}


CASES["mcp"] = {
    f"{method} /mcp{end}": cases
    for end in ("", "/")
    for method, cases in {
        "GET": [Case(headers=_THEIR_SESSION)],
        "DELETE": [Case(headers=_THEIR_SESSION)],
        "POST": [
            Case(_tool("run_code", code="import os; print(os.listdir('/mnt/data'))"), headers=_THEIR_SESSION),
            *(Case(_tool("use_sandbox", sandbox=f"<{kind}>"), headers=_OWN_SESSION) for kind in SANDBOXES),
            *(Case(_tool("end_sandbox", sandbox=f"<{kind}>"), headers=_OWN_SESSION) for kind in SANDBOXES),
            *(Case(_tool("new_sandbox", template=f"<{kind}>"), headers=_OWN_SESSION) for kind in TEMPLATES),
            *(Case(_tool("remove_snapshot", snapshot=f"<{kind}>"), headers=_OWN_SESSION) for kind in SNAPSHOTS),
            Case(_tool("run_code", code="1", context="<context>"), headers=_OWN_SESSION),
            Case(_tool("read_process", process="<process>"), headers=_OWN_SESSION),
        ],
    }.items()
}

LISTS = frozenset(
    each.strip()
    for each in """
    api GET /api/v1/sandboxes
    api GET /api/v1/snapshots
    api GET /api/v1/volumes
    api GET /api/v1/runs
    api GET /api/v1/templates
    api GET /api/v1/whoami
    api GET /api/v1/info
    api GET /api/v1/usage
    e2b GET /v2/sandboxes
    e2b GET /sandboxes
    e2b GET /snapshots
    e2b GET /volumes
    e2b GET /templates
    e2b GET /v2/templates
    e2b GET /default-templates
    v1 GET /v1/containers
    v1 GET /v1/files
    v1 GET /v1/models
    v1 GET /v1/chat/completions
    opensandbox GET /sandboxes
    opensandbox GET /snapshots
    opensandbox GET /templates
    opensandbox GET /health
    jupyter GET /api/kernels
    jupyter GET /api/sessions
    jupyter GET /api/status
    jupyter GET /api/me
    jupyter GET /api/kernelspecs
    open-terminal GET /files/cwd
    open-terminal GET /execute
    open-terminal GET /ports
    open-terminal GET /skills
    open-terminal GET /api/terminals
    open-terminal GET /api/terminals/user/output
    open-terminal GET /info
    open-terminal GET /system
    server GET /health
    server GET /ready
    server GET /metrics
    api GET /api/v1/logs
    api GET /api/v1/logs/follow
    """.strip().splitlines()
)
"""What names no id and may show some: as the attacker sees it, it shows nothing of the victim."""

NOTHING_FOREIGN = frozenset(
    each.strip()
    for each in """
    api GET /api/v1/openapi.json
    api POST /api/v1/volumes
    e2b POST /volumes
    opensandbox POST /metrics/events
    e2b POST /v3/templates
    e2b POST /templates
    e2b POST /v2/templates
    e2b GET /secrets
    e2b POST /secrets
    e2b DELETE /secrets
    e2b GET /teams
    v1 POST /v1/files
    dify POST /v1/sandbox/run
    dify GET /v1/sandbox/dependencies
    dify GET /v1/sandbox/dependencies/refresh
    dify POST /v1/sandbox/dependencies/update
    dify GET /health
    fastgpt POST /sandbox/js
    fastgpt POST /sandbox/python
    fastgpt GET /sandbox/modules
    fastgpt GET /health
    piston POST /api/v2/execute
    piston GET /api/v2/runtimes
    piston GET /api/v2/packages
    piston POST /api/v2/packages
    piston DELETE /api/v2/packages
    ragflow POST /run
    ragflow GET /healthz
    ragflow GET /
    sandboxfusion POST /run_code
    sandboxfusion POST /run_jupyter
    sandboxfusion GET /v1/ping
    jupyter POST /api/kernels
    jupyter GET /api/contents
    jupyter PUT /api/contents
    jupyter POST /api/contents
    jupyter PATCH /api/contents
    jupyter DELETE /api/contents
    jupyter GET /api
    jupyter GET /login
    jupyter POST /login
    jupyter GET /logout
    jupyter GET /in/{sandbox}/login
    jupyter POST /in/{sandbox}/login
    jupyter GET /in/{sandbox}/logout
    open-terminal GET /openapi.json
    open-terminal GET /health
    open-terminal GET /api/config
    open-terminal POST /api/terminals
    open-terminal POST /execute
    open-terminal POST /notebooks
    librechat GET /health
    librechat POST /upload
    librechat POST /upload/batch
    ui GET /ui
    ui GET /ui/login
    ui POST /ui/login
    ui GET /ui/login/state
    ui POST /ui/login/links
    ui POST /ui/logout
    ui GET /ui/static/{name:path}
    ui GET /ui/frame
    """.strip().splitlines()
)
"""Routes that take no id at all. Those that take a name are tried in test_names.py."""
