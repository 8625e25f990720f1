"""Configuration: read once, handed down as a value.

Flags > `CLOCHE_*` variables > a TOML file (`--config`, `CLOCHE_CONFIG`, or `./cloche.toml`) > defaults. A key has one
name everywhere: `limits.default.memory_bytes` in the file is `CLOCHE_LIMITS_DEFAULT_MEMORY_BYTES` in the environment.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from cloche import errors
from cloche.config import librechat
from cloche.config.bounds import (
    SECTION_KEYS,
    KibOrMore,
    PositiveFloat,
    PositiveInt,
    Section,
    describe_violation,
    find_bounds,
    list_fields,
)
from cloche.config.librechat import LibreChatConfig
from cloche.config.sections import (
    AuditConfig,
    CapacityConfig,
    DiskConfig,
    McpConfig,
    NetworkConfig,
    OpenTerminalConfig,
    PackagesConfig,
    QuotaDefaults,
    RunApisConfig,
    RunsConfig,
    UpstreamConfig,
    VolumeLimits,
)
from cloche.config.sections import HistoryLimits as HistoryLimits
from cloche.config.sections import RetentionLimits as RetentionLimits
from cloche.model import GIB, KIB, MIB, Limits, Struct

# Restrictions on a `./cloche.toml` that was not named explicitly: it may come from a foreign repository.

LOCAL_CONFIG_FILE = "cloche.toml"
LOCAL_FILE_ORIGIN = f"file ./{LOCAL_CONFIG_FILE}"  # the origin of values from such a file

# Keys that set the reach of sandboxes. All other keys of these tables deny, or limit.
_NETWORK_WIDENING_KEYS = frozenset({"network.allow", "network.default", "packages.enabled", "packages.allow"})
_NETWORK_SOURCE_KEYS = frozenset({"network.internal", "network.hosts", "packages.pypi", "packages.npm"})


def environment_variable(key: str) -> str:
    """The environment variable of a key."""
    return "CLOCHE_" + key.upper().replace(".", "_")


def check_local_key(file: Path, key: str, value: Any) -> None:
    """Raises InvalidConfig for keys that mount directories, disable isolation, redirect traffic or add trust."""
    if (key, value) == ("backend", "plain-unsafe"):
        what, flag = "turn isolation off", "--backend, CLOCHE_BACKEND"
    elif key == "data_dir":
        what, flag = "choose data_dir, from which templates are taken", "--data-dir, CLOCHE_DATA_DIR"
    elif key in _NETWORK_SOURCE_KEYS:
        what, flag = f"set {key}, which says where names, packages or private addresses lead", environment_variable(key)
    elif key.startswith("librechat.jwt."):
        what, flag = f"set {key}, which sets the tokens that this server accepts", environment_variable(key)
    else:
        return
    raise errors.InvalidConfig(
        f"a {file} that merely lies in this directory cannot {what}: ask for it with {flag}, or a file that you name "
        "with --config"
    )


def check_local_file_owner(file: Path) -> None:
    """Raises InvalidConfig if the file in the current directory (say /tmp) belongs to another user."""
    if file.stat().st_uid not in (0, os.geteuid()):
        raise errors.InvalidConfig(f"./{file} belongs to another user: remove it, or name it with --config to use it")


def refuse_local_upstreams(origins: Mapping[str, str]) -> None:
    """Raises InvalidConfig if upstreams come from such a file; for commands that send prompts by themselves.

    The file could send a key of the environment, and every message, to its author.
    """
    if origins.get("upstream") == LOCAL_FILE_ORIGIN:
        raise errors.InvalidConfig(
            f"a {LOCAL_CONFIG_FILE} that merely lies in this directory cannot say where models are, since your "
            "messages and a "
            f"key of yours would go there: read it, and name it with `cloche --config ./{LOCAL_CONFIG_FILE} chat` to "
            "use it"
        )


def refuse_local_networks(origins: Mapping[str, str]) -> None:
    """Raises InvalidConfig if such a file widens the network access of sandboxes.

    For a process that is its own operator. It would let private data out. Keys that only deny or limit are
    accepted.
    """
    found = [
        key
        for key, origin in origins.items()
        if origin == LOCAL_FILE_ORIGIN and key in _NETWORK_WIDENING_KEYS | _NETWORK_SOURCE_KEYS
    ]
    if found:
        raise errors.InvalidConfig(
            f"a {LOCAL_CONFIG_FILE} that merely lies in this directory cannot set {found[0]} here, since it would "
            f"widen your sandboxes' network: read it, and name it with --config ./{LOCAL_CONFIG_FILE} or CLOCHE_CONFIG "
            "to use it"
        )


DEFAULT_ALIASES: Mapping[str, str] = {
    "code-interpreter-v1": "python",
    "base": "python",
    "opensandbox/code-interpreter:*": "python",
    "python:3*": "python",
    "e2bdev/*": "python",
    "ubuntu:*": "python",
}
"""Names that clients of other products send, and the template that they mean."""

NON_KEY_VARIABLES = frozenset(
    {"CLOCHE_CONFIG", "CLOCHE_URL", "CLOCHE_API_KEY"}
)  # CLOCHE_* variables that are no keys of this

_SECRET_KEYS = frozenset({"upstream", "packages.pypi", "packages.npm"}) | librechat.JWT_SECRET_KEYS
_FLAG_NAMES = {"packages.enabled": "--packages"}  # those that are not called as their key

_BEYOND_BOUNDS = re.compile(r"Expected `\w+` [<>]")  # msgspec's words

_BYTE_UNITS = {"": 1, "b": 1} | {
    name: size
    for letter, size in {"k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}.items()
    for name in (letter, f"{letter}ib")
}


class PoolConfig(Section):
    ready: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 2  # cells kept waiting per template


class SandboxLimits(Struct):
    default: Limits = Limits()
    maximum: Limits = Limits(
        memory_bytes=64 * GIB,
        cpus=64.0,
        processes=16384,
        open_files=65536,
        space_bytes=64 * GIB,
        output_bytes=1 * GIB,
        execution_seconds=86400.0,
    )

    def __post_init__(self) -> None:
        self.check(self.default)

    def check(self, limits: Limits) -> None:
        """Raises InvalidRequest if any of `limits` is over this host's maximum."""
        for name in Limits.__struct_fields__:
            asked, most = getattr(limits, name), getattr(self.maximum, name)
            if asked > most:
                raise errors.InvalidRequest(
                    f"limit {name} = {asked} is over the maximum {most}: ask for less, or raise limits.maximum.{name}"
                )


class LifetimeConfig(Section):
    max_seconds: PositiveFloat = 86400.0


class ServerConfig(Section):
    """`cloche serve`."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8000
    public_url: str = ""  # where clients reach it, if that is not http://HOST:PORT
    domain: str = ""  # {port}-{sandbox}.DOMAIN reaches a port of a sandbox
    tls_cert: str = ""
    tls_key: str = ""
    upload_bytes: PositiveInt = 256 * MIB  # of one request's body
    canary_seconds: PositiveFloat = 30.0  # between two canaries, while no client runs anything

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.tls_cert) != bool(self.tls_key):
            raise errors.InvalidRequest("server.tls_cert and server.tls_key go together: give both, or none")


class GatewayConfig(Section):
    """The loop between an upstream's model and sandboxes."""

    code_calls: PositiveInt = 25  # of one response
    execution_seconds: PositiveFloat = 120.0
    container_minutes: PositiveInt = 20  # of idleness, after which a container expires by default
    max_container_minutes: PositiveInt = 1440
    model_output_bytes: KibOrMore = 16 * KIB  # of one execution's output that the model is shown
    outputs_bytes: KibOrMore = 32 * MIB  # of outputs of code that one response keeps for its client
    turns_per_owner: PositiveInt = 200  # at once, those in the background not counted
    cite_new_files: bool = False  # every file that code made, not only those that the model links
    stored_days: PositiveFloat = 30.0  # how long responses, conversations and files of containers are kept
    capture: bool = False  # whether records of requests hold code, prompts and output


class Config(Struct):
    data_dir: str
    backend: Literal["namespaces", "gvisor", "plain-unsafe"] = "namespaces"
    pool: PoolConfig = PoolConfig()
    capacity: CapacityConfig = CapacityConfig()
    limits: SandboxLimits = SandboxLimits()
    lifetime: LifetimeConfig = LifetimeConfig()
    quotas: QuotaDefaults = QuotaDefaults()
    kept: RetentionLimits = RetentionLimits()
    volumes: VolumeLimits = VolumeLimits()
    history: HistoryLimits = HistoryLimits()
    audit: AuditConfig = AuditConfig()
    disk: DiskConfig = DiskConfig()
    server: ServerConfig = ServerConfig()
    gateway: GatewayConfig = GatewayConfig()
    network: NetworkConfig = NetworkConfig()
    packages: PackagesConfig = PackagesConfig()
    runs: RunsConfig = RunsConfig()
    run_apis: RunApisConfig = RunApisConfig()
    librechat: LibreChatConfig = LibreChatConfig()
    mcp: McpConfig = McpConfig()
    open_terminal: OpenTerminalConfig = OpenTerminalConfig()
    upstream: tuple[UpstreamConfig, ...] = ()
    # pattern -> template; those of the file are added to the built-in ones
    aliases: dict[str, str] = msgspec.field(default_factory=lambda: dict(DEFAULT_ALIASES))
    origins: dict[str, str] = {}  # key -> where its value came from, in words

    def items(self) -> Iterator[tuple[str, Any, str]]:
        """(key, value, origin) of every key, in the order of this class."""
        for key in CONFIG_KEYS:
            value: Any = self
            for part in key.split("."):
                value = getattr(value, part)
            yield key, value, self.origins.get(key, "default")


def for_embedded_use(config: Config) -> Config:
    """The configuration of a process that runs its own sandboxes: all hosts, unless `network.allow` is set.

    Such a process is its own operator. Raises as `refuse_local_networks` does.
    """
    refuse_local_networks(config.origins)
    if "network.allow" in config.origins:
        return config
    network = msgspec.structs.replace(config.network, allow=("*:*",))
    return msgspec.structs.replace(config, network=network)


class Setting(NamedTuple):
    """One key's value from one source."""

    key: str
    value: Any
    origin: str


def _list_keys(struct: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in list_fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _list_keys(field.type, f"{prefix}{field.name}.")
        elif field.name != "origins":
            yield prefix + field.name, field.type


CONFIG_KEYS: dict[str, Any] = dict(_list_keys(Config))
"""Every key, dotted, and its type."""

SECTION_KEYS.update({field.type: field.name for field in list_fields(Config) if isinstance(field.type, type)})

_KEY_BY_VARIABLE = {environment_variable(key): key for key in CONFIG_KEYS}


def load_config(
    path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
) -> Config:
    """Loads the configuration. `flags` are dotted keys; None means not given.

    Raises InvalidConfig that names the key, its origin and the remedy: for an unknown key (with the nearest known
    one), for a bad value, and for a file that cannot be read.
    """
    settings = [Setting("data_dir", default_data_dir(environ), "default")]
    settings += _from_file(path, environ)
    settings += _from_environ(environ)
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    settings += [Setting(_check_key(key, "flag"), value, f"flag {_flag_name(key)}") for key, value in given.items()]
    return _build_config(settings)


def _flag_name(key: str) -> str:
    return _FLAG_NAMES.get(key) or "--" + key.rpartition(".")[2].replace("_", "-")


def default_data_dir(environ: Mapping[str, str] = os.environ) -> str:
    if os.geteuid() == 0:
        return "/var/lib/cloche"
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(environ.get("XDG_DATA_HOME") or os.path.join(home, ".local/share"), "cloche")


def _build_config(settings: list[Setting]) -> Config:
    tree: dict[str, Any] = {}
    origins = {}
    for setting in settings:
        *parents, name = setting.key.split(".")
        table = tree
        for parent in parents:
            table = table.setdefault(parent, {})
        table[name] = _convert_value(setting)
        origins[setting.key] = setting.origin
    tree["data_dir"] = os.path.abspath(os.path.expanduser(tree["data_dir"]))
    tree["aliases"] = {**DEFAULT_ALIASES, **tree.get("aliases", {})}
    _fill_limits(tree.get("limits", {}))
    try:
        return msgspec.convert({**tree, "origins": origins}, Config)
    except (msgspec.ValidationError, errors.InvalidRequest) as error:
        raise errors.InvalidConfig(describe_with_origin(str(error), origins)) from None


def describe_with_origin(problem: str, origins: Mapping[str, str]) -> str:
    """The problem with the origin of the key that it names, without msgspec's own path into the tree."""
    said, _, place = problem.partition(" - at `$")
    named = [key for key in origins if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", said)]
    if named or not place:
        return f"{said} ({origins[named[0]]})" if named else said
    above = place.strip(".`") + "."
    below = [key for key in origins if key.startswith(above) and key.rpartition(".")[2] in said.split()]
    return f"{below[0]} ({origins[below[0]]}): {said}" if below else said


def _fill_limits(limits: dict[str, Any]) -> None:
    """Fills the keys that [limits.maximum] leaves out with our maximum, not with the default of one sandbox."""
    if "maximum" in limits:
        limits["maximum"] = {**msgspec.structs.asdict(SandboxLimits().maximum), **limits["maximum"]}


def _convert_value(setting: Setting) -> Any:
    key, value, origin = setting
    if key.endswith("_bytes") and isinstance(value, str):
        value = _convert_bytes(setting)
    if isinstance(value, str) and not origin.startswith("file "):
        value = _split_list(key, value)
    try:
        # Variables are always strings, and flags may be; a file has types and must use them.
        return msgspec.convert(value, CONFIG_KEYS[key], strict=origin.startswith("file "))
    except (msgspec.ValidationError, errors.InvalidRequest) as error:
        raise errors.InvalidConfig(_describe_problem(key, value, origin, str(error))) from None


def _describe_problem(key: str, value: Any, origin: str, problem: str) -> str:
    bounds = find_bounds(CONFIG_KEYS[key])
    if bounds and _BEYOND_BOUNDS.match(problem):
        return f"{describe_violation(key, value, bounds)} ({origin})"
    named = key if key in _SECRET_KEYS else f"{key} = {value!r}"
    return f"{named} ({origin}): {problem}{_list_syntax_hint(key, value)}"


def _split_list(key: str, text: str) -> Any:
    """Parses a list from the environment, a string: separated by commas; hosts are `NAME=ADDRESS` with spaces."""
    if CONFIG_KEYS[key] == tuple[str, ...]:
        return [each.strip() for each in text.split(",") if each.strip()]
    if key == "network.hosts":
        return {name: address for name, _, address in (each.partition("=") for each in text.split())}
    return text


def _list_syntax_hint(key: str, value: Any) -> str:
    if key == "upstream" and isinstance(value, dict):
        return ": write [[upstream]], with two brackets"
    if CONFIG_KEYS[key] != tuple[str, ...] or not isinstance(value, str):
        return ""
    return f": write a list, [{'...' if key in _SECRET_KEYS else repr(value)}]"


def _convert_bytes(setting: Setting) -> int:
    size = parse_bytes(str(setting.value))
    if size is None:
        problem = 'must be bytes, or like "512MiB" or "2GiB"'
        raise errors.InvalidConfig(f"{setting.key} = {setting.value!r} ({setting.origin}) {problem}")
    return size


def parse_bytes(text: str) -> int | None:
    """Parses a size such as "1048576", "512MiB" or "2g"; None if the text is not a size."""
    match = re.fullmatch(r"(\d{1,20})\s*([a-z]*)", text.strip().lower(), re.ASCII)
    return int(match[1]) * _BYTE_UNITS[match[2]] if match and match[2] in _BYTE_UNITS else None


def _from_environ(environ: Mapping[str, str]) -> Iterator[Setting]:
    for name, key in librechat.find_codeapi_variables(environ):
        yield Setting(key, environ[name], f"environment variable {name}")
    for name in sorted(environ):
        if not name.startswith("CLOCHE_") or name in NON_KEY_VARIABLES:
            continue
        if name not in _KEY_BY_VARIABLE:
            raise errors.InvalidConfig(
                f"unknown environment variable {name}; {_suggest_name(name, list(_KEY_BY_VARIABLE))}"
            )
        if environ[name]:  # empty means unset, as in most programs
            yield Setting(_KEY_BY_VARIABLE[name], environ[name], f"environment variable {name}")


def _from_file(path: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> Iterator[Setting]:
    named = path or environ.get("CLOCHE_CONFIG")
    file = Path(named or LOCAL_CONFIG_FILE)
    if not named and not file.exists():
        return
    if not named:
        check_local_file_owner(file)
    for key, value in _flatten_table(_read_toml(file)):
        if not named:
            check_local_key(file, key, value)
        yield Setting(_check_key(key, str(file)), value, f"file {file}" if named else LOCAL_FILE_ORIGIN)


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidConfig(
            f"cannot read {file}: {error}; check the path given by --config or CLOCHE_CONFIG"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise errors.InvalidConfig(f"{file} is not TOML: {error}") from None


def _flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in CONFIG_KEYS:
            yield from _flatten_table(value, key + ".")
        else:
            yield key, value


def _check_key(key: str, origin: str) -> str:
    if key in CONFIG_KEYS:
        return key
    raise errors.InvalidConfig(f"unknown key {key} ({origin}); {_suggest_name(key, list(CONFIG_KEYS))}")


def _suggest_name(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return f"did you mean {near[0]}?" if near else "`cloche config` lists the keys"
