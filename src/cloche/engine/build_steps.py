"""The steps of a template's build, done inside a sandbox and with no rights but those of its users."""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from cloche import errors
from cloche.engine.build_log import BuildLog, Lines
from cloche.engine.process import Exited
from cloche.engine.sandbox import Sandbox
from cloche.events import Output
from cloche.model import KIB, MAX_COMMAND_BYTES, MAX_STRING_BYTES, Launch, Struct, User, check_env
from cloche.store.builds import BuildFiles

StepKind = Literal["RUN", "COPY", "ENV", "WORKDIR", "USER"]

STEP_SECONDS = 1800.0
LOOK_SECONDS = 60.0  # that a sandbox has to say what variables there are
MAX_PATH_BYTES = 4096
MAX_VARIABLES = 1000  # of a template
MAX_ENV_BYTES = 256 * KIB  # of their names and values: they are kept with each build
SHELL = ("/bin/bash", "-l", "-c")
WRITABLE = "/home/user, /mnt/data, /app, /tmp, /var/tmp and /root"

# A program of the guest's, which every sandbox could run: by its text, as not every backend shows it by a path.
_COPYING = (Path(__file__).parent.parent / "guest" / "copying.py").read_text("utf-8")
_PLAIN = {"PATH": "/opt/cloche/front/bin:/opt/cloche/env/bin:/usr/local/bin:/usr/bin:/bin"}  # whatever steps have set
_USERS: dict[str, User] = {"user": "user", "1000": "user", "root": "root", "0": "root"}
_IDS = {"user": 1000, "root": 0}
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Step(Struct):
    kind: StepKind
    args: tuple[str, ...]
    files: str | None = None  # of a COPY: the client's digest of what is copied


class Workshop:
    """A sandbox in which steps are done one after the other: each sees what those before have set."""

    def __init__(self, sandbox: Sandbox, owner: str, files: BuildFiles, log: BuildLog, begin: Launch):
        self._sandbox = sandbox
        self._owner = owner
        self._files = files
        self._log = log
        self.user = begin.user
        self.cwd = begin.cwd
        self.env: dict[str, str] = {}  # that steps have set

    async def do(self, step: Step, name: str) -> None:
        """Raises TemplateBuildFailed; Gone where the sandbox has ended; QuotaExceeded where nothing more may run."""
        match step.kind:
            case "RUN":
                await self._run(step.args[0], _user(step.args[1], step.args[0]) if step.args[1:] else self.user, name)
            case "COPY":
                await self._copy(step, name)
            case "ENV":
                await self._set_env(step.args)
            case "WORKDIR":
                await self._set_cwd(step.args[0])
            case "USER":
                self.user = _user(step.args[0])

    async def _run(self, command: str, user: User, name: str) -> None:
        exited = await self._watch((*SHELL, command), user, self.env, name, counted=True)
        if exited.outcome != "ok" or exited.exit_code != 0:
            raise errors.TemplateBuildFailed(f"failed to run command '{command[:2000]}': {_how(exited)}")

    async def _watch(
        self, argv: tuple[str, ...], user: User, env: dict[str, str], name: str, *, counted: bool = False
    ) -> Exited:
        process = await self._sandbox.commands.start(
            argv, user=user, env=env, cwd=self.cwd, timeout_seconds=STEP_SECONDS, counted=counted
        )
        lines = Lines(self._log, name)
        async with process:
            async for event in process:
                if isinstance(event, Output):
                    lines.add(event.stream, event.text)
        lines.end()
        return process.exited or Exited(exit_code=-1, outcome="died")

    async def _copy(self, step: Step, name: str) -> None:
        source, target = step.args[0], self._absolute(step.args[1])
        user, _, _group = (step.args[2] if step.args[2:] else "").partition(":")
        mode = step.args[3] if step.args[3:] else ""
        assert step.files is not None
        archive = f"/tmp/.cloche-copy-{secrets.token_hex(8)}"
        try:
            await self._sandbox.files.write(
                archive, await self._files.chunks(self._owner, step.files), user="root", mode=0o600
            )
            uid = str(_IDS[_user(user) if user else self.user])
            program = ("python3", "-I", "-c", _COPYING)
            exited = await self._watch((*program, archive, source, target, uid, mode), "root", _PLAIN, name)
        except errors.FileNotFound:
            said = f"the files of COPY {source} were not uploaded, or are no longer kept: build again"
            raise errors.TemplateBuildFailed(said) from None
        finally:
            await self._discard(archive)
        if exited.exit_code != 0:
            raise errors.TemplateBuildFailed(
                f"failed to copy '{source}' to '{target}': {_how(exited)}; {WRITABLE} can be written"
            )

    async def _discard(self, archive: str) -> None:
        try:
            await self._sandbox.files.remove(archive, user="root")
        except (errors.NotFound, errors.FileError, errors.Gone):
            pass  # it never came, or the sandbox is gone with it

    async def _set_env(self, args: tuple[str, ...]) -> None:
        known = await self._variables(args[1::2])
        env = dict(self.env)
        for name, value in zip(args[::2], args[1::2], strict=True):
            env[name] = known[name] = expanded(value, known, MAX_STRING_BYTES)
            check_env({name: env[name]})
            await asyncio.sleep(0)  # there can be many, and long ones
        check_template_env(env)
        self.env = env

    async def _set_cwd(self, path: str) -> None:
        target = self._absolute(expanded(path, await self._variables([path]), MAX_PATH_BYTES))
        try:
            await self._sandbox.files.make_dir(target, user="root", owner=self.user)
        except errors.FileError as error:
            raise errors.TemplateBuildFailed(f"failed to create workdir: {error}; {WRITABLE} can be written") from None
        self.cwd = target

    async def _variables(self, texts: Sequence[str]) -> dict[str, str]:
        """Those that programs have, as far as one of these texts may name one."""
        if not any("$" in text for text in texts):
            return {}
        process = await self._sandbox.commands.start(
            ["/usr/bin/env", "-0"],
            user=self.user,
            env=self.env,
            cwd=self.cwd,
            timeout_seconds=LOOK_SECONDS,
            counted=False,
        )
        said, size = [], 0
        async with process:
            async for event in process:
                if isinstance(event, Output) and event.stream == "stdout":
                    said.append(event.text)
                    size += len(event.text)
                    if size > 2 * MAX_COMMAND_BYTES:  # steps can change what any program does
                        raise errors.TemplateBuildFailed("failed to read the variables: there is no end of them")
        return dict(pair.partition("=")[::2] for pair in "".join(said).split("\0") if pair)

    def _absolute(self, path: str) -> str:
        """A trailing slash is kept: to a copy it says that a directory is meant. Raises TemplateBuildFailed."""
        home = "/root" if self.user == "root" else "/home/user"
        if path == "~" or path.startswith("~/"):
            path = home + path[1:]
        joined = posixpath.normpath(posixpath.join(self.cwd, path))
        if len(joined.encode("utf-8", "surrogatepass")) > MAX_PATH_BYTES:
            raise errors.TemplateBuildFailed(f"the path {joined[:100]}... has more than {MAX_PATH_BYTES} bytes")
        return joined + "/" if path.endswith("/") and joined != "/" else joined


def expanded(text: str, known: Mapping[str, str], max_chars: int) -> str:
    """With the values of variables that are known; what only looks like one stays as it is.

    Raises TemplateBuildFailed as soon as it is too long: a short text can name a long value many times.
    """
    parts: list[str] = []
    size = end = 0
    for match in _VARIABLE.finditer(text):
        parts += (text[end : match.start()], known.get(match[1] or match[2], match[0]))
        size += len(parts[-2]) + len(parts[-1])
        end = match.end()
        if size > max_chars:
            break
    parts.append(text[end:])
    if size + len(parts[-1]) > max_chars:
        raise errors.TemplateBuildFailed(
            f"{text[:100]!r} has more than {max_chars} bytes once its variables have their values: put it into a file"
        )
    return "".join(parts)


def check_template_env(env: Mapping[str, str]) -> None:
    """Raises TemplateBuildFailed where that is more than a template can have."""
    if len(env) > MAX_VARIABLES:
        raise errors.TemplateBuildFailed(f"a template can have {MAX_VARIABLES} variables, not {len(env)}")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in (*env, *env.values()))
    if size > MAX_ENV_BYTES:
        raise errors.TemplateBuildFailed(
            f"a template can have variables of {MAX_ENV_BYTES} bytes together, not {size}: put what is long into a file"
        )


def _user(name: str, command: str | None = None) -> User:
    if name in _USERS:
        return _USERS[name]
    what = f"invalid username: '{name[:100]}'"
    if command is not None:  # in the words that E2B's clients know
        what = f"failed to run command '{command[:2000]}': command failed: unauthenticated: {what}"
    raise errors.TemplateBuildFailed(f"{what} (a sandbox has the users user and root)")


def _how(exited: Exited) -> str:
    if exited.outcome == "ok":
        return f"exit status {exited.exit_code}"
    return exited.outcome.replace("_", " ") + (f" ({exited.reason})" if exited.reason else "")
