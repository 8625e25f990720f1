"""The shared values: frozen, comparable, serialisable. No behaviour beyond validation."""

from __future__ import annotations

import html
import keyword
import math
import posixpath
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

from cloche import errors
from cloche.network_policy import NetworkPolicy
from cloche.structs import Struct as Struct

KIB, MIB, GIB = 1024, 1024**2, 1024**3

MAX_STRING_BYTES = 128 * KIB  # of one argument or environment variable: the kernel's limit
MAX_COMMAND_BYTES = 1 * MIB  # of a command's arguments and environment together; the kernel's limit is twice that
MAX_LINE_BYTES = 1 * MIB
MAX_PATH = 4096  # bytes of one path
MAX_WAITING_CHANGES = 10_000  # of a watch, which its reader has not taken yet
MAX_METADATA_PAIRS = 64
MAX_METADATA_BYTES = 16 * KIB  # of names and values together: a record of them outlives the sandbox by weeks

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,127}")  # a name, NAME@VERSION, or an alias

_SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")

User = Literal["user", "root"]
OnDeadline = Literal["kill", "pause"]
FileKind = Literal["file", "directory", "symlink", "other"]
Outcome = Literal["ok", "raised", "interrupted", "timed_out", "out_of_memory", "died"]
Stream = Literal["stdout", "stderr"]


def new_id(prefix: str = "i") -> str:
    """`prefix` + 20 characters of [a-z0-9]. With the default prefix it is a sandbox id, valid in every dialect."""
    number, letters = secrets.randbits(128), []
    for _ in range(20):  # 36**20 is less than 2**104, so that the remainder's bias is nowhere to be seen
        number, digit = divmod(number, 36)
        letters.append(_ID_ALPHABET[digit])
    return prefix + "".join(letters)


class Limits(Struct):
    """The resource limits of one sandbox. Every field has a default and nothing is unlimited."""

    memory_bytes: int = 2 * GIB
    cpus: float = 2.0
    processes: int = 256
    open_files: int = 4096
    space_bytes: int = 1 * GIB
    output_bytes: int = 32 * MIB
    execution_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_limit(name, getattr(self, name))

    @property
    def memory_and_space_bytes(self) -> int:
        """The bound on memory: files are memory, and the kernel charges both, and its own objects, to one account."""
        return self.memory_bytes + self.space_bytes


_FRACTIONAL_LIMITS = ("cpus", "execution_seconds")
_MINIMUM_LIMITS: dict[str, tuple[float, str]] = {  # with less, nothing starts, or nothing useful can be done
    "memory_bytes": (16 * MIB, "16 MiB"),
    "cpus": (0.01, "0.01"),
    "processes": (8, "8"),
    "open_files": (64, "64"),
    "space_bytes": (1 * MIB, "1 MiB"),
}


def _check_limit(name: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value > 0):
        raise errors.InvalidRequest(f"limit {name} must be a positive number, not {value!r}")
    if name not in _FRACTIONAL_LIMITS and not isinstance(value, int):
        raise errors.InvalidRequest(f"limit {name} must be a whole number, not {value!r}")
    least, in_words = _MINIMUM_LIMITS.get(name, (0, ""))
    if value < least:
        raise errors.InvalidRequest(f"limit {name} must be at least {in_words}, not {value!r}")


class DisplayOptions(Struct):
    """Additional output of an execution, beyond a notebook's. By default nothing."""

    json: bool = False  # lists and dicts also as application/json
    whole_text: bool = False  # the text of a long list or dict is not abridged
    whole_data: bool = False  # nor is the data of a DataFrame: it is given whole or, over a limit, not at all
    saved_images: bool = False  # a picture that PIL saves to a named file


class ExecutionRequest(Struct):
    """A request to run code in a context: the code, and the settings that hold while it runs."""

    code: str
    env: dict[str, str] = {}
    cwd: str | None = None
    argv: Sequence[str] | None = None  # the program's `sys.argv`
    timeout_seconds: float | None = None  # from the start of the program; None: the sandbox's limit
    until_deadline: bool = False  # no time limit but the sandbox's deadline, where it has one
    showing: DisplayOptions = DisplayOptions()
    tools: Sequence[ToolDefinition] = ()  # functions for the program; their calls are ToolsCalled events
    recorded: bool = True  # whether it is in the sandbox's history

    def check(self) -> None:
        """Raises InvalidRequest for values that no execution can have."""
        if not isinstance(self.code, str):
            raise errors.InvalidRequest(f"code must be a string, not {type(self.code).__name__}")
        check_environment(self.env)
        argv = self.argv or ()
        if isinstance(argv, str) or not all(isinstance(word, str) for word in argv):
            raise errors.InvalidRequest("argv must be a list of strings")
        if argv:  # else the size of the environment is known to be small enough
            check_command_size(argv, self.env)
        check_seconds("timeout", self.timeout_seconds)


class SandboxSpec(Struct):
    """A request for a new sandbox."""

    template: str = "python"
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    limits: Limits | None = None
    lifetime_seconds: float | None = None
    network: NetworkPolicy | None = None  # None: the default of this host
    user: User = "user"
    cwd: str = "/mnt/data"
    sudo: bool = False  # whether programs of `user` may run others as root
    owner: str = "local"
    on_deadline: OnDeadline = "kill"
    pause_memory: bool = True  # whether the pause at its deadline keeps its memory
    auto_resume: bool = False  # whether any use of the paused sandbox resumes it
    notes: dict[str, str] = {}  # a dialect's own words about it, kept as long as it is known
    volumes: dict[str, str] = {}  # named volumes of the owner's: by path, the id or name of each

    def __post_init__(self) -> None:
        if not _TEMPLATE_NAME.fullmatch(self.template):
            raise errors.TemplateNotFound(f"{self.template!r} is not a template name: use NAME or NAME@VERSION")
        check_environment(self.env)
        check_metadata(self.metadata)
        check_seconds("lifetime", self.lifetime_seconds)


def check_seconds(name: str, value: float | None) -> None:
    """Raises InvalidRequest unless `value` is None or a positive, finite number of seconds."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise errors.InvalidRequest(f"{name} must be a positive number of seconds, not {value!r}")


def check_environment(env: dict[str, str]) -> None:
    """Raises InvalidRequest if a name or value could not be in an environment block."""
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise errors.InvalidRequest(f"environment variable {name!r} must be a string with a string value")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise errors.InvalidRequest(
                f"environment variable {name!r} has a name or value that no environment can hold"
            )
        try:
            size = len((name + value).encode()) + 2
        except UnicodeEncodeError:
            raise errors.InvalidRequest(f"environment variable {name!r} is not valid Unicode") from None
        if size > MAX_STRING_BYTES:
            raise errors.InvalidRequest(
                f"environment variable {name[:100]!r} has {size} bytes, which is over the {MAX_STRING_BYTES} that "
                "programs can be given: put its value into a file"
            )
    check_command_size((), env)


def check_metadata(metadata: dict[str, str]) -> None:
    """Raises InvalidRequest unless these are few, short pairs of strings."""
    if len(metadata) > MAX_METADATA_PAIRS:
        raise errors.InvalidRequest(
            f"a sandbox can have {MAX_METADATA_PAIRS} pairs of metadata, not {len(metadata)}: put the rest into a file"
        )
    size = 0
    for name, value in metadata.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise errors.InvalidRequest("metadata must have strings as names and values")
        try:
            size += len(name.encode()) + len(value.encode())
        except UnicodeEncodeError:
            raise errors.InvalidRequest("metadata must be valid Unicode") from None
    if size > MAX_METADATA_BYTES:
        raise errors.InvalidRequest(
            f"metadata of {size} bytes, names and values together, are over the limit of {MAX_METADATA_BYTES} bytes "
            "(16 KiB): put long values into a file"
        )


def check_command_size(words: Sequence[str], env: Mapping[str, str]) -> None:
    """Raises InvalidRequest if a command's arguments and environment, which must be strings, are too long together."""
    texts = [*words, *env, *env.values()]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts) + len(words) + 2 * len(env)
    if size > MAX_COMMAND_BYTES:
        raise errors.InvalidRequest(
            f"arguments and environment of {size} bytes are over the limit of {MAX_COMMAND_BYTES} bytes (1 MiB): put "
            "long values into a file"
        )


def check_command_words(words: Sequence[str]) -> None:
    """Raises InvalidRequest unless a program can be given these arguments."""
    if not words or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise errors.InvalidRequest("a command must be a string, or strings, without NUL characters")
    try:
        longest = max(len(word.encode()) for word in words)
    except UnicodeEncodeError:
        raise errors.InvalidRequest("a command must be valid Unicode") from None
    if longest >= MAX_STRING_BYTES:
        raise errors.InvalidRequest(f"an argument can have {MAX_STRING_BYTES} bytes: put {longest} bytes into a file")


def check_terminal_size(size: tuple[int, int]) -> None:
    """Raises InvalidRequest unless a terminal can have so many rows and columns."""
    if len(size) != 2 or not all(type(side) is int and 0 < side < 1 << 16 for side in size):
        raise errors.InvalidRequest(f"a terminal needs rows and columns from 1 to 65535, not {size!r}")


def check_user(user: object) -> None:
    """Raises InvalidRequest unless `user` is None or one of a sandbox's users."""
    if user is not None and not (isinstance(user, str) and user in get_args(User)):
        raise errors.InvalidRequest(f"there is no user {user!r} in a sandbox: use {' or '.join(get_args(User))}")


def check_mode(mode: object) -> None:
    """Raises InvalidRequest unless `mode` is None or the permission bits of a file."""
    if mode is None:
        return
    if type(mode) is not int or not 0 <= mode <= 0o7777:
        raise errors.InvalidRequest(f"mode must be a number between 0 and 0o7777, such as 0o644, not {mode!r}")


def check_cwd(cwd: object) -> None:
    """Raises InvalidPath unless `cwd` is None or a path that `sandbox_path` accepts."""
    if cwd is not None:
        sandbox_path(cwd, "/")


def sandbox_path(path: object, cwd: str) -> str:
    """An absolute path for the guest's init; relative ones are below `cwd`. Raises InvalidPath."""
    if not isinstance(path, str):
        raise errors.InvalidPath(f"a path must be a string, not {type(path).__name__}")
    if not path:
        raise errors.InvalidPath("a path must not be empty")
    if "\0" in path:
        raise errors.InvalidPath(f"a path cannot hold a NUL character: {path!r}")
    try:
        size = len(path.encode())
    except UnicodeEncodeError:
        raise errors.InvalidPath(f"a path must be valid Unicode: {path!r}") from None
    if size > MAX_PATH:
        raise errors.InvalidPath(f"a path can have {MAX_PATH} bytes, not {size}")
    return posixpath.join(cwd, path)


def check_input_line(line: object) -> None:
    """Raises InvalidRequest unless `line` can be an answer to `input()`."""
    if not isinstance(line, str):
        raise errors.InvalidRequest(f"an answer to input() must be a string, not {type(line).__name__}")
    size = len(line.encode("utf-8", "surrogatepass"))
    if size > MAX_LINE_BYTES:
        raise errors.InvalidRequest(
            f"an answer to input() can have {MAX_LINE_BYTES} bytes (1 MiB), not {size}: put it into a file"
        )


def check_snapshot_name(name: str) -> None:
    """Raises InvalidRequest unless a snapshot can have that name: one that could be a template's."""
    if not isinstance(name, str) or not _SNAPSHOT_NAME.fullmatch(name):
        raise errors.InvalidRequest(
            f"{name!r} cannot name a snapshot: use up to 128 letters, digits, '.', '_', '/', ':' and '-', a letter or "
            "digit first"
        )


class Completions(Struct):
    """Completions at a place in code: each match replaces the characters from `start` to `end`."""

    start: int
    end: int
    matches: tuple[str, ...] = ()
    types: tuple[str, ...] = ()  # of each match, such as "function" or "magic"; empty where it is unknown


class CodeDescription(Struct):
    """The documentation of a name in code."""

    found: bool
    text: str = ""


class CodeCheck(Struct):
    """Whether code is a whole cell. `indent`: the spaces that the next line of an incomplete one begins with."""

    status: Literal["complete", "incomplete", "invalid", "unknown"]
    indent: int = 0


class ImageOrigin(Struct):
    """The image that a template was imported from."""

    source: str  # the file or directory, and the name in it
    digest: str  # of the image's configuration, or of a root's files
    own_python: bool  # whether it has one; then `python` and `python_prefix` of the template are paths in the image
    path: str  # its PATH
    shell: str
    loader: str = ""  # of the host's Python, where the image has none: a path on the host
    loader_sha256: str = ""


class Template(Struct):
    """One immutable version of a template, as it lies in the data directory."""

    name: str
    version: str  # hex digest of lock, template.toml, Python and platform
    python: str  # the interpreter's path on the host
    python_version: str  # "3.11.7"
    python_prefix: str  # sys.base_prefix of that interpreter
    root: str  # directory that holds env/, template.toml, lock.txt
    packages: tuple[str, ...] = ()  # "numpy==2.1.0", ... as locked
    imports: tuple[str, ...] = ()  # modules that the zygote imports before it forks
    env: dict[str, str] = {}
    limits: Limits = Limits()
    network: NetworkPolicy | None = None  # of sandboxes that ask for none
    created_at: float = 0.0
    size_bytes: int = 0
    image: ImageOrigin | None = None

    @property
    def ref(self) -> str:
        return f"{self.name}@{self.version[:12]}"


class SymlinkTarget(Struct):
    """The final target of a symlink."""

    path: str  # without any symlink in it; that of the link itself where it leads to nothing
    kind: FileKind | None  # None where it leads to nothing
    mode: int


class FileInfo(Struct):
    path: str
    name: str
    kind: FileKind
    size_bytes: int
    mode: int
    owner: str
    group: str
    modified_at: float
    target: str | None = None  # the target of a symlink
    leads_to: SymlinkTarget | None = None
    attributes: dict[str, str] = {}  # extended attributes, without the `user.` before their names


class FileAttributes(Struct):
    """Extended attributes for a file that is written: `user.SPACE.NAME`. All others of that space are removed."""

    space: str
    values: dict[str, str]

    def __post_init__(self) -> None:
        for name in (self.space, *self.values):
            if not name or "\0" in name or len(name.encode("utf-8", "surrogatepass")) > 200:
                raise errors.InvalidRequest(f"{name[:100]!r} cannot be the name of an attribute of a file")


class FileChange(Struct):
    """A change seen by a watch. `path` is absolute."""

    kind: Literal["created", "written", "removed", "renamed", "attributes"]
    path: str


class Usage(Struct, gc=False):
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    memory_peak_bytes: int = 0


class SandboxInfo(Struct):
    id: str
    template: str  # NAME@VERSION
    owner: str
    state: Literal["running", "paused", "ended"]
    created_at: float
    deadline_at: float | None
    metadata: dict[str, str]
    limits: Limits
    memory_and_space_bytes: int = 0  # the one bound on memory, files and kernel objects; without those of volumes
    ended_at: float | None = None
    end_reason: str | None = None
    paused_at: float | None = None
    pause_memory: bool | None = None  # of one that is paused: whether its memory is kept as well
    on_deadline: OnDeadline = "kill"
    auto_resume: bool = False
    notes: dict[str, str] = {}
    volumes: dict[str, str] = {}  # by path
    key_id: str = ""  # of the key that it was made with; empty where none was needed


class VolumeInfo(Struct):
    id: str
    name: str
    owner: str
    size_bytes: int  # that it can hold
    created_at: float


class Launch(Struct):
    """The launch settings of sandboxes from a template that was built by steps."""

    user: User = "user"  # of the start command, and of programs for which clients name no user
    cwd: str = "/home/user"
    start_command: str | None = None  # runs from the beginning on
    ready_command: str | None = None  # a sandbox is there when this one succeeds


class Snapshot(Struct):
    """The files of a sandbox, with the environment and limits of its programs.

    New sandboxes can be made from it.
    """

    id: str
    owner: str
    sandbox: str  # of which it was made
    template: str  # NAME@VERSION
    image: str  # where its files are kept
    bytes: int
    created_at: float
    name: str | None = None
    env: dict[str, str] = {}
    limits: Limits = Limits()
    network: NetworkPolicy | None = None  # without secrets
    volumes: dict[str, str] = {}  # that the sandbox had, by path; without their contents
    launch: Launch | None = None  # of a template that was built by steps, and of a part of one
    layer: str | None = None  # a digest of the base and the steps that made it
    of_build: bool = False  # whether it is all that a build has made

    @property
    def info(self) -> SnapshotInfo:
        """The public part of it."""
        return SnapshotInfo(
            id=self.id,
            name=self.name,
            owner=self.owner,
            sandbox=self.sandbox,
            template=self.template,
            size_bytes=self.bytes,
            created_at=self.created_at,
            limits=self.limits,
        )


class Mark(Struct):
    """A checkpoint of a context: a moment to which the context can be rolled back, any number of times."""

    id: str
    created_at: float


def check_copy_count(count: object) -> None:
    """Raises InvalidRequest unless a context can be copied so many times; how much room there is, its sandbox says."""
    if type(count) is not int or count < 1:
        raise errors.InvalidRequest(f"a context is copied once or more often, not {count!r} times")


class SnapshotInfo(Struct):
    """A snapshot of a sandbox: give it, its id or its name as a template."""

    id: str
    name: str | None
    owner: str
    sandbox: str  # of which it was made
    template: str  # NAME@VERSION
    size_bytes: int
    created_at: float
    limits: Limits


class Principal(Struct):
    """The authenticated caller: the owner of the objects it creates, and its role."""

    owner: str
    role: Literal["user", "admin"] = "user"
    key_id: str = ""  # which key it was; never the key


class ProcessInfo(Struct):
    id: str
    pid: int  # inside the sandbox
    command: str
    user: str
    cwd: str
    started_at: float


# The variables of a context, inspected without running a cell.

VariableKind = Literal["variable", "function", "class", "module"]


class Variable(Struct, kw_only=True):
    """One variable. Properties that only the program's own code could compute are left out."""

    name: str
    kind: VariableKind = "variable"
    type: str  # `int`, `numpy.ndarray`, `pandas.DataFrame`, `__main__.Point`
    shape: tuple[int, ...] | None = None  # of arrays and frames
    length: int | None = None  # of values that have one
    dtype: str | None = None
    columns: tuple[str, ...] | None = None  # of frames, the first ones
    size_bytes: int | None = None  # shallow: a list's own, without its elements; an array's with its data
    preview: str = ""


class Variables(list[Variable]):
    """A context's variables, in the order in which they were made. `more`: how many others there are."""

    def __init__(self, variables: Iterable[Variable] = (), more: int = 0):
        super().__init__(variables)
        self.more = more

    def __repr__(self) -> str:
        lines = [f"{each.name}: {each.type}{_format_shape(each)} = {each.preview}" for each in self]
        return "\n".join([*lines, *self._more_note()]) or "there are no variables"

    def _more_note(self) -> list[str]:
        return [f"({self.more} more)"] if self.more else []

    def _repr_html_(self) -> str:
        """For notebooks. All text comes from a program, so everything is escaped."""
        rows = [html_table_row("th", ("name", "type", "shape", "bytes", "preview"))]
        for each in self:
            size = "" if each.size_bytes is None else each.size_bytes
            rows.append(html_table_row("td", (each.name, each.type, _format_shape(each), size, each.preview)))
        return f"<table>{''.join(rows)}</table>{''.join(map(html.escape, self._more_note()))}"


def _format_shape(variable: Variable) -> str:
    if variable.shape is not None:
        return f"({', '.join(map(str, variable.shape))})"
    return "" if variable.length is None else f"[{variable.length}]"


def html_table_row(cell: str, values: Iterable[object]) -> str:
    """An HTML table row, escaped."""
    return "<tr>" + "".join(f"<{cell}>{html.escape(str(each))}</{cell}>" for each in values) + "</tr>"


# Tools that live with a client and that code in a sandbox may call: their definitions and identifiers.
#
# A name of a tool can be anything; code knows it by an identifier. The rules are those of LibreChat's clients,
# which tell their models the same: `-` and blanks become `_` (in bash `.` too), characters that no identifier
# can have are dropped, one that would begin with a digit gets `_` before it, and one that cannot be a
# function's gets `_tool` behind it. Others take the place of a function of the same name.

ToolLanguage = Literal["python", "bash"]

TOOL_LANGUAGES: tuple[ToolLanguage, ...] = ("python", "bash")
MAX_TOOLS = 100
MAX_TOOL_NAME = 256
MAX_TOOL_RESULT_BYTES = 5 << 20
TOOL_ERROR_NAME = "ToolExecutionError"

_BLANK_CHARACTERS = {"python": re.compile(r"[-\s]"), "bash": re.compile(r"[-\s.]")}
_NON_IDENTIFIER = re.compile(r"[^a-zA-Z0-9_]")
_BASH_WORDS = """
    if then else elif fi case esac for while until do done in function select time coproc
    alias bg bind break builtin caller cd command compgen complete compopt continue declare dirs disown echo enable eval
    exec exit export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf pushd pwd read
    readarray readonly return set shift shopt source suspend test times trap true type typeset ulimit umask unalias
    unset wait
"""
_RESERVED_NAMES = {
    "python": frozenset({*keyword.kwlist, TOOL_ERROR_NAME, "asyncio"}),  # the last two every program with tools has
    "bash": frozenset(_BASH_WORDS.split()),
}
_OWN_NAMES = {"python": re.compile(r"__.*__"), "bash": re.compile(r"_(ptc|cloche)_.*")}


class ToolDefinition(Struct):
    """A tool that a program may call. `parameters` is a JSON schema of its argument object."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class ToolCall(Struct):
    """One call of a program, which waits for its result. `id` is new in each run, from "call_001" on."""

    id: str
    name: str  # the tool's own
    input: dict[str, Any]


class ToolResult(Struct):
    """The result of a call: any JSON value, or, with `error`, the reason why there is none."""

    call_id: str
    result: Any = None
    error: str | None = None


def tool_identifier(name: str, language: ToolLanguage = "python") -> str:
    """The identifier of the tool in code. Raises InvalidRequest where nothing of the name is left."""
    made = _NON_IDENTIFIER.sub("", _BLANK_CHARACTERS[language].sub("_", name))
    if not made:
        raise errors.InvalidRequest(f"a tool named {name!r} cannot be called: give it a name with letters or digits")
    if made[0].isdigit():
        made = f"_{made}"
    is_taken = made in _RESERVED_NAMES[language] or _OWN_NAMES[language].fullmatch(made) is not None
    return f"{made}_tool" if is_taken else made


def tools_by_identifier(
    tools: Iterable[ToolDefinition], language: ToolLanguage = "python"
) -> dict[str, ToolDefinition]:
    """Tools by their identifiers. Raises InvalidRequest for too many, and for two with the same identifier."""
    known: dict[str, ToolDefinition] = {}
    for tool in tools:
        _check_tool(tool)
        name = tool_identifier(tool.name, language)
        if name in known:
            raise errors.InvalidRequest(
                f"the tools {known[name].name!r} and {tool.name!r} would both be called {name!r}: rename one"
            )
        known[name] = tool
    if len(known) > MAX_TOOLS:
        raise errors.InvalidRequest(f"a program can have {MAX_TOOLS} tools, not {len(known)}: offer it fewer")
    return known


def check_tool_language(language: str) -> ToolLanguage:
    """Raises InvalidRequest for a language in which programs cannot call tools."""
    for known in TOOL_LANGUAGES:
        if language == known:
            return known
    raise errors.InvalidRequest(
        f"programs in {language} cannot call tools: those in {' and '.join(TOOL_LANGUAGES)} can"
    )


def _check_tool(tool: ToolDefinition) -> None:
    if not isinstance(tool.name, str) or "\0" in tool.name or len(tool.name) > MAX_TOOL_NAME:
        raise errors.InvalidRequest(f"a tool needs a name of at most {MAX_TOOL_NAME} characters, without NUL")
    if not isinstance(tool.description, str):
        raise errors.InvalidRequest(f"the description of the tool {tool.name!r} must be text")
    if not isinstance(tool.parameters, dict):
        raise errors.InvalidRequest(f"the parameters of the tool {tool.name!r} must be a JSON schema: an object")
