"""The OpenAPI document, which Open WebUI turns into tools of a model: the routes that are meant for one."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec

from cloche.api.dialect import JSON_TYPE
from cloche.api.open_terminal import arguments as wire


class ToolOperation(NamedTuple):
    """`query` and `body` are the types of its arguments; `failures` its statuses beside 401 and 422."""

    method: str
    path: str
    id: str
    description: str
    query: type[msgspec.Struct] = wire.NoArguments
    body: type[msgspec.Struct] | None = None
    failures: tuple[int, ...] = ()


INFO_OPERATION = ToolOperation("GET", "/info", "get_info", "Tells what the operator says about this environment.")
OPERATIONS = (
    ToolOperation(
        "GET", "/files/list", "list_files", "Lists a directory: names, types, sizes and times.",
        wire.DirectoryArgument, None, (404,),
    ),
    ToolOperation(
        "GET", "/files/read", "read_file",
        "Returns a file: its text, or some lines of it; the text of a document (docx, xlsx, pptx, pdf, odt, rtf); or a "
        "picture. To show a file to the user, use display_file.",
        wire.ReadArguments, None, (404, 415),
    ),
    ToolOperation(
        "GET", "/files/display", "display_file",
        "Shows a file to the user, in the viewer of the user's application. Its content is not returned: use read_file "
        "for that.",
        wire.PathArgument,
    ),
    ToolOperation(
        "POST", "/files/write", "write_file",
        "Writes a text file, with the directories above it. A file that is there is replaced.",
        body=wire.WriteFileBody,
    ),
    ToolOperation(
        "POST", "/files/replace", "replace_file_content",
        "Replaces exact texts in a file by others, everywhere or within some lines.",
        body=wire.ReplaceFileBody, failures=(400, 404),
    ),
    ToolOperation(
        "GET", "/files/grep", "grep_search", "Searches in text files, and returns lines with file and number.",
        wire.GrepArguments, None, (400, 404),
    ),
    ToolOperation(
        "GET", "/files/matches", "match_files",
        "Searches for a text in names, paths and contents of files; the best matches come first.",
        wire.MatchArguments, None, (400, 404),
    ),
    ToolOperation(
        "GET", "/files/search", "search_files", "Searches for a part of a name; the best matches come first.",
        wire.SearchArguments, None, (404,),
    ),
    ToolOperation(
        "GET", "/files/glob", "glob_search", "Finds files and directories whose names or paths fit a pattern.",
        wire.GlobArguments, None, (404,),
    ),
    ToolOperation("GET", "/execute", "list_processes", "Lists this chat's commands, also those that ended lately."),
    ToolOperation(
        "POST", "/execute", "run_command",
        "Starts a shell command in a Linux sandbox with Python, and returns its id; with `wait`, its output too. It "
        "goes on in the background.",
        wire.WaitArguments, wire.StartCommandBody,
    ),
    ToolOperation(
        "GET", "/execute/{process_id}/status", "get_process_status",
        "Tells whether a command runs, its exit code, and its output from an entry on. Reading takes nothing away.",
        wire.StatusArguments, None, (404,),
    ),
    ToolOperation(
        "POST", "/execute/{process_id}/input", "send_process_input", "Types text into a command that runs.",
        body=wire.TypedInputBody, failures=(400, 404),
    ),
    ToolOperation(
        "DELETE", "/execute/{process_id}", "kill_process", "Ends a command.", wire.KillArguments, None, (404,)
    ),
    ToolOperation(
        "GET", "/api/terminals/user/output", "read_user_terminal",
        "Returns the latest output of the terminal that the user has open. Read it before you type there: a program "
        "may be running. It opens no terminal.",
        failures=(404,),
    ),
    ToolOperation(
        "POST", "/api/terminals/user/input", "send_user_terminal_input",
        "Types text into the terminal that the user has open, as it is: a line break at its end submits a command. It "
        "does not wait for a command's end, and opens no terminal.",
        body=wire.TypedInputBody, failures=(404, 409),
    ),
)  # fmt: skip

_FAILURES = {
    400: "The request makes no sense there.",
    401: "The key is missing or wrong.",
    404: "It is not there.",
    409: "It has ended.",
    415: "The file is neither text nor a known document.",
    422: "An argument is missing or wrong.",
}


def openapi_document(version: str, *, with_info: bool) -> dict[str, Any]:
    operations = [*([INFO_OPERATION] if with_info else []), *OPERATIONS]
    bodies = [each.body for each in operations if each.body is not None]
    found, components = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(bodies, found, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        described = _describe_operation(each)
        if each.body is not None:
            content = {JSON_TYPE: {"schema": schemas[each.body]}}
            described["requestBody"] = {"required": True, "content": content}
        paths.setdefault(each.path, {})[each.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Open Terminal", "version": version, "description": "A sealed workspace with a terminal."},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"HTTPBearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _describe_operation(operation: ToolOperation) -> dict[str, Any]:
    statuses = {401, 422, *operation.failures}
    return {
        "summary": operation.id.replace("_", " ").capitalize(),
        "description": operation.description,
        "operationId": operation.id,
        "security": [{"HTTPBearer": []}],
        "parameters": [*_path_parameters(operation.path), *_query_parameters(operation.query)],
        "responses": {
            "200": {"description": "Done", "content": {JSON_TYPE: {"schema": {}}}},
            **{str(status): {"description": _FAILURES[status]} for status in sorted(statuses)},
        },
    }


def _path_parameters(path: str) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]


def _query_parameters(kind: type[msgspec.Struct]) -> list[dict[str, Any]]:
    ((_, schema),) = msgspec.json.schema_components([kind])[1].items()
    required = schema.get("required", [])
    return [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            "schema": each,
            "description": each.get("description", ""),
        }
        for name, each in schema["properties"].items()
    ]
