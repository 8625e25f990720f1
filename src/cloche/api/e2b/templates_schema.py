"""Template builds on the wire: requests and responses. Pure; raises InvalidRequest and NotSupported."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from cloche import errors
from cloche.api.dialect import Json, NotSupported, decode_json_body, format_timestamp
from cloche.api.e2b.sandboxes_schema import ENVD_VERSION, encode_size_limits, parse_whole_number
from cloche.engine.builds.build import MAX_PATH_BYTES, BuildPlan, BuildStep, StepKind
from cloche.model import MAX_STRING_BYTES, MIB, Limits, Struct
from cloche.store.builds import BuildLogEntry, BuiltTemplate, TemplateBuild, TemplateTag

MAX_STEPS = 500
MAX_TAGS = 100  # of one request
MAX_NAME = 256  # characters of a name with a tag
MAX_SIZE = 1 << 40  # of a number that says how large something is to be: more is no such number
MAX_LOG_PAGE = 100
LOG_LEVELS = ("debug", "info", "warn", "error")

_HASH = re.compile(r"[0-9a-f]{32,128}")
_MODE = re.compile(r"[0-7]{0,5}")
_ARGS: dict[StepKind, tuple[int, int]] = {  # how many a step has
    "RUN": (1, 2),
    "COPY": (2, 4),
    "ENV": (2, 2000),
    "WORKDIR": (1, 1),
    "USER": (1, 2),
}
_ARG_BYTES: dict[StepKind, int] = {  # that each of them can have
    "RUN": MAX_STRING_BYTES - 1,
    "COPY": MAX_PATH_BYTES,
    "ENV": MAX_STRING_BYTES - 1,
    "WORKDIR": MAX_PATH_BYTES,
    "USER": 256,
}


class TemplateBuildBody(Struct):
    """The body of `POST /v3/templates`. The names are E2B's."""

    name: str | None = None
    alias: str | None = None  # what older clients call the name
    tags: list[str] | None = None
    cpuCount: int | None = None
    memoryMB: int | None = None


class TemplateStepBody(Struct):
    type: str
    args: list[str] | None = None
    filesHash: str | None = None
    force: bool | None = None


class StartBuildBody(Struct):
    """The body of `POST /v2/templates/{id}/builds/{build}`."""

    fromImage: str | None = None
    fromTemplate: str | None = None
    fromImageRegistry: Any = None
    force: bool | None = None
    steps: list[TemplateStepBody] | None = None
    startCmd: str | None = None
    readyCmd: str | None = None


class TagTemplateBody(Struct):
    target: str
    tags: list[str]


class UntagTemplateBody(Struct):
    name: str
    tags: list[str]


class TemplateBuildRequest(Struct):
    name: str
    tags: tuple[str, ...]
    cpus: int | None
    memory_mb: int | None

    def limits(self, default: Limits) -> Limits:
        """Raises InvalidRequest."""
        for name, number in (("cpuCount", self.cpus), ("memoryMB", self.memory_mb)):
            if number is not None and not 0 <= number <= MAX_SIZE:
                raise errors.InvalidRequest(f"{name}: no sandbox can have so much or so little")
        return Limits(
            memory_bytes=default.memory_bytes if self.memory_mb is None else self.memory_mb * MIB,
            cpus=default.cpus if self.cpus is None else float(self.cpus),
            processes=default.processes,
            open_files=default.open_files,
            space_bytes=default.space_bytes,
            output_bytes=default.output_bytes,
            execution_seconds=default.execution_seconds,
        )


def decode_build_request(body: bytes) -> TemplateBuildRequest:
    message = decode_json_body(body, TemplateBuildBody)
    name = message.name or message.alias
    if not name:
        raise errors.InvalidRequest("name: it is missing; give the template a name, or NAME:TAG")
    _check_name_length("name", name)
    return TemplateBuildRequest(
        name=name, tags=tuple(_check_tags(message.tags or ())), cpus=message.cpuCount, memory_mb=message.memoryMB
    )


def decode_tag_request(body: bytes) -> TagTemplateBody:
    message = decode_json_body(body, TagTemplateBody)
    _check_name_length("target", message.target)
    _check_tags(message.tags)
    return message


def decode_untag_request(body: bytes) -> UntagTemplateBody:
    message = decode_json_body(body, UntagTemplateBody)
    _check_name_length("name", message.name)
    _check_tags(message.tags)
    return message


def _check_tags(tags: Sequence[str]) -> Sequence[str]:
    if len(tags) > MAX_TAGS:
        raise errors.InvalidRequest(f"tags: one request can have {MAX_TAGS}, not {len(tags)}")
    for tag in tags:
        _check_name_length("tags", tag)
    return tags


def _check_name_length(field: str, name: str) -> None:
    if len(name) > MAX_NAME:
        raise errors.InvalidRequest(f"{field}: a name of {len(name)} characters is too long: {MAX_NAME} are allowed")


def decode_build_plan(body: bytes) -> BuildPlan:
    """The build plan that the body requests."""
    message = decode_json_body(body, StartBuildBody)
    if message.fromImageRegistry:
        raise NotSupported("fromImageRegistry: this server takes no images from registries; build from a template")
    if bool(message.fromImage) == bool(message.fromTemplate):
        raise errors.InvalidRequest("fromImage, fromTemplate: give one of them")
    _check_name_length("fromImage, fromTemplate", message.fromImage or message.fromTemplate or "")
    _check_command("startCmd", message.startCmd or "")
    _check_command("readyCmd", message.readyCmd or "")
    steps = message.steps or []
    if len(steps) > MAX_STEPS:
        raise errors.InvalidRequest(f"steps: a template can have {MAX_STEPS}, not {len(steps)}")
    return BuildPlan(
        base=message.fromTemplate or _normalize_image_name(message.fromImage or ""),
        steps=tuple(_decode_build_step(number, step) for number, step in enumerate(steps, 1)),
        start_command=message.startCmd,
        ready_command=message.readyCmd,
        force=bool(message.force) or any(step.force for step in steps),
        fresh_from=0 if message.force else next((index for index, step in enumerate(steps) if step.force), None),
    )


def _normalize_image_name(name: str) -> str:
    """The image name as aliases use it: without the default registry and without a digest."""
    return name.removeprefix("docker.io/").removeprefix("library/").partition("@")[0]


def _decode_build_step(number: int, step: TemplateStepBody) -> BuildStep:
    where = f"steps[{number - 1}]"
    kinds = [kind for kind in _ARGS if kind == step.type.upper()]
    if not kinds:
        raise errors.InvalidRequest(f"{where}: there is no step {step.type[:40]!r}: use {', '.join(_ARGS)}")
    kind, args = kinds[0], step.args or []
    least, most = _ARGS[kind]
    if not least <= len(args) <= most or (kind == "ENV" and len(args) % 2):
        raise errors.InvalidRequest(f"{where}: {kind} has {len(args)} arguments, which is not what it takes")
    if any("\0" in arg for arg in args) or not args[0].strip():
        raise errors.InvalidRequest(f"{where}: an argument of {kind} is empty, or has a NUL character")
    _check_argument_length(where, args, _ARG_BYTES[kind])
    if kind == "COPY":
        _check_copy_step(where, args, step.filesHash)
    return BuildStep(kind=kind, args=tuple(args), files=step.filesHash if kind == "COPY" else None)


def _check_command(field: str, command: str) -> None:
    _check_argument_length(field, [command], MAX_STRING_BYTES - 1)
    if "\0" in command:
        raise errors.InvalidRequest(f"{field}: it has a NUL character")


def _check_argument_length(where: str, args: Sequence[str], max_bytes: int) -> None:
    longest = max(len(arg.encode()) for arg in args)
    if longest > max_bytes:
        raise errors.InvalidRequest(f"{where}: {longest} bytes are too many: {max_bytes} are allowed; upload a file")


def _check_copy_step(where: str, args: Sequence[str], digest: str | None) -> None:
    if digest is None:
        raise errors.InvalidRequest(f"{where}: filesHash is missing: COPY needs files that were uploaded")
    check_files_hash(digest)
    if args[3:] and not _MODE.fullmatch(args[3]):
        raise errors.InvalidRequest(f"{where}: {args[3][:20]!r} is not a mode like 0755")


def check_files_hash(text: str) -> str:
    """Raises InvalidRequest."""
    if not _HASH.fullmatch(text):
        raise errors.InvalidRequest(f"filesHash: {text[:140]!r} is not a digest in hexadecimal digits")
    return text


# -- replies


def encode_requested_build(template: BuiltTemplate, build: TemplateBuild) -> Json:
    return {
        "templateID": template.id,
        "buildID": build.id,
        "public": False,
        "names": [template.name],
        "tags": list(build.tags),
        "aliases": [template.name],
    }


class BuildLogQuery(Struct):
    """The requested page of log entries."""

    offset: int = 0
    limit: int = MAX_LOG_PAGE
    level: int = 0  # its place in LEVELS


def decode_log_query(query: Mapping[str, str]) -> BuildLogQuery:
    level = query.get("level") or "debug"
    if level not in LOG_LEVELS:
        raise errors.InvalidRequest(f"level: it is one of {', '.join(LOG_LEVELS)}, not {level[:40]!r}")
    return BuildLogQuery(
        offset=parse_whole_number("logsOffset", query.get("logsOffset"), 0, 1 << 31) or 0,
        limit=parse_whole_number("limit", query.get("limit"), 1, MAX_LOG_PAGE) or MAX_LOG_PAGE,
        level=LOG_LEVELS.index(level),
    )


def encode_build_status(build: TemplateBuild, logs: Sequence[BuildLogEntry], page: BuildLogQuery) -> Json:
    chosen = [each for each in logs if LOG_LEVELS.index(each.level) >= page.level][
        page.offset : page.offset + page.limit
    ]
    reason = {} if build.reason is None else {"reason": _encode_failure_reason(build, logs)}
    return {
        "templateID": build.template,
        "buildID": build.id,
        "status": build.state,
        "logs": [each.message for each in chosen],
        "logEntries": [encode_log_entry(each) for each in chosen],
        **reason,
    }


def _encode_failure_reason(build: TemplateBuild, logs: Sequence[BuildLogEntry]) -> Json:
    last = [encode_log_entry(each) for each in logs[-10:]]
    step = {} if build.step is None else {"step": build.step}
    return {"message": build.reason, **step, "logEntries": last}


def encode_log_entry(each: BuildLogEntry) -> Json:
    step = {} if each.step is None else {"step": each.step}
    return {"timestamp": format_timestamp(each.at), "level": each.level, "message": each.message, **step}


def encode_tag(each: TemplateTag) -> Json:
    return {"tag": each.tag, "buildID": each.build, "createdAt": format_timestamp(each.created_at)}


def encode_listed_template(template: BuiltTemplate, builds: Sequence[TemplateBuild]) -> Json:
    """A template by its newest build, which is the first; all builds may be gone."""
    newest = builds[0] if builds else None
    return {
        **_encode_template_summary(template, newest),
        "buildID": "" if newest is None else newest.id,
        **encode_size_limits(Limits() if newest is None else newest.limits),
        "createdBy": None,
        "buildCount": len(builds),
        "envdVersion": ENVD_VERSION,
        "buildStatus": "error" if newest is None else newest.state,
    }


def encode_template_detail(template: BuiltTemplate, builds: Sequence[TemplateBuild]) -> Json:
    return {
        **_encode_template_summary(template, builds[0] if builds else None),
        "builds": [_encode_build(each) for each in builds],
    }


def _encode_template_summary(template: BuiltTemplate, newest: TemplateBuild | None) -> Json:
    updated_at = template.created_at if newest is None else newest.updated_at
    return {
        "templateID": template.id,
        "public": False,
        "aliases": [template.name],
        "names": [template.name],
        "createdAt": format_timestamp(template.created_at),
        "updatedAt": format_timestamp(updated_at),
        "lastSpawnedAt": None,
        "spawnCount": 0,
    }


def _encode_build(build: TemplateBuild) -> Json:
    finished = {"finishedAt": format_timestamp(build.updated_at)} if build.state in ("ready", "error") else {}
    return {
        "buildID": build.id,
        "status": build.state,
        "createdAt": format_timestamp(build.created_at),
        "updatedAt": format_timestamp(build.updated_at),
        **finished,
        **encode_size_limits(build.limits),
        "envdVersion": ENVD_VERSION,
    }
