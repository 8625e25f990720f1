"""The table of all routes of `/api/v1`: source of the router and of the OpenAPI document."""

from __future__ import annotations

from typing import Any, NamedTuple

from cloche.api.dialect import EVENTS_TYPE
from cloche.api.http import Handler
from cloche.api.native import sockets
from cloche.api.native.commands import NativeCommands
from cloche.api.native.context import NativeContext
from cloche.api.native.files import NativeFiles
from cloche.api.native.runs import NativeExecutions, NativeRuns
from cloche.api.native.sandboxes import (
    NativeCheckpoints,
    NativeHistory,
    NativeNetwork,
    NativeSandboxes,
    NativeSnapshots,
    NativeVolumes,
)
from cloche.api.native.server import NativeLogs, NativeServer
from cloche.api.native.sockets import SocketHandler
from cloche.engine.quotas.quotas import OwnerUsage
from cloche.events import ProcessResult, RunInfo
from cloche.model import (
    CodeCheck,
    CodeDescription,
    Completions,
    FileInfo,
    Mark,
    Principal,
    ProcessInfo,
    SandboxInfo,
    SnapshotInfo,
    VolumeInfo,
)
from cloche.protocol import requests, responses

BYTES_TYPE = "application/octet-stream"
NOTEBOOK_TYPE = "application/x-ipynb+json"


class Operation(NamedTuple):
    id: str  # in the OpenAPI document, from which clients are generated: it never changes
    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None  # a message, or BYTES
    query: Any = None
    answer: Any = None  # what is in a JSON answer, or BYTES, or EVENTS; None for an empty answer
    status: int = 200


class SocketOperation(NamedTuple):
    path: str
    talk: SocketHandler
    summary: str
    first: Any = None  # the client's first message
    query: Any = None


def api_operations(api: NativeContext) -> list[Operation]:
    """All operations. Paths are below the prefix."""
    parts = (
        _server_operations,
        _sandbox_operations,
        _context_operations,
        _branch_operations,
        _pause_operations,
        _snapshot_operations,
        _volume_operations,
        _history_operations,
        _network_operations,
        _code_operations,
        _run_operations,
        _file_operations,
        _command_operations,
    )
    return [each for part in parts for each in part(api)]


def socket_operations() -> list[SocketOperation]:
    box = "/sandboxes/{id}"
    return [
        SocketOperation(
            box + "/execute", sockets.execute, "Run code; answer and interrupt it.", requests.ExecuteRequest
        ),
        SocketOperation(
            box + "/process",
            sockets.process,
            "Start a process or terminal and attach to it.",
            requests.StartProcessRequest,
            requests.AttachQuery,
        ),
        SocketOperation(
            box + "/processes/{process}/attach", sockets.attach, "Attach to a process.", None, requests.AttachQuery
        ),
    ]


def _server_operations(api: NativeContext) -> list[Operation]:
    desk, logs, query = NativeServer(api), NativeLogs(api), requests.LogsQuery
    return [
        Operation("Desk.whoami", "GET", "/whoami", desk.whoami, "Who asks.", answer=Principal),
        Operation("Desk.usage", "GET", "/usage", desk.usage, "What you use, and how much you may.", answer=OwnerUsage),
        Operation(
            "Desk.info", "GET", "/info", desk.info, "What the server is and allows.", answer=responses.AboutResponse
        ),
        Operation(
            "Desk.templates", "GET", "/templates", desk.templates, "The templates.", answer=list[responses.TemplateInfo]
        ),
        Operation(
            "Logs.recent",
            "GET",
            "/logs",
            logs.recent,
            "The server's own events.",
            query=query,
            answer=list[responses.LogMessage],
        ),
        Operation(
            "Logs.follow",
            "GET",
            "/logs/follow",
            logs.follow,
            "The same, and what comes.",
            query=query,
            answer=EVENTS_TYPE,
        ),
    ]


def _sandbox_operations(api: NativeContext) -> list[Operation]:
    here, box, query = NativeSandboxes(api), "/sandboxes/{id}", requests.SandboxesQuery
    return [
        Operation(
            "Sandboxes.create",
            "POST",
            "/sandboxes",
            here.create,
            "Make a sandbox.",
            requests.CreateSandbox,
            None,
            SandboxInfo,
            201,
        ),
        Operation(
            "Sandboxes.list",
            "GET",
            "/sandboxes",
            here.list,
            "Those that run, or are paused.",
            query=query,
            answer=list[SandboxInfo],
        ),
        Operation(
            "Sandboxes.get",
            "GET",
            box,
            here.get,
            "What is known of it.",
            query=requests.SandboxQuery,
            answer=SandboxInfo,
        ),
        Operation(
            "Sandboxes.renew",
            "POST",
            box + "/renew",
            here.renew,
            "Move its deadline.",
            requests.RenewRequest,
            answer=SandboxInfo,
        ),
        Operation("Sandboxes.kill", "DELETE", box, here.kill, "End it.", status=204),
        Operation(
            "Sandboxes.hold", "GET", box + "/hold", here.hold, "It ends when this connection does.", answer=EVENTS_TYPE
        ),
    ]


def _context_operations(api: NativeContext) -> list[Operation]:
    here, contexts = NativeSandboxes(api), "/sandboxes/{id}/contexts"
    one, context = contexts + "/{context}", responses.ContextInfo
    return [
        Operation(
            "Sandboxes.list_contexts",
            "GET",
            contexts,
            here.list_contexts,
            "Its contexts.",
            answer=list[responses.ContextInfo],
        ),
        Operation(
            "Sandboxes.create_context",
            "POST",
            contexts,
            here.create_context,
            "Make a context.",
            requests.CreateContextRequest,
            None,
            context,
            201,
        ),
        Operation("Sandboxes.get_context", "GET", one, here.get_context, "A context.", answer=context),
        Operation(
            "Sandboxes.restart_context",
            "POST",
            one + "/restart",
            here.restart_context,
            "A new kernel under the same id.",
            status=204,
        ),
        Operation(
            "Sandboxes.interrupt_context",
            "POST",
            one + "/interrupt",
            here.interrupt_context,
            "Interrupt it.",
            answer=responses.InterruptedResponse,
        ),
        Operation("Sandboxes.remove_context", "DELETE", one, here.remove_context, "End a context.", status=204),
    ]


def _branch_operations(api: NativeContext) -> list[Operation]:
    here, one, contexts = NativeCheckpoints(api), "/sandboxes/{id}/contexts/{context}", list[responses.ContextInfo]
    marks, forked = one + "/checkpoints", requests.ForkContextRequest
    return [
        Operation("Branching.checkpoint", "POST", marks, here.checkpoint, "Keep its state.", answer=Mark, status=201),
        Operation("Branching.list", "GET", marks, here.list, "Its checkpoints, the oldest first.", answer=list[Mark]),
        Operation("Branching.forget", "DELETE", marks + "/{checkpoint}", here.forget, "Let go of one.", status=204),
        Operation(
            "Branching.rollback",
            "POST",
            one + "/rollback",
            here.rollback,
            "Take it back to one.",
            requests.RollbackRequest,
            status=204,
        ),
        Operation(
            "Branching.fork",
            "POST",
            one + "/fork",
            here.fork,
            "More with its state.",
            forked,
            answer=contexts,
            status=201,
        ),
    ]


def _pause_operations(api: NativeContext) -> list[Operation]:
    here, box = NativeSandboxes(api), "/sandboxes/{id}"
    return [
        Operation(
            "Pausing.pause",
            "POST",
            box + "/pause",
            here.pause,
            "Stop its programs for now.",
            requests.PauseRequest,
            answer=SandboxInfo,
        ),
        Operation(
            "Pausing.resume",
            "POST",
            box + "/resume",
            here.resume,
            "Let them go on.",
            requests.ResumeRequest,
            answer=SandboxInfo,
        ),
    ]


def _snapshot_operations(api: NativeContext) -> list[Operation]:
    here, box, one = NativeSnapshots(api), "/sandboxes/{id}", "/snapshots/{ref:path}"
    make, query, info, boxes = requests.MakeSnapshotRequest, requests.SnapshotsQuery, SnapshotInfo, list[SandboxInfo]
    return [
        Operation(
            "Snapshots.make",
            "POST",
            box + "/snapshots",
            here.make,
            "Keep what is in it.",
            make,
            answer=info,
            status=201,
        ),
        Operation(
            "Snapshots.fork",
            "POST",
            box + "/fork",
            here.fork,
            "More with its files.",
            requests.ForkSandboxRequest,
            answer=boxes,
            status=201,
        ),
        Operation(
            "Snapshots.list", "GET", "/snapshots", here.list, "The snapshots.", query=query, answer=list[SnapshotInfo]
        ),
        Operation("Snapshots.get", "GET", one, here.get, "A snapshot, by its id or name.", answer=info),
        Operation(
            "Snapshots.remove", "DELETE", one, here.remove, "Remove it. Sandboxes made from it stay.", status=204
        ),
    ]


def _volume_operations(api: NativeContext) -> list[Operation]:
    here, one, info = NativeVolumes(api), "/volumes/{ref:path}", VolumeInfo
    return [
        Operation(
            "Volumes.make",
            "POST",
            "/volumes",
            here.make,
            "A new volume.",
            requests.MakeVolumeRequest,
            answer=info,
            status=201,
        ),
        Operation("Volumes.list", "GET", "/volumes", here.list, "The volumes.", answer=list[VolumeInfo]),
        Operation("Volumes.get", "GET", one, here.get, "A volume, by its id or name.", answer=info),
        Operation("Volumes.remove", "DELETE", one, here.remove, "Remove it, with its files.", status=204),
    ]


def _history_operations(api: NativeContext) -> list[Operation]:
    here, box, query = NativeHistory(api), "/sandboxes/{id}", requests.HistoryQuery
    one, found = box + "/contexts/{context}/variables", responses.VariablesInfo
    return [
        Operation("Inspecting.variables", "GET", one, here.variables, "What its names are bound to.", answer=found),
        *(
            Operation(
                f"Inspecting.{name}",
                "POST",
                f"{box}/contexts/{{context}}/{name}",
                handler,
                summary,
                requests.CodeQuestionRequest,
                answer=kind,
            )
            for name, handler, summary, kind in (
                ("complete", here.complete, "Completions at a place in code.", Completions),
                ("describe", here.describe, "The documentation of a name in code.", CodeDescription),
                ("check", here.check, "Whether code is a whole cell.", CodeCheck),
            )
        ),
        Operation(
            "Inspecting.history",
            "GET",
            box + "/history",
            here.history,
            "What ran in it.",
            query=query,
            answer=responses.HistoryInfo,
        ),
        Operation(
            "Inspecting.notebook",
            "GET",
            box + "/notebook",
            here.notebook,
            "The same for Jupyter.",
            query=query,
            answer=NOTEBOOK_TYPE,
        ),
    ]


def _network_operations(api: NativeContext) -> list[Operation]:
    here, network = NativeNetwork(api), "/sandboxes/{id}/network"
    body, info = requests.SetNetworkRequest, responses.NetworkInfo
    return [
        Operation("Network.get", "GET", network, here.get, "What it may reach.", answer=info),
        Operation("Network.replace", "PUT", network, here.replace, "Replace that, while it runs.", body, answer=info),
        Operation(
            "Network.log",
            "GET",
            network + "/log",
            here.log,
            "What its programs tried.",
            answer=responses.NetworkLogResponse,
        ),
    ]


def _code_operations(api: NativeContext) -> list[Operation]:
    here, box = NativeExecutions(api), "/sandboxes/{id}"
    return [
        Operation(
            "Running.run",
            "POST",
            box + "/run",
            here.run,
            "Run code to its end.",
            requests.ExecuteRequest,
            answer=responses.RunMessage,
        ),
        Operation(
            "Running.stream",
            "POST",
            box + "/stream",
            here.stream,
            "Run code; its events.",
            requests.ExecuteRequest,
            answer=EVENTS_TYPE,
        ),
    ]


def _run_operations(api: NativeContext) -> list[Operation]:
    here, runs, one = NativeRuns(api), "/sandboxes/{id}/runs", "/runs/{run}"
    ended, seen = responses.RunMessage, requests.RunEventsQuery
    return [
        Operation(
            "Runs.start",
            "POST",
            runs,
            here.start,
            "Run code that outlives this request.",
            requests.DetachRequest,
            None,
            RunInfo,
            201,
        ),
        Operation("Runs.list", "GET", runs, here.list, "Its detached runs, the newest first.", answer=list[RunInfo]),
        Operation("Runs.list_all", "GET", "/runs", here.list_all, "All detached runs of yours.", answer=list[RunInfo]),
        Operation("Runs.get", "GET", one, here.get, "What is known of a detached run.", answer=RunInfo),
        Operation("Runs.result", "GET", one + "/result", here.result, "What it did, when it has ended.", answer=ended),
        Operation(
            "Runs.events",
            "GET",
            one + "/events",
            here.events,
            "Its events, from any on.",
            query=seen,
            answer=EVENTS_TYPE,
        ),
        Operation(
            "Runs.interrupt",
            "POST",
            one + "/interrupt",
            here.interrupt,
            "Interrupt it.",
            answer=responses.InterruptedResponse,
        ),
        Operation("Runs.remove", "DELETE", one, here.remove, "End it, and forget it.", status=204),
    ]


def _file_operations(api: NativeContext) -> list[Operation]:
    here, files = NativeFiles(api), "/sandboxes/{id}/files"
    at, read, listing = requests.PathQuery, requests.ReadQuery, requests.ListQuery
    return [
        Operation(
            "Files.read", "GET", files + "/content", here.read, "A file's content.", query=read, answer=BYTES_TYPE
        ),
        Operation(
            "Files.write",
            "PUT",
            files + "/content",
            here.write,
            "Write a file.",
            BYTES_TYPE,
            requests.WriteQuery,
            FileInfo,
        ),
        Operation(
            "Files.list", "GET", files + "/list", here.list, "A directory.", query=listing, answer=list[FileInfo]
        ),
        Operation("Files.stat", "GET", files + "/stat", here.stat, "What lies at a path.", query=at, answer=FileInfo),
        Operation(
            "Files.exists",
            "GET",
            files + "/exists",
            here.exists,
            "Whether it is there.",
            query=at,
            answer=responses.ExistsResponse,
        ),
        Operation(
            "Files.make_dir",
            "POST",
            files + "/make_dir",
            here.make_dir,
            "Make a directory.",
            requests.FilePathRequest,
            answer=responses.CreatedResponse,
        ),
        Operation(
            "Files.move", "POST", files + "/move", here.move, "Move it.", requests.MovePathRequest, answer=FileInfo
        ),
        Operation(
            "Files.remove", "POST", files + "/remove", here.remove, "Remove it.", requests.FilePathRequest, status=204
        ),
        Operation(
            "Files.watch",
            "GET",
            files + "/watch",
            here.watch,
            "Changes, as events.",
            query=requests.WatchQuery,
            answer=EVENTS_TYPE,
        ),
    ]


def _command_operations(api: NativeContext) -> list[Operation]:
    here, box = NativeCommands(api), "/sandboxes/{id}"
    one = box + "/processes/{process}"
    run, start, ran, began = (
        requests.RunCommandRequest,
        requests.StartProcessRequest,
        ProcessResult,
        responses.ProcessStartedResponse,
    )
    return [
        Operation("Commands.run", "POST", box + "/commands", here.run, "Run a command to its end.", run, answer=ran),
        Operation(
            "Commands.start",
            "POST",
            box + "/processes",
            here.start,
            "Start a process.",
            start,
            answer=began,
            status=201,
        ),
        Operation("Commands.list", "GET", box + "/processes", here.list, "Those that run.", answer=list[ProcessInfo]),
        Operation("Commands.kill", "DELETE", one, here.kill, "Kill it with all that it started.", status=204),
        Operation(
            "Commands.signal", "POST", one + "/signal", here.signal, "Signal it.", requests.SignalRequest, status=204
        ),
        Operation(
            "Commands.write_stdin",
            "PUT",
            one + "/stdin",
            here.write_stdin,
            "Write to its stdin.",
            BYTES_TYPE,
            status=204,
        ),
        Operation("Commands.close_stdin", "DELETE", one + "/stdin", here.close_stdin, "Close its stdin.", status=204),
    ]
