"""The arguments of the routes. The OpenAPI document is made of them: models read the descriptions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from cloche.model import Struct

Directory = Annotated[str, Meta(description="The directory to search in.")]
Kind = Annotated[Literal["file", "directory", "any"] | None, Meta(description="`file`, `directory`, or `any`.")]
Line = Annotated[int, Meta(ge=1)] | UnsetType
Globs = list[str] | UnsetType
Wait = Annotated[float, Meta(ge=0, le=300)] | None
Tail = Annotated[int, Meta(ge=1)] | None
WAIT = "How many seconds to wait for its end, before the answer with the output so far. By default it does not wait."
TAIL = "Only the last so many entries of the output."
START = "The first line, counted from 1."
END = "The last line, which is included."


class NoArguments(Struct):
    pass


class DirectoryArgument(Struct):
    directory: Annotated[str, Meta(description="The directory to list.")] = "."


class UploadArguments(Struct):
    directory: str


class PathArgument(Struct):
    path: Annotated[str, Meta(description="The path, absolute or relative to the working directory.")]


class ViewArguments(PathArgument):
    preview: bool = False


class ReadArguments(PathArgument):
    start_line: Annotated[Line, Meta(description=START)] = UNSET
    end_line: Annotated[Line, Meta(description=END)] = UNSET


class WriteFileBody(PathArgument):
    content: Annotated[str, Meta(description="The whole new text of the file.")]


class ReplacementBody(Struct):
    target: Annotated[str, Meta(description="The text to find, exactly as it is in the file.")]
    replacement: Annotated[str, Meta(description="The text to put in its place.")]
    start_line: Annotated[Line | None, Meta(description="Look only from this line on, counted from 1.")] = UNSET
    end_line: Annotated[Line | None, Meta(description="Look only up to this line, which is included.")] = UNSET
    allow_multiple: Annotated[bool, Meta(description="Replace every occurrence. Else several are an error.")] = False


class ReplaceFileBody(PathArgument):
    replacements: Annotated[list[ReplacementBody], Meta(description="The changes, made one after another.")]


class GrepArguments(Struct):
    query: Annotated[str, Meta(description="A regular expression, or text.")]
    path: Annotated[str, Meta(description="The directory or file to search in.")] = "."
    regex: Annotated[bool, Meta(description="Whether `query` is a regular expression.")] = True
    case_insensitive: Annotated[bool, Meta(description="Ignore case.")] = False
    include: Annotated[Globs, Meta(description="Only files with such names, for example `*.py`.")] = UNSET
    match_per_line: Annotated[bool, Meta(description="Return lines; else only the names of files.")] = True
    max_results: Annotated[int, Meta(ge=1, le=500, description="The most results.")] = 50


class MatchArguments(Struct):
    query: Annotated[str, Meta(description="The text to find in names and in files.")]
    path: Directory = "."
    show_hidden: Annotated[bool, Meta(description="Also names that begin with a dot.")] = False
    offset: Annotated[int, Meta(ge=0, le=10_000, description="Skip so many results.")] = 0
    limit: Annotated[int, Meta(ge=1, le=100, description="The most results.")] = 100


class SearchArguments(Struct):
    query: Annotated[str, Meta(description="A part of the name; empty for all.")] = ""
    path: Directory = "."
    limit: Annotated[int, Meta(ge=1, le=100, description="The most results.")] = 20
    type: Kind = "any"
    show_hidden: Annotated[bool, Meta(description="Also names that begin with a dot.")] = False


class GlobArguments(Struct):
    pattern: Annotated[str, Meta(description="The pattern of names or relative paths, for example `*.py`.")]
    path: Directory = "."
    exclude: Annotated[Globs, Meta(description="Patterns of names to leave out.")] = UNSET
    type: Kind = "any"
    max_results: Annotated[int, Meta(ge=1, le=500, description="The most results.")] = 50


class CompareBody(Struct):
    original: Annotated[str, Meta(min_length=1)]
    revised: Annotated[str, Meta(min_length=1)]
    ignore_whitespace: bool = False


class MovePathsBody(Struct):
    source: str
    destination: str


class ArchiveBody(Struct):
    paths: list[str]


class SkillArgument(Struct):
    name: str


class StartCommandBody(Struct):
    command: Annotated[str, Meta(description="A line for the shell: pipes, redirections and `&&` work.")]
    cwd: Annotated[str | None, Meta(description="The directory to run it in.")] = None
    env: Annotated[dict[str, str] | None, Meta(description="Additional environment variables.")] = None


class WaitArguments(Struct):
    wait: Annotated[Wait, Meta(description=WAIT)] = None
    tail: Annotated[Tail, Meta(description=TAIL)] = None


class StatusArguments(Struct):
    wait: Annotated[Wait, Meta(description=WAIT)] = None
    offset: Annotated[int, Meta(ge=0, description="Skip so many entries: `next_offset` of the last answer.")] = 0
    tail: Annotated[Tail, Meta(description=TAIL)] = None


class TypedInputBody(Struct):
    input: Annotated[str, Meta(description="The text to type, with its line breaks.")]


class KillArguments(Struct):
    force: Annotated[bool, Meta(description="Kill at once, by SIGKILL instead of SIGTERM.")] = False


class NotebookBody(Struct):
    path: str


class CellBody(Struct):
    cell_index: int
    source: str | None = None


class SocketMessage(Struct):
    """A message of a terminal's client: `auth` with a key, or `resize`."""

    type: Any = None
    token: Any = None
    chat_id: str = ""
    rows: int = 24
    cols: int = 80
